"""The tutorials: runs the code of a notebook, and with ``python tests/notebooks.py`` stores what it prints."""

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells with code, in their order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def stored(cell: dict[str, Any]) -> str:
    """Return what the notebook shows below a cell."""
    return "".join(line for output in cell["outputs"] for line in output["text"])


def run(notebook: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Run all code in one namespace, in the working directory; return the namespace and what each cell prints."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in code_cells(notebook):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            exec("".join(cell["source"]), namespace)
        printed.append(out.getvalue())
    return namespace, printed


def main() -> None:
    """Run every tutorial in a folder of its own and store what its cells print."""
    for path in TUTORIALS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            _, printed = run(notebook)
        for number, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), start=1):
            output = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
            cell |= {"execution_count": number, "outputs": [output] if text else []}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
