"""Templates of HTML pages."""

from typing import Any

from infalign.core.display import amount, gain, number, ratio, share

DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # by which a text can show another than it is
CONTROL = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0), *DIRECTIONS} - {*b"\t\n\r"}, "\N{REPLACEMENT CHARACTER}")


def html_template(name: str) -> Any:
    """Return the template of a page. Control characters, which a page cannot hold, become U+FFFD."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infalign.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value.translate(CONTROL) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "amount": amount, "gain": gain, "number": number, "ratio": ratio}
    return environment.get_template(name)
