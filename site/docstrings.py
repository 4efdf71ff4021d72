"""Makes Markdown of docstrings: examples become code, and what names a class or function is only marked as code."""

import re
from typing import Any

from griffe import Extension, Object


class Docstrings(Extension):
    """Fences lines that begin with ``>>>``, which Markdown takes for a quotation, and drops ``:class:``."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of what was found."""
        if obj.docstring:
            text = re.sub(r"(?m)^(>>> (?:.+\n?)+)", r"```pycon\n\1\n```\n", obj.docstring.value)
            obj.docstring.value = re.sub(r":(?:class|func|meth):`", "`", text)
