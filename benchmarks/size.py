"""How large the code base is, beside its limits: ``python benchmarks/size.py``. Exits with 1 where one is exceeded.

Lines are those of .py and .j2 files, statements those of Python's grammar without docstrings. Parameters are counted
without self and cls, and not for commands, whose parameters are options.
"""

import ast
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
}


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
    keys = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8").splitlines()
    found = {
        "source, lines": total,
        "source, statements": sum(len(list(statements(tree))) for tree in trees.values()),
        "tests, lines": sum(map(count_lines, (ROOT / "tests").rglob("*.py"))),
        "largest room, % of the source": round(100 * most / total, 1),
        "longest file, lines": max(lines.values()),
        "most parameters of a function": max(functions.values()),
        "keys of a recipe, rows": sum(line.startswith("| `") for line in keys),
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
    return int(any(found[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
