"""Templates of HTML pages."""

from typing import Any

from infalign.core.display import amount, gain, number, ratio, share


def html_template(name: str) -> Any:
    """Return the template of a page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infalign.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "amount": amount, "gain": gain, "number": number, "ratio": ratio}
    return environment.get_template(name)
