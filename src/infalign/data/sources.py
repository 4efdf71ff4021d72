"""Where rows come from, and how they are split: no two parts share the start of a conversation."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from infalign.core.settings import Count, Settings
from infalign.data.examples import Example, load_examples
from infalign.data.files import read_rows
from infalign.data.hub import Hub, hub_rows
from infalign.data.messages import digest
from infalign.data.tasks import task_rows


class Source(Settings):
    """Where rows come from: exactly one of a file, a dataset id, reasoning-gym or a built-in task."""

    path: str | None = Field(None, description="a .jsonl, .json, .parquet or .csv file; JSON may be compressed")
    hub: Hub | None = Field(None, description="a data set on the hub; `hub: NAME` is short for `hub: {id: NAME}`")
    world: Count | None = Field(None, description="number of dialogues and pairs of the built-in synthetic world")
    reasoning_gym: str | None = Field(
        None, description="a reasoning-gym task, e.g. chain_sum; its checker can score the answers"
    )
    size: Count | None = Field(None, description="number of questions for `reasoning_gym`")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="of `reasoning_gym`")
    examples: Annotated[int, Field(ge=0)] = Field(
        0, description="number of other questions of `reasoning_gym`, with answers, before each one"
    )
    config: dict[str, Any] = Field({}, description="for the `reasoning_gym` task, e.g. {max_terms: 3}")
    sums: Count | None = Field(None, description="number of exercises from the built-in arithmetic (`infalign.sums`)")
    limit: Count | None = Field(None, description="maximum number of rows to read")

    @field_validator("hub", mode="before")
    @classmethod
    def _read_id(cls, value: object) -> object:
        return {"id": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_origin(self) -> "Source":
        origins = (self.path, self.hub, self.world, self.sums, self.reasoning_gym)
        if sum(origin is not None for origin in origins) != 1:
            raise ValueError("give exactly one of path, hub, world, sums, reasoning_gym")
        of_task = self.seed or self.config or self.examples
        if (self.reasoning_gym is None) != (self.size is None) or (self.size is None and of_task):
            raise ValueError("reasoning_gym requires size; size, seed, examples and config are only for reasoning_gym")
        if self.limit is not None and (self.world or self.sums) is not None:
            raise ValueError("limit is for sources that are read; world and sums take their number of rows directly")
        return self


class Data(Settings):
    """Preference pairs and demonstrations, and how they are split."""

    folder: str = Field(".", description="relative `path`s of sources start here; FOLDER/ID goes before the hub's ID")
    sources: Annotated[list[Source], Field(min_length=1)]
    test: list[Source] = Field([], description="test rows; without them `test_fraction` of `sources` is held out")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="fraction of the conversations held out if `test` is empty"
    )
    judge_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.5, description="fraction of the training pairs reserved for the judge"
    )
    skip_invalid: bool = Field(False, description="skip, count and list invalid rows instead of stopping at the first")
    max_prompt_tokens: Count = Field(256, description="longer prompts (in tokens) are dropped and counted")


def read_examples(data: Data, sources: Sequence[Source], *, seed: int) -> tuple[list[Example], list[str]]:
    """Return the examples of ``sources``, and why each invalid row was left out if ``data`` allows that."""
    examples, skipped = [], []
    for source in sources:
        rows = islice(_rows(source, data.folder, seed), source.limit)
        read, messages = load_examples(rows, skip_invalid=data.skip_invalid)
        examples += read
        skipped += messages
    return examples, skipped


def _rows(source: Source, folder: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.hub is not None:
        yield from hub_rows(source.hub.found_in(folder))
    elif source.reasoning_gym is not None:
        yield from task_rows(
            source.reasoning_gym,
            size=source.size or 0,
            seed=source.seed,
            config=source.config,
            examples=source.examples,
        )
    elif source.world is not None:
        from infalign import world

        for i, (request, reply) in enumerate(world.dialogues(source.world, seed=seed)):
            yield f"world dialogue {i}", {"prompt": request, "completion": reply}
        for i, (request, chosen, rejected) in enumerate(world.preferences(source.world, seed=seed, temperature=1.0)):
            yield f"world pair {i}", {"prompt": request, "chosen": chosen, "rejected": rejected}
    elif source.sums is not None:
        from infalign import sums

        for i, e in enumerate(sums.exercises(source.sums, seed=seed)):
            yield f"exercise {i}", {"prompt": e.prompt, "completion": e.response}
    else:
        yield from read_rows(Path(folder) / str(source.path))


def split_by_group(
    examples: Iterable[Example], fractions: Mapping[str, float], *, seed: int
) -> dict[str, list[Example]]:
    """Return the examples of each named part, every group whole in the part that its hash and ``seed`` choose.

    A group's part does not depend on the other examples, so the sizes meet ``fractions``, whose sum is 1, on average.
    """
    names = list(fractions)
    bounds = list(accumulate(fractions.values()))[:-1]
    parts: dict[str, list[Example]] = {name: [] for name in names}
    for example in examples:
        position = int(digest([seed, example.group])[:12], 16) / 16**12  # uniform on [0, 1), exact in a float
        parts[names[bisect_right(bounds, position)]].append(example)
    return parts


def drop_groups(train: Sequence[Example], test: Iterable[Example]) -> tuple[list[Example], int]:
    """Return the ``train`` examples whose group is not in ``test``, and how many were dropped."""
    groups = {example.group for example in test}
    kept = [example for example in train if example.group not in groups]
    return kept, len(train) - len(kept)
