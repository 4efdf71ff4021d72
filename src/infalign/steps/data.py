"""The stage data: rows of all sources to the tables that training reads, and the tokenizer."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import remove, write_table, write_text, writing
from infalign.core.user_code import import_function
from infalign.data.examples import Example, to_table
from infalign.data.messages import to_text
from infalign.data.sources import drop_groups, read_examples, split_by_group
from infalign.method.by_name import GIVEN, ByName
from infalign.models.conversations import find_refused, marked_text, prompt_ids_or_errors, spells_control, training_ids
from infalign.models.settings import PolicyModel
from infalign.models.tokenizers import check_response_end, load_tokenizer
from infalign.pipeline.records import record_path
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.rewards.sources import check_columns
from infalign.steps.run import Run

HELD_OUT_PAIRS = 512
MIN_PROMPTS = 4  # in each split
MAX_TRAINING_CHARACTERS = 10_000  # per text that trains a tokenizer, whose cost is quadratic in a word's length


def units(run: Run) -> Iterator[Unit]:
    """Yield the one unit of this stage: all tables and the tokenizer."""
    policy, learns = run.contents["policy"], run.recipe.judge_learns
    tokenizer = {name: policy[name] for name in ("model", "scratch", "chat_template") if name in policy}
    yield Unit(
        "data",
        "data",
        inputs=(),
        settings=run.key("data") | {"policy": tokenizer, "judge": {"fit": learns}, "date": run.date},
        output=run.layout.data,
        work=partial(prepare_data, run.recipe, run.layout, run.date),
        clears=True,
    )


class Split(NamedTuple):
    """The rows of training, the rows of each table, and those whose prompts are the train and the test prompts.

    ``overlapping`` rows share the start of a conversation with the test and are in none.
    """

    train: list[Example]
    tables: Mapping[str, list[Example]]
    asking: Mapping[str, list[Example]]
    overlapping: int


def split(recipe: Recipe, examples: list[Example], test: list[Example]) -> Split:
    """Return the rows of ``data.sources`` and of ``data.test`` as a run uses them, without leaks between the tables."""
    data, seed = recipe.data, recipe.seed
    if data.test:
        train, overlapping = drop_groups(examples, test)
    else:
        fraction = data.test_fraction
        parts = split_by_group(examples, {"test": fraction, "train": 1 - fraction}, seed=seed)
        train, test, overlapping = parts["train"], parts["test"], 0
    fraction = data.judge_fraction if recipe.judge_learns else 0.0  # an untrained judge leaves them to the reward
    parts = split_by_group(train, {"judge": fraction, "reward": 1 - fraction}, seed=seed + 1)
    # One pair per conversation start, so that pairs are independent; their order depends on their text alone.
    ordered = sorted((e for e in test if e.rejected is not None), key=lambda e: e.group + e.prompt_id)
    tables = {
        "demonstrations": [e for e in train if e.rejected is None and e.chosen] or [e for e in train if e.chosen],
        "reward_pairs": [e for e in parts["reward"] if e.rejected is not None],
        "judge_pairs": [e for e in parts["judge"] if e.rejected is not None],
        "test_pairs": list({e.group: e for e in ordered}.values())[:HELD_OUT_PAIRS],
    }
    return Split(train, tables, {"train": parts["reward"], "test": test}, overlapping)


def prepare_data(recipe: Recipe, layout: Layout, date: str | None, *, on_progress: OnProgress) -> Summary:
    """Read the sources, split them without leaks, make the tokenizer and write the tables that training reads.

    Rows that the chat template refuses are invalid, and those whose prompt another row has with other tools or columns
    that reward functions name. Duplicate rows count twice, and ``repeated`` is their number; ``contradictory`` is
    that of the rows whose pair is also there the other way round. Rollouts are drawn once per distinct prompt, which
    has the columns in which its rows agree. Prompts over ``max_prompt_tokens`` are left out and counted. Nothing is
    written before all data is checked.
    """
    data = recipe.data
    examples, skipped = read_examples(data, data.sources, seed=recipe.seed)
    test, skipped_test = read_examples(data, data.test, seed=recipe.seed)
    skipped += skipped_test
    splits = split(recipe, examples, test)

    tokenizer = make_tokenizer(recipe.policy, date, splits.train)
    asked = _ask(tokenizer, [*examples, *test])
    functions = [ByName(import_function(source.function)) for source in recipe.rewards.values() if source.function]
    read = {"tools", *(name for function in functions for name in function.parameters)}
    read |= {"reward_model"} if "ground_truth" in read else set()  # where verl has it
    used = [*splits.train, *splits.asking["test"]]
    if refused := _refused(tokenizer, asked, used, read, skip_invalid=data.skip_invalid):
        skipped += refused.values()
        examples, test = ([e for e in rows if e.where not in refused] for rows in (examples, test))
        splits = split(recipe, examples, test)
    for rows in splits.asking.values():
        check_columns(functions, rows)
    most = data.max_prompt_tokens
    prompts = {name: _distinct_prompts(rows, asked, most) for name, rows in splits.asking.items()}
    for name, (short, _) in prompts.items():
        check_prompts(name, len(short), most)

    record_path(layout.root, "data").unlink(missing_ok=True)  # from here on the recorded output is replaced
    remove(layout.data)
    layout.data.mkdir()
    with writing(layout.tokenizer):
        tokenizer.save_pretrained(layout.tokenizer)
    for name, (short, _) in prompts.items():
        write_table(layout.prompts(name), short)
    for name, rows in splits.tables.items():
        write_table(layout.data / f"{name}.parquet", to_table(rows))
    write_text(layout.data / "skipped.txt", "".join(f"{message}\n" for message in skipped))
    columns = {name for e in (*examples, *test) for name in e.columns}
    pairs = [(e.prompt_id, to_text(e.chosen), to_text(e.rejected or ())) for e in examples]
    distinct = set(pairs)
    return {
        "examples": len(examples),
        "skipped": len(skipped),
        "prompts_alone": sum(not e.chosen for e in examples),
        "kept_columns": sorted(columns - GIVEN.keys()),
        "columns_left_out": sorted(columns & GIVEN.keys()),
        "with_tools": sum(bool(e.columns.get("tools")) for e in examples),
        "control_tokens": sum(spells_control(tokenizer, e.prompt) for e in examples),
        "repeated": len(pairs) - len(distinct),
        "contradictory": sum((prompt, no, yes) in distinct for prompt, yes, no in pairs if yes != no),
        "dropped_shared_start": splits.overlapping,
        **{name: len(rows) for name, rows in splits.tables.items()},
        **{f"{name}_prompts": len(short) for name, (short, _) in prompts.items()},
        **{f"{name}_prompts_too_long": long for name, (_, long) in prompts.items()},
        "example": next((training_example(tokenizer, e) for e in splits.tables["demonstrations"]), {}),
    }


def training_example(tokenizer: Any, e: Example) -> dict[str, Any]:
    """Return where an example is from, the roles of its turns, and its text in parts: those trained on or not."""
    (row,) = training_ids(tokenizer, [e.prompt], [e.chosen], [e.columns.get("tools")])
    roles = [turn["role"] for turn in (*e.prompt, *e.chosen)]
    return {"where": e.where, "roles": roles, "parts": marked_text(tokenizer, row)}


def make_tokenizer(policy: PolicyModel, date: str | None, train: list[Example]) -> Any:
    """Train the policy's tokenizer on ``train`` (from scratch) or load it, with a template that prints ``date``."""
    if policy.scratch is not None:
        from infalign.models.scratch import train_tokenizer

        texts = (turn["content"] for e in train for turn in (*e.prompt, *e.chosen, *(e.rejected or ())))
        return train_tokenizer((text[:MAX_TRAINING_CHARACTERS] for text in texts), policy.scratch)
    tokenizer = load_tokenizer(str(policy.model), template=policy.chat_template, date=date)
    check_response_end(tokenizer, str(policy.model))
    return tokenizer


