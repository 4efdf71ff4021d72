"""What is done, what is not and why: every kind of reason, and the digests of what lies outside the run directory."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import micro
import pytest
from rows import written

from infalign.core.storage import read_record, write_record
from infalign.pipeline.pending import changes, pending
from infalign.pipeline.units import identify
from infalign.recipe.fingerprints import Digests, settings_of
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.steps import whole_run
from infalign.steps.run import Run

REWARD = "def score(prompts, responses):\n    return [float(len(text)) for text in responses]\n"
KL = "kl_budget 1.0 → 0.8"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file of rows, a policy, a module with a reward function and a whole run."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [{"prompt": f"Say {i}.", "chosen": f"Here is {i}.", "rejected": "No."} for i in range(200)]
    written(folder / "rows.jsonl", rows)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("raise ImportError('who looks at a digest imports nothing')\n")
    (folder / "package" / "rewards.py").write_text(REWARD)
    micro.write_policy(folder / "policy")
    micro.done(recipe(folder))
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def recipe(folder: Path, *overrides: str) -> Recipe:
    """Return the recipe of the run in a folder, with changes."""
    settings = micro.given(folder / "run", str(folder / "policy"))
    data = {"folder": str(folder), "sources": [{"path": "rows.jsonl"}], "max_prompt_tokens": 180}
    settings |= {"data": data, "report_to": []}
    del settings["gold"]
    return load_recipe(micro.write(folder / "recipe.yaml", settings), list(overrides))


def why(folder: Path, *overrides: str) -> dict[str, str]:
    """Return the units before the evaluation that are stale or partial, and why."""
    asked = Run.of(recipe(folder, *overrides))
    todo = pending(whole_run.units(asked, until="train"), asked.layout.root)
    return {name: found.because for name, found in todo.items() if found.state != "missing"}


def test_scripts_can_ask_whether_anything_is_left(main: Any, folder: Path) -> None:
    """Exit code 0 if nothing is, else 4; the states are there in words and as JSON, by run directory and by recipe."""
    path, root = recipe(folder) and folder / "recipe.yaml", folder / "run"
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    assert "20 of 20 done in" in micro.answer("status", root)
    left = ["evaluate-aware", "results", "card-aware", "report"]
    (root / "stages" / "evaluate-aware.json").unlink()
    code, out, _ = main("status", path, "--json")
    assert code == 4
    found = json.loads(out)
    assert [unit["name"] for unit in found["units"] if unit["state"] != "done"] == left
    assert {unit["name"]: unit["because"] for unit in found["units"]}["results"] == "follows evaluate-aware"
    assert not found["done"]
    assert main("status", root, "--json")[:2] == (code, out)
    del before[root / "stages" / "evaluate-aware.json"], before[root / "stages"]
    assert all(file.stat().st_mtime_ns == then for file, then in before.items())


@pytest.mark.parametrize(
    ("override", "reasons"),
    [
        ("policies.aware.kl_budget=0.8", {"law-aware": KL, "train-aware": f"policies.aware.{KL}; follows law-aware"}),
        (
            "rollout.k=8",
            {f"rollout-{i}": "rollout.k 6 → 8; 18 of 24 responses" for i in range(4)}
            | {f"score-{i}": f"follows rollout-{i}; rollout.k 6 → 8" for i in range(4)}
            | dict.fromkeys(["calibrate", "law-aware"], "follows score-0, score-1, score-2 and 1 more")
            | {"train-aware": "follows calibrate, law-aware"},
        ),
    ],
)
def test_the_setting_that_changed_is_named(override: str, reasons: dict[str, str], folder: Path) -> None:
    """A unit whose own settings changed gives key, old and new value, one further down what it follows."""
    assert why(folder, override) == reasons


def test_what_lies_outside_counts_by_its_content(folder: Path) -> None:
    """Moved, everything is as it was; rows, model or reward function changed in place are named."""
    assert why(folder) == {}
    moved = Path(shutil.move(folder / "policy", folder / "elsewhere"))
    assert why(folder, f"policy.model={moved}") == {}
    shutil.move(moved, folder / "policy")
    with (folder / "policy" / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert why(folder)["data"] == "the content of policy.model changed"
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "Say.", "chosen": "Here.", "rejected": "No."}\n')
    assert why(folder)["data"].startswith("the content of data.sources.0.path (rows.jsonl) changed; ")
    (folder / "rows.jsonl").unlink()
    assert why(folder)["data"].startswith("the content of data.sources.0.path (rows.jsonl) is not found; ")


def test_an_option_that_did_not_exist_is_one_that_was_not_given(folder: Path) -> None:
    """What an earlier version made, which knew fewer options, has the keys of now, so nothing is done again."""
    units = whole_run.units(Run.of(recipe(folder)))
    of_train = next(unit.settings["policies"]["aware"] for unit in units if unit.name == "train-aware")
    assert of_train["guide"] is None
    now = identify(units)
    del of_train["guide"]
    assert identify(units) == now
    of_train["guide"] = {}
    assert identify(units)["train-aware"].key != now["train-aware"].key


def test_a_reward_function_counts_by_the_source_of_its_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is found without importing its package; another source changes what depends on it, and no more."""
    monkeypatch.syspath_prepend(folder)

    def settings() -> Any:
        asked = recipe(folder, "reward.function=package.rewards:score", "judge.function=package.rewards:score")
        return settings_of(asked, Digests(folder / "digests.json"))["reward"]

    before = settings()
    (folder / "package" / "rewards.py").write_text(REWARD.replace("float", "-float"))
    clause = "the content of reward.function (package.rewards:score) changed"
    assert list(changes({"reward": before}, {"reward": settings()})) == [clause]
    (folder / "package" / "rewards.py").unlink()
    assert settings()["function"] == {"name": "package.rewards:score", "content": None}
    assert "package" not in sys.modules


