"""Templates of HTML pages."""

from base64 import b64encode
from pathlib import Path
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


def embedded(path: Path, kind: str) -> str:
    """Return a file as a ``data:`` address, with which a page is whole wherever it is sent."""
    return f"data:{kind};base64,{b64encode(path.read_bytes()).decode()}"
