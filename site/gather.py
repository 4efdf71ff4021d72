"""Gathers the pages of the site in a folder: the documentation, the README, the tutorials and the public names."""

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def page_of(notebook: Path) -> str:
    """Return a notebook as Markdown: code, and below it what was printed."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
        parts += ["```text\n" + "".join(output["text"]) + "```" for output in cell.get("outputs", [])]
    return "\n\n".join(parts) + "\n"


def public_names() -> list[str]:
    """Return the public names of the package, without importing it."""
    stub = (ROOT / "src/infalign/__init__.pyi").read_text(encoding="utf-8")
    return sorted(re.findall(r"^from \S+ import (\w+)", stub, re.MULTILINE))


def linked(text: str) -> str:
    """Return a page of the repository's root or of docs with the links of the site."""
    text = re.sub(r"\]\((\.\./)?benchmarks/results/", "](results/", text).replace("](../../docs/", "](../")
    text = text.replace("](docs/", "](").replace("](src/infalign/recipe/built_in/", "](recipes/")
    return re.sub(r"(\]\([^)\s]+)\.ipynb\)", r"\1.md)", text)


def gather(folder: Path) -> None:
    """Write the pages to ``folder``, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.ipynb"))
    shutil.copytree(ROOT / "benchmarks" / "results", folder / "results")
    shutil.copytree(
        ROOT / "src/infalign/recipe/built_in", folder / "recipes", ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "Dockerfile"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "README.md", folder / "index.md")
    pages = {f"tutorials/{path.stem}.md": page_of(path) for path in (ROOT / "docs/tutorials").glob("*.ipynb")}
    names = [f"::: infalign.{name}" for name in public_names()]
    pages["python.md"] = "\n\n".join(["# Python", "`from infalign import …` has these names.", *names, ""])
    for name, text in pages.items():
        (folder / name).write_text(text, encoding="utf-8")
    for page in folder.rglob("*.md"):
        page.write_text(linked(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    gather(Path(sys.argv[1]))
