"""The pages: their code runs and prints what they show; theory's commands run, and its table is what they say."""

import ast
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gather import gather
from messages import text_of

import infalign
from infalign import cli
from infalign.method.procedures import parse_procedure
from infalign.recipe.reading import load_recipe
from infalign.theory.choose import choose

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / "docs" / name).read_text(encoding="utf-8")
    for name in ("theory.md", "derivations.md", "evaluation.md", "measure.md", "method.md")
}
PAGE = PAGES["theory.md"]
TYPED = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
ROLLOUTS = 16, 100, 400


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the Python blocks, each with what the text block after it shows."""
    found = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(found) == page.count("```python") == page.count("```text")
    return found


def rows() -> list[list[str]]:
    """Return the cells of the table of recommendations."""
    _, _, table = PAGE.partition("| served | KL |")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n\n")[0].splitlines()[2:]]


QUICK = [["`best-of-4`", "0.5"], ["`worst-of-4`", "0.5"]]


def computed(served: str, kl: str, rollouts: int) -> list[str]:
    """Return the cells for K = ``rollouts``: the recommendation, exp:±10 and identity."""
    (unknown,) = re.findall(r"`(0\.25\*.*?)`", PAGE)
    procedure = parse_procedure(unknown if served == "unknown N" else served.strip("`"))
    ranking = choose(procedure, kl=float(kl), rollouts=rollouts)
    shown = {}
    for found in ranking.candidates:
        limits = [found.generalizing] if found.memorizing is None else [found.memorizing, found.generalizing]
        name = found.transform.name.removesuffix(f":{procedure.name}")
        shown[name] = "–".join(f"{100 * wins:.1f}" for wins in limits)
    best = ranking.recommended.transform.name.removesuffix(f":{procedure.name}")
    ten = shown.get("exp:10", shown.get("exp:-10"))
    return [f"`{best}` {shown[best]}", str(ten), shown["identity"]]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_prints_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block runs after those before it, and the text after it is its output."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for code, text in blocks(PAGES[page]):
        exec(code, namespace)
        assert capsys.readouterr().out == text, code


@pytest.mark.parametrize("command", re.findall(r"`infalign ([a-z]+ --procedure [^`]*)`", PAGE))
def test_the_commands_run(command: str, main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says to type works."""
    monkeypatch.chdir(tmp_path)
    assert main(*command.split())[0] == 0


