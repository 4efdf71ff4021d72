"""Lists every text of the package that a user may read: ``python tests/messages.py > build/messages.txt``."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src/infalign"
MIN_WORDS = 3  # shorter strings are keys, names and patterns


def text_of(node: ast.expr) -> str | None:
    """Return a string as it is written, with the expressions of an f-string in braces; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(text_of(part) or f"{{{ast.unparse(getattr(part, 'value', part))}}}" for part in node.values)


def texts_of(tree: ast.AST, *, docstrings: bool) -> Iterator[tuple[int, str]]:
    """Yield line and text of each message; with ``docstrings`` also those of functions: a command's help."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr) and (text := text_of(node)) is not None:
            words = re.findall(r"[A-Za-z]{2,}", re.sub(r"\{.*?\}", "", text))
            if len(words) >= MIN_WORDS and " " in text.strip():
                yield node.lineno, text
        elif (docstrings and isinstance(tree, ast.FunctionDef)) or not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            yield from texts_of(node, docstrings=docstrings)


def messages() -> Iterator[str]:
    """Yield ``file:line: text`` for every message, and the pages that are templates as they are."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, text in texts_of(tree, docstrings=path.parent.name == "cli"):
            yield f"{path.relative_to(PACKAGE)}:{line}: {text}"
    for path in sorted(PACKAGE.rglob("*.j2")):
        yield f"{path.relative_to(PACKAGE)}:\n{path.read_text(encoding='utf-8')}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(messages()) + "\n")
