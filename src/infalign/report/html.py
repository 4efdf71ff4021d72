"""What HTML pages have in common: one look, helpers of templates, and files that are embedded."""

from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

from infalign.core.display import amount, gain, number, ratio, share
from infalign.core.errors import ConfigError

CONTROL = {c: "\N{REPLACEMENT CHARACTER}" for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\t\n\r"}


def check_drawable(what: str = "the report") -> None:
    """Raise ConfigError, which says ``what`` needs them, without matplotlib or jinja2."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{what} needs matplotlib and jinja2; pip install 'infalign[report]'") from error


def template(package: str, name: str) -> Any:
    """Return a template that lies in ``package``; it may extend page.html.j2 and import the macros of parts.html.j2.

    Control characters, which a model may write and a page cannot hold, are shown as U+FFFD wherever they are.
    """
    import jinja2

    places = [jinja2.PackageLoader(place, ".") for place in dict.fromkeys((package, __package__))]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(places),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value.translate(CONTROL) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"share": share, "amount": amount, "gain": gain, "number": number, "ratio": ratio}
    return environment.get_template(name)


def embedded(path: Path, kind: str) -> str:
    """Return a file as a ``data:`` address, with which the page is whole wherever it is sent."""
    return f"data:{kind};base64,{b64encode(path.read_bytes()).decode()}"


def script_hash(page: str) -> str:
    """Return the name of a page's script by which a Content-Security-Policy allows it and no other."""
    script = page.partition("<script>")[2].partition("</script>")[0]
    return f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"
