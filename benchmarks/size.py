"""How large the code base is, beside its limits: ``python benchmarks/size.py``. Exits with 1 where one is exceeded.

Lines are those of .py and .j2 files, statements those of Python's grammar without docstrings. Parameters are counted
without self and cls, and not for commands, whose parameters are options. An import of one of our
modules, or of a name that infalign/__init__.pyi has not, is private.
"""

import ast
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "source, lines": 27_024,
    "source, statements": 14_692,
    "tests, lines": 21_500,
    "largest room, % of the source": 13,
    "longest file, lines": 400,
    "most parameters of a function": 6,
    "keys of a recipe, rows": 100,
    "private imports of examples": 10,
}
EXAMPLES = ("benchmarks", "papers", "docs/tutorials")  # written with the public names


def count_lines(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module, without texts that stand alone."""
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if isinstance(node, ast.stmt) and not is_text:
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of a function's parameters."""
    given = function.args
    names = [one.arg for one in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return len([name for name in names if name not in ("self", "cls")])


def code_of(path: Path) -> str:
    """Return the code of a module or a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = (cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return "\n".join("".join(lines) for lines in cells)


def is_private(node: ast.AST, public: set[str]) -> bool:
    """Return whether a node imports a module of ours, or a name that is not public."""
    match node:
        case ast.Import(names):
            return any(one.name.startswith("infalign.") for one in names)
        case ast.ImportFrom("infalign", names):
            return not {one.name for one in names} <= public
        case ast.ImportFrom(str(module)):
            return module.startswith("infalign.")
    return False


def main() -> int:
    """Print each number beside its limit, and what exceeds it."""
    source = ROOT / "src" / "infalign"
    lines = {path: count_lines(path) for ending in ("py", "j2") for path in source.rglob(f"*.{ending}")}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in lines if path.suffix == ".py"}
    rooms = Counter[str]()
    for path, count in lines.items():
        rooms[path.relative_to(source).parts[0]] += count
    (largest, most), total = rooms.most_common(1)[0], sum(lines.values())
    functions = {
        f"{path.relative_to(source)}: {node.name}": parameters(node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and source / "cli" not in path.parents
    }
    public = set(re.findall(r"import (\w+)", (source / "__init__.pyi").read_text(encoding="utf-8")))
    examples = (path for folder in EXAMPLES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".ipynb"))
    private = {path: sum(is_private(node, public) for node in ast.walk(ast.parse(code_of(path)))) for path in examples}
    keys = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8").splitlines()
    found = {
        "source, lines": total,
        "source, statements": sum(len(list(statements(tree))) for tree in trees.values()),
        "tests, lines": sum(map(count_lines, (ROOT / "tests").rglob("*.py"))),
        "largest room, % of the source": round(100 * most / total, 1),
        "longest file, lines": max(lines.values()),
        "most parameters of a function": max(functions.values()),
        "keys of a recipe, rows": sum(line.startswith("| `") for line in keys),
        "private imports of examples": sum(private.values()),
    }
    for name, limit in LIMITS.items():
        print(f"{name:32}{found[name]:>10,}   at most {limit:>7,}{'' if found[name] <= limit else '   exceeded'}")
    print(f"the largest room is {largest}")
    for path, count in lines.items():
        if count > LIMITS["longest file, lines"]:
            print(f"{path.relative_to(source)}: {count} lines")
    for name, count in functions.items():
        if count > LIMITS["most parameters of a function"]:
            print(f"{name}: {count} parameters")
    for path, count in sorted(private.items(), key=lambda item: -item[1]):
        if count:
            print(f"{path.relative_to(ROOT)}: {count} private imports")
    return int(any(found[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other filters, for `| head`
    sys.exit(main())
