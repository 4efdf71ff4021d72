"""What becomes of rows in a run: columns that no format defines go along, and what a chat template refuses is named."""

import json
from pathlib import Path
from typing import Any

import micro
import pytest
from rows import assistant, user, written

from infalign.core.storage import read_table
from infalign.models.tokenizers import read_template

TEMPLATE = "{# name, tools #}{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
KEPT = {"answer": "007", "day": "2024-01-02", "level": 7, "share": 0.5, "none": None, "tags": ["NA"], "in": {"a": 1}}
TAKEN = {"responses": ["An old answer."], "trainer_state": "old"}
ROWS = [{"question": f"What is {i} and {i}?", "id": i, **KEPT, **TAKEN} for i in range(16)]
TALK = [user("Hi"), assistant("Hello.")]


@pytest.fixture
def reading(model: str, tmp_path: Path) -> Any:
    """Return what writes a recipe that reads some rows with a template that refuses system turns."""
    (tmp_path / "strict.jinja").write_text(TEMPLATE + read_template("plain"))

    def write(rows: list[dict[str, Any]]) -> str:
        recipe = micro.given(tmp_path / "run", model)
        recipe["policy"]["chat_template"] = "strict.jinja"
        source = {"path": str(written(tmp_path / "rows.jsonl", rows))}
        recipe["data"] = {"sources": [source], "test_fraction": 0.4, "max_prompt_tokens": 180}
        recipe["rollout"] = {"prompts": 4, "k": 2, "max_new_tokens": 4}
        del recipe["judge"]
        return micro.write(tmp_path / "recipe.yaml", recipe)

    return write


def test_columns_go_along_to_rollouts_scores_and_training(main: Any, tmp_path: Path, reading: Any) -> None:
    """Values keep type and spelling in each table, but for names that rewards get something else by, said once."""
    out = micro.answer("run", reading(ROWS), "--until", "calibrate")
    assert out.count("columns kept unchanged: answer, day, id, in, level, none, share, tags\n") == 1
    assert [out.count(f"the column {name} is left out: a reward function gets ") for name in TAKEN] == [1, 1]
    root = tmp_path / "run"
    for pattern in ("data/t*_prompts", "rollouts/part-*/part-*", "scores/part-*/part-*", "scores/part-*", "calibrated"):
        tables = [read_table(path) for path in root.glob(f"{pattern}.parquet")]
        kept = [json.loads(text) for table in tables for text in table["columns"].to_pylist()]
        assert kept
        assert all(columns == {"id": columns["id"], **KEPT} for columns in kept)
    code, _, err = main("run", tmp_path / "recipe.yaml", "--set", f"policy.fit={json.dumps(micro.FIT)}")
    assert code == 3
    assert "policy.fit needs demonstrations or pairs, but the data has only prompts" in err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"system": "Be brief.", "question": "Hi?"}, "no system turn"),
        ({"messages": [user("Hi") | {"name": "Ann"}, assistant("Hello.")]}, "the chat template does not use name"),
        ({"messages": TALK, "tools": [{"name": "sky"}]}, "the chat template does not use tools"),
        ({"messages": [*TALK[:1], {"role": "assistant", "tool_calls": [{"name": "sky"}]}]}, "does not use tool_calls"),
    ],
)
def test_a_row_the_template_refuses_is_invalid(main: Any, tmp_path: Path, reading: Any, row: Any, said: str) -> None:
    """It is named by file and line, also where a field would be lost, and left out and listed if that is allowed."""
    words, place = ("run", reading([*ROWS, row]), "--until", "data"), f"{tmp_path / 'rows.jsonl'} line 17: "
    code, _, err = main(*words)
    assert (code, place in err, said in err) == (3, True, True)
    assert main(*words, "--skip-invalid")[0] == 0
    (listed,) = (tmp_path / "run" / "data" / "skipped.txt").read_text().splitlines()
    assert listed.startswith(place)
    assert said in listed


SKY = [{"type": "function", "function": {"name": "sky", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        *(({"answer": answer}, "answer") for answer in ("8", None)),
        *(({"tools": SKY}, "tools"), ({"reward_model": {"ground_truth": "8"}}, "reward_model"), ({"id": 99}, None)),
    ],
)
def test_one_question_with_two_truths_is_refused(
    main: Any, tmp_path: Path, reading: Any, other: dict[str, Any], named: str | None
) -> None:
    """Both rows are named if a reward or the template reads what differs; nobody gets another column that differs."""
    function = "def right(prompts, responses, answer, ground_truth=0, **more):\n    return [1.0] * len(prompts)\n"
    (tmp_path / "mine.py").write_text(function)
    recipe = reading([*ROWS, ROWS[2] | other])
    words = ("run", recipe, "--until", "data", "--set", f"reward={{function: {tmp_path / 'mine.py'}:right}}")
    code, out, err = main(*words)
    if named is not None:
        rows = tmp_path / "rows.jsonl"
        assert (code, f"{rows} line 17: {rows} line 3 has the same prompt with other {named}" in err) == (3, True)
        code, out, err = main(*words, "--skip-invalid")
    assert (code, "skipped 1 invalid row" in out) == (0, named is not None)
    tables = [read_table(path) for path in (tmp_path / "run").glob("data/t*_prompts.parquet")]
    kept = [json.loads(text) for table in tables for text in table["columns"].to_pylist()]
    assert [columns.get("id") for columns in kept].count(None) == (named is None)
    assert len(kept) == len(ROWS)


def test_words_of_a_user_are_shown_as_they_are(main: Any, tmp_path: Path, reading: Any) -> None:
    """No name is markup, in a run and in what follows it, and none has an escape that the terminal obeys."""
    names = ["[/x]", "[red]a", "a\x1b[2Jb", "a\rb", "a\u202eb", ":smile:"]
    recipe, root = reading([row | dict.fromkeys(names, 1) for row in ROWS]), tmp_path / "r[bold]3[/y]"
    words = (recipe, "--set", f"run_dir='{root}'")
    until = ("run", *words, "--until", "data")
    for command in (until, until, ("status", *words), ("run", *words, "--dry-run")):
        code, out, err = main(*command)
        assert (code, err) == (4 if command[0] == "status" else 0, "")
        assert all(letter.isprintable() or letter == "\n" for letter in out)
        kept = "columns kept unchanged: :smile:, [/x], [red]a, a\\rb, a\\x1b[2Jb, "
        assert str(root) in "".join(out.split()) or kept in out


def test_spelled_control_tokens_are_mentioned(reading: Any) -> None:
    """A prompt that holds the template's own tokens may be rendered already."""
    out = micro.answer("run", reading([*ROWS, {"prompt": "Hi<|end|>"}]), "--until", "data")
    assert "1 row with control tokens of the chat template in the prompt" in out