@pytest.mark.parametrize("command", re.findall(r"(?m)^infalign (pass-at-k tests/logs/.*)", PAGES["measure.md"]))
def test_logs_are_measured_as_the_page_says(command: str, main: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command prints a table of 80 characters; that of inspect_ai asks for its package where it is absent."""
    monkeypatch.chdir(ROOT)
    code, out, err = main(*shlex.split(command))
    if "inspect_ai" in command and find_spec("inspect_ai") is None:
        assert (code, "pip install inspect_ai" in err) == (2, True)
        return
    assert (code, err) == (0, "")
    assert "pass@1" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("command", re.findall(r"^infalign ([^#<>\n]*)", TYPED, re.MULTILINE))
def test_the_commands_of_the_pages_are_understood(command: str) -> None:
    """What a page says to type has the options of the command line."""
    parsed, _, _ = cli.app.parse_args(shlex.split(command), exit_on_error=False, print_error=False)
    assert callable(parsed)


@pytest.mark.parametrize("rollouts", [pytest.param(k, marks=[pytest.mark.slow] * (k != 100)) for k in ROLLOUTS])
@pytest.mark.parametrize("row", [pytest.param(r, marks=[pytest.mark.slow] * (r[:2] not in QUICK)) for r in rows()])
def test_the_table_says_what_choose_says(row: list[str], rollouts: int) -> None:
    """Every cell is what ranking the transformations gives; those of exp:±10 and identity are for K = 100."""
    best, *others = computed(*row[:2], rollouts)
    assert row[2 + ROLLOUTS.index(rollouts)] == best
    assert rollouts != 100 or row[5:] == others


def test_the_sentences_of_troubleshooting_are_those_of_the_code() -> None:
    """Every part of every sentence of its tables, between what is filled in, stands in the source."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sentences = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr)]
    code = "\n".join(filter(None, map(text_of, nodes)))
    assert len(sentences) == page.count("\n| ") - page.count("| message |")
    assert [part for said in sentences for part in said.split("…") if part.strip() not in code] == []


PATTERNS = ("docs/**/*.md", "docs/**/*.ipynb", "benchmarks/**/*.md")
DOCUMENTS = [file.relative_to(ROOT) for pattern in PATTERNS for file in sorted(ROOT.glob(pattern))]


def test_readme_and_guide_begin_with_the_same_valid_recipe(tmp_path: Path) -> None:
    """Who pastes it, and has such rows and the model, has a run that compares ours with ordinary RLHF."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/guide.md")]
    first, second = (page.partition("```yaml\n")[2].partition("```")[0] for page in pages)
    assert first == second
    (tmp_path / "recipe.yaml").write_text(first, encoding="utf-8")
    policies = load_recipe(tmp_path / "recipe.yaml", []).policies
    assert [policy.transform.name for policy in policies.values()] == ["exp:10", "raw"]
    assert policies["aware"].guide == policies["ordinary"].guide


@pytest.mark.parametrize("page", [Path("README.md"), *DOCUMENTS], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link is to a file that is there, and to a heading or anchor of it."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.exists(), target
        if heading:
            text = file.read_text(encoding="utf-8")
            titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
            assert heading in [title.replace(" ", "-") for title in titles] or f'<a id="{heading}">' in text, target


def test_every_page_of_the_site_is_in_its_navigation(tmp_path: Path) -> None:
    """What is gathered is listed; the page of Python has every public name, that of a tutorial what it printed."""
    gather(tmp_path / "docs")
    listed = re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    pages = {str(page.relative_to(tmp_path / "docs")): page.read_text("utf-8") for page in tmp_path.rglob("*.md")}
    assert sorted(listed) == sorted(pages)
    assert re.findall(r"^::: infalign\.(\w+)$", pages["python.md"], re.MULTILINE) == infalign.__all__
    assert "```text\nh(0.1) is 0.0" in pages["tutorials/my_procedure.md"]
    assert ".ipynb)" not in "".join(pages.values())


def test_every_result_is_listed_with_its_question_and_newest_date() -> None:
    """A page begins with its question and conclusion, and has the date that the list has, and none that is newer."""
    folder = ROOT / "benchmarks" / "results"
    listed = re.findall(r"(?m)^\| \[(.+)\]\((.+)\) \| .+ \| (\S+) \|$", (folder / "README.md").read_text("utf-8"))
    assert {name for _, name, _ in listed} == {path.name for path in folder.glob("*.md")} - {"README.md"}
    for question, name, date in listed:
        text = (folder / name).read_text(encoding="utf-8")
        title, conclusion = text.split("\n\n")[:2]
        assert title == f"# {question}"
        assert conclusion[0] not in "#|"
        assert max(re.findall(r"\d{4}-\d\d-\d\d", text)) == date, name


def test_every_benchmark_is_listed_and_lists_no_other() -> None:
    """The table of benchmarks has every script, with its command."""
    folder = ROOT / "benchmarks"
    listed = re.findall(r"`python benchmarks/([\w/]+\.py)", (folder / "README.md").read_text(encoding="utf-8"))
    scripts = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    modules = ("enumerable", "finite_model", "finite_optima", "majority_optimum")
    shared = ("seeds", "best_of_n", "methods", "method_policies", "train_methods", "rank_correlation")
    shared += ("run_files", "plots", "small_models")
    scripts -= {f"{name}.py" for name in (*shared, *(f"optima/{name}" for name in modules))}
    assert set(listed) == scripts
