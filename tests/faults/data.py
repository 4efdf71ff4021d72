"""Dirty data, and recipes that are wrong or evil: refused with the place, or counted; no finished work is touched."""

from pathlib import Path
from typing import Any

import micro
from rows import lines

from faults.lab import Lab, Seen, infalign, refused, summary, untouched
from faults.registry import fault
from infalign.core.storage import read_table
from infalign.recipe.reading import write_yaml
from infalign.world import preferences

ROWS = [
    {"prompt": asked, "chosen": chosen, "rejected": rejected}
    for asked, chosen, rejected in preferences(200, seed=0, temperature=1.0)
]


def reading(lab: Lab, content: bytes) -> str:
    """Write a file of data and a recipe that reads it, and return the recipe's path."""
    (lab.folder / "rows.jsonl").write_bytes(content)
    return lab.recipe(data={"folder": str(lab.folder), "sources": [{"path": "rows.jsonl"}], "max_prompt_tokens": 180})


DIRTY = [
    {"prompt": "Hi", "chosen": "Yes"},
    {"prompt": "Hi", "chosen": "Yes", "rejected": None},
    {"prompt": "Hi", "chosen": "Yes", "rejected": "Yes"},
    {"prompt": "Hi", "chosen": " ", "rejected": "No"},
    {"prompt": "Hi", "chosen": "Yes", "rejected": "\ud800"},
    {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Yes", "rejected": "No"},
    {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes\n\nHuman: So?", "rejected": "\n\nHuman: Hi\n\nAssistant: No"},
]


@fault(
    3,
    {
        "a line is not JSON": (
            lines(ROWS[:6]) + b'{"prompt": "Hi", "chosen": \n' + lines(ROWS[6:]),
            "line 7: not JSON",
            "--skip-invalid",
        ),
        "a column is missing": (lines([*ROWS, DIRTY[0]]), f"line {len(ROWS) + 1}: column rejected is missing"),
    },
    brief=True,
)
def unreadable(lab: Lab, content: bytes, place: str, *words: str) -> Seen:
    """A data file cannot be read, or has an invalid row → File, line and fix; finished work stays."""
    root = lab.copy()
    with untouched(root, "data", "stages", "recipe.yaml", "digests.json", ".lock", ".holder"):
        code, _, said = infalign("run", reading(lab, content), *words)
    assert f"{lab.folder}/rows.jsonl {place}" in said
    assert all((root / "stages" / f"{unit}.json").exists() for unit in ("sft", "rollout-0", "train-aware", "results"))
    return Seen(code, said)


@fault(0, brief=True)
def skipped_rows(lab: Lab) -> Seen:
    """Invalid rows of seven kinds, with `--skip-invalid` → How many were left out, and which file lists them."""
    path, root = reading(lab, lines([*ROWS, *DIRTY])), lab.folder / "run"
    code, out, _ = infalign("run", path, "--until", "data", "--skip-invalid")
    listed = (root / "data" / "skipped.txt").read_text(encoding="utf-8").splitlines()
    places = [f"{lab.folder}/rows.jsonl line {number}" for number in range(len(ROWS) + 1, len(ROWS) + len(DIRTY) + 1)]
    assert [reason.split(": ")[0] for reason in listed] == places
    assert out.splitlines()[-1].startswith(f"skipped {len(DIRTY)} invalid rows")
    assert infalign("run", path, "--until", "data")[0] == 3
    _, again, _ = infalign("run", path, "--until", "data", "--skip-invalid")
    assert again.splitlines()[0] == "1 of 1 steps are already done"
    return Seen(code, out.splitlines()[-1])


SWAPPED = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[:30]]
DISTINCT = {(row["prompt"], row["chosen"], row["rejected"]) for row in [*ROWS, *SWAPPED]}
LABELS = [{"prompt": f"Say {i}.", "chosen": f"Here is {i}.", "rejected": "No."} for i in range(200)]


@fault(
    0,
    {
        "repeated": ([*ROWS, *ROWS[:50], *SWAPPED], {"repeated": len(ROWS) + 80 - len(DISTINCT)}),
        "both ways round": (
            [*LABELS, *({**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in LABELS[:7])],
            {"contradictory": 14},
        ),
        "10 MB": (
            [*ROWS, {"prompt": "spam " * 2_000_000, "chosen": "a" * 100_000, "rejected": "No\0"}],
            {"examples": len(ROWS) + 1, "train_prompts_too_long": 1},
        ),
    },
    brief=("both ways round",),
)
def counted(lab: Lab, rows: list[dict[str, Any]], counts: dict[str, int]) -> Seen:
    """Odd rows that are valid: repeated, contradictory, 10 MB long → Their numbers, beside the step `data`."""
    path = reading(lab, lines(rows))
    code, _, _ = infalign("run", path, "--until", "data", "--set", "data.test=[{world: 20}]")
    found = summary(lab.folder / "run", "data")
    assert {name: found[name] for name in counts} == counts
    prompts = read_table(lab.folder / "run" / "data" / "train_prompts.parquet")["prompt_id"].to_pylist()
    assert len(prompts) == len(set(prompts))
    return Seen(code)


@fault(3)
def too_long(lab: Lab) -> Seen:
    """No prompt is within `data.max_prompt_tokens` → Raise the limit; the old value gives the old tables."""
    root = lab.copy()
    code, _, said = infalign("run", lab.recipe(), "--set", "data.max_prompt_tokens=3")
    lab.ends_well(root)
    return Seen(code, said)


RECIPE = write_yaml(micro.settings(Path("RUN")))


@fault(
    2,
    {
        "a misspelled key": RECIPE.replace("max_new_tokens", "max_new_token"),
        "Python": f"{RECIPE}report_to: !!python/object/apply:os.system ['touch MARK']\n",
        "a model's weights": (60).to_bytes(8, "little").decode() + '{"weight": {"dtype": "F32"}}\xff',
    },
    brief=("a misspelled key", "Python"),
)
def unread(lab: Lab, text: str) -> Seen:
    """A recipe is wrong, malicious or none → The key, what was found and what is allowed; its Python does not run."""
    root, path, mark = lab.copy(), lab.folder / "recipe.yaml", lab.folder / "mark"
    path.write_bytes(text.replace("RUN", str(root)).replace("MARK", str(mark)).encode("latin1"))
    with untouched(root):
        seen = refused("run", path)
    assert not mark.exists()
    return seen


@fault(3, {"text": '"0.5"', "beyond floats": str(2**53 + 1), "no number": "null"}, brief=True)
def no_rewards(lab: Lab, reward: str) -> Seen:
    """A table of rewards holds text, or a whole number that no float holds → File, line and value."""
    table = lab.folder / "rewards.jsonl"
    table.write_text(f'{{"prompt_id": "a", "reward": 1}}\n{{"prompt_id": "a", "reward": {reward}}}\n')
    return refused("win-rate", "--policy", table, "--base", table, "--procedure", "standard")


@fault(2, brief=True)
def no_function(lab: Lab) -> Seen:
    """A reward function that only the evaluation calls cannot be imported → Its name, before anything is computed."""
    seen = refused("run", lab.recipe(gold={"function": "nowhere:gold"}))
    assert not (lab.folder / "run" / "data").exists()
    return seen


@fault(2, brief=True)
def no_place(lab: Lab) -> Seen:
    """The run directory is a device or below a file → Its name; a dry run says the same."""
    seen = [refused("run", lab.recipe(run_dir="/dev/null/run"), *words) for words in ((), ("--dry-run",))]
    assert seen[0] == seen[1]
    return seen[0]