def test_a_data_set_in_a_folder_counts_by_all_its_files(tmp_path: Path) -> None:
    """A row that was added to a folder that `datasets` reads is noticed, as in a file of the data."""
    settings = micro.given(tmp_path / "run", "owner/name") | {"data": {"sources": [{"hub": str(tmp_path / "rows")}]}}
    asked = load_recipe(micro.write(tmp_path / "recipe.yaml", settings))
    (tmp_path / "rows" / "train").mkdir(parents=True)
    found = []
    for text in ("1", "1", "2"):
        (tmp_path / "rows" / "train" / "rows.csv").write_text(text)
        found.append(settings_of(asked, Digests(tmp_path / "digests.json"))["data"]["sources"][0]["hub"]["content"])
    assert found[0] == found[1] != found[2]


def test_a_digest_is_taken_once_for_each_state_of_a_file(tmp_path: Path) -> None:
    """As long as size and time of change stay it is the one that was kept; what is not asked for is forgotten."""
    file, kept = tmp_path / "weights", tmp_path / "digests.json"
    file.write_text("one")
    first = Digests(kept)
    digest = first(file)
    first.save()
    state = file.stat()
    file.write_text("two")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = Digests(kept)
    assert second(file) == digest
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert second(file) != digest
    Digests(kept).save()
    assert read_record(kept) == {}


def test_records_and_outputs_that_do_not_hold_say_why(folder: Path) -> None:
    """An output that is gone and an input that was made anew since."""
    stages = folder / "run" / "stages"
    shutil.rmtree(folder / "run" / "models" / "aware")
    assert why(folder) == {"train-aware": "its output is missing"}
    record = read_record(stages / "train-aware.json")
    record["needs"] = {"calibrate": "another"}
    write_record(stages / "train-aware.json", record)
    assert why(folder) == {"train-aware": "calibrate was redone; now needs law-aware; its output is missing"}


def test_an_attempt_that_was_stopped_says_how_far_it_came(folder: Path) -> None:
    """A training by its last checkpoint, scores and rollouts by what is stored; with other settings it is missing."""
    root = folder / "run"
    (root / "stages" / "train-aware.json").unlink()
    saved = root / "checkpoints" / "aware"
    for step in (9, 30):
        (saved / f"checkpoint-{step}").mkdir(parents=True)
        state = json.dumps({"global_step": step, "max_steps": 120})
        (saved / f"checkpoint-{step}" / "trainer_state.json").write_text(state)
    (saved / "checkpoint-60").mkdir()
    (saved / "checkpoint-60" / "trainer_state.json").write_text("{")  # at this moment being written
    assert why(folder) == {"train-aware": "checkpoint at step 30 of 120"}
    asked = Run.of(recipe(folder))
    assert pending(whole_run.units(asked), asked.layout.root)["train-aware"].share == 0.25
    assert why(folder, "policies.aware.kl_budget=0.8") == {"law-aware": KL}
    (root / "stages" / "score-1.json").unlink()
    assert why(folder)["score-1"] == "18 responses scored"
    (root / "stages" / "rollout-1.json").unlink()
    assert why(folder)["rollout-1"] == "18 of 18 responses"


def test_a_run_says_once_why_it_does_something_again(folder: Path) -> None:
    """The reasons stand before the work, those of units that share one on one line, and then they are gone."""
    for part in (0, 1):
        (folder / "run" / "scores" / f"part-{part}.parquet").unlink()
    said = micro.printed(recipe(folder), until="calibrate")
    assert "again: score-0, score-1 (its output is missing)" in said
    assert "again: calibrate, law-aware (follows score-0, score-1)" in said
    said = micro.printed(recipe(folder), until="calibrate")
    assert said == ["11 of 11 steps are already done"]


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"a": None}, {"a": {"b": 1}}, ['a none → {"b": 1}']),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a.1 2 → 3"]),
        ({"a": [1]}, {"a": [1, 3]}, ["a [1] → [1, 3]"]),
        ({"a": {"b": True}}, {"a": {}}, ["a.b true → none"]),
        ({"a": "owner/name"}, {"a": {"content": "0"}}, ["a owner/name → a local one"]),
        ({"a": {"content": "0", "name": "x:y"}}, {"a": {"content": "0", "name": "x:z"}}, ["a x:y → x:z"]),
        ({"a": "b" * 80}, {"a": ""}, [f"a {'b' * 59}… → "]),
    ],
)
def test_a_change_is_one_clause(before: Any, now: Any, said: list[str]) -> None:
    """Key, old and new value, at the depth where they differ; long values are cut."""
    assert list(changes(before, now)) == said