def _ask(tokenizer: Any, examples: list[Example]) -> dict[str, list[int] | DataError]:
    """Return the token ids of each distinct prompt, by its id, or why the chat template refuses it."""
    distinct = {e.prompt_id: e for e in reversed(examples)}
    prompts, tools = zip(*((e.prompt, e.columns.get("tools")) for e in distinct.values()), strict=True)
    return dict(zip(distinct, prompt_ids_or_errors(tokenizer, prompts, tools), strict=True))


def _refused(
    tokenizer: Any, asked: Mapping[str, Any], examples: list[Example], read: Iterable[str], *, skip_invalid: bool
) -> dict[str, str]:
    """Return why rows are refused, by their place. Raises DataError for the first unless they may be."""
    errors: dict[str, object] = {e.where: error for e in examples if isinstance(error := asked[e.prompt_id], DataError)}
    first = {e.prompt_id: e for e in reversed(examples)}
    for e, known in ((e, first[e.prompt_id]) for e in examples if e is not first[e.prompt_id]):
        if other := sorted(name for name in read if e.columns.get(name) != known.columns.get(name)):
            errors[e.where] = f"{known.where} has the same prompt with other {' and '.join(other)}"
    talks = [(e, e.prompt + said) for e in examples for said in (e.chosen, e.rejected or ()) if e.where not in errors]
    talks = [(e, talk) for e, talk in talks if "tools" in e.columns or any(len(turn) > 2 for turn in talk)]
    refusals = find_refused(tokenizer, [talk for _, talk in talks], [e.columns.get("tools") for e, _ in talks])
    errors |= {e.where: refusal for (e, _), refusal in zip(talks, refusals, strict=True) if refusal is not None}
    if errors and not skip_invalid:
        where, why = next(iter(errors.items()))
        raise DataError(f"{where}: {why}; drop the row or pass --skip-invalid")
    return {where: f"{where}: {why}" for where, why in errors.items()}


def check_prompts(name: str, left: int, most: int) -> None:
    """Raise DataError if fewer train or test prompts of at most ``most`` tokens are left than a run takes."""
    if left < MIN_PROMPTS:
        raise DataError(
            f"only {left} {name} prompts with at most {most} tokens are left, but a run needs at least {MIN_PROMPTS}; "
            "use more data or raise data.max_prompt_tokens; conversations with the same first user turn are not split, "
            "so put what all share, such as an example, into a system turn"
        )


def _distinct_prompts(examples: list[Example], asked: Mapping[str, Any], max_tokens: int) -> tuple[pa.Table, int]:
    """Return distinct prompts that fit, in an order that depends on their text alone, and how many were too long."""
    prompts = dict[str, Example]()
    for e in examples:
        known = prompts.get(e.prompt_id, e)
        agreed = {name: value for name, value in known.columns.items() if e.columns.get(name, known) == value}
        prompts[e.prompt_id] = known if known is e else replace(known, columns=agreed)
    short = [identity for identity in sorted(prompts) if len(asked[identity]) <= max_tokens]
    table = to_table(prompts[identity] for identity in short).select(["prompt", "columns"])
    table = table.add_column(0, "prompt_id", pa.array(short, pa.string()))
    ids = pa.array([asked[identity] for identity in short], pa.list_(pa.int32()))
    return table.append_column("token_ids", ids), len(prompts) - len(short)
