"""Tables of rewards from any source: a row per response, with its prompt, its model and its reward."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from infalign.core.errors import DataError
from infalign.core.spelling import listed_names
from infalign.method.calibration import Array, as_rewards, not_finite

NO_LABEL = -1


@dataclass(frozen=True, slots=True)
class Labels:
    """A text for each of R rows: ``names`` as they first occur, and their numbers ``codes``, (R,), −1 for no text."""

    codes: NDArray[np.int32]
    names: Sequence[str]

    @classmethod
    def of_texts(cls, texts: Sequence[str | None]) -> "Labels":
        """Return texts, None for none; pa.array, which also could, imports pandas."""
        number = {name: code for code, name in enumerate(dict.fromkeys(text for text in texts if text is not None))}
        return cls(np.array([NO_LABEL if text is None else number[text] for text in texts], np.int32), list(number))

    @classmethod
    def of(cls, chunked: "pa.ChunkedArray[Any]") -> "Labels":
        """Return the values of a column as text."""
        if not pa.types.is_dictionary(chunked.type):
            chunked = chunked.cast(pa.large_string()).dictionary_encode()
        parts: Any = chunked.unify_dictionaries().chunks
        codes = [np.from_dlpack(part.indices.fill_null(NO_LABEL)) for part in parts]
        names = parts[0].dictionary.cast(pa.large_string()).to_pylist() if parts else []
        return cls(np.concatenate([np.empty(0), *codes]).astype(np.int32), names)

    @classmethod
    def joined(cls, parts: "Sequence[Labels]") -> "Labels":
        """Return the rows of all parts, one after the other."""
        number = {name: code for code, name in enumerate(dict.fromkeys(name for one in parts for name in one.names))}
        codes = [np.array([*(number[name] for name in one.names), NO_LABEL], np.int32)[one.codes] for one in parts]
        return cls(np.concatenate(codes), list(number))

    def take(self, rows: NDArray[Any]) -> "Labels":
        """Return some rows, with the names that are left."""
        kept, codes = np.unique(self.codes[rows], return_inverse=True)
        labelled = kept[kept >= 0]
        return Labels((codes - (kept.size - labelled.size)).astype(np.int32), [self.names[code] for code in labelled])


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Rewards of R responses, which `read_rewards` reads from logs and files.

    >>> table = RewardTable.of({"before": [[0, 1], [0, 0]], "after": [[1, 1], [0, 1]]})
    >>> [(one["model"], one["mean"]) for one in measure(table, ["pass@1"])]
    [('before', 0.25), ('after', 0.75)]

    ``numbers`` has ``reward`` and, where there, ``judge_reward`` and ``length``, each (R,). ``columns`` has ``answer``
    and what else was asked for. ``notes`` say in sentences what was assumed, left out or ignored.
    """

    source: str
    prompts: Labels
    models: Labels
    numbers: Mapping[str, Array]
    columns: Mapping[str, Labels]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, rewards: "Rewards", answers: Sequence[Sequence[Any]] | None = None, *, model: str = "model"
    ) -> "RewardTable":
        """Return the table of the rewards of each prompt, which may be of different number; a table as it is.

        Several models are a mapping of their names to their rewards of the same prompts, or to tables of one model.
        ``answers`` of one model have the shape of its rewards, None for no answer. Raises DataError for another shape,
        for a reward that is not finite, and for a prompt without one.
        """
        if isinstance(rewards, RewardTable):
            return rewards
        if isinstance(rewards, Mapping):
            tables = {name: cls.of(own, model=name) for name, own in rewards.items()}
            if several := [name for name, table in tables.items() if len(table.models.names) > 1]:
                raise DataError(f"{several[0]} has several models; give each as a table of its own, or this one alone")
            return joined([replace(one, models=replace(one.models, names=[name])) for name, one in tables.items()])
        rows = [as_rewards(row) for row in rewards]
        odd = not_finite(rows)
        if odd or not rows or any(row.ndim != 1 or row.size == 0 for row in rows):
            shape = "one or more finite rewards for each prompt: prompts × samples, or a list of lists"
            raise DataError(f"give {shape}{f'; found {odd}' if odd else ''}")
        sizes, columns = [row.size for row in rows], {}
        if answers is not None:
            if [len(row) for row in answers] != sizes:
                raise DataError("give an answer, or None, for each reward")
            texts = [None if a is None or a != a else str(a) for row in answers for a in row]
            columns["answer"] = Labels.of_texts(texts)
        prompts = Labels(np.repeat(np.arange(len(rows), dtype=np.int32), sizes), [str(p) for p in range(len(rows))])
        models = Labels(np.zeros(sum(sizes), np.int32), [model])
        return cls("rewards", prompts, models, {"reward": np.concatenate(rows)}, columns)

    def __iter__(self) -> Iterator[Array]:
        """Return the sorted rewards of each prompt: `optimum` takes a table of one model."""
        return iter(self.rewards_by_prompt().values())

    @property
    def judge(self) -> str:
        """The column whose values say which response is better."""
        return "judge_reward" if "judge_reward" in self.numbers else "reward"

    def column(self, name: str) -> Labels:
        """Return a column. Raises DataError, which lists those there are, for another name."""
        if name == "model":
            raise DataError("results are by model already; choose another column than model")
        if name not in self.columns:
            raise DataError(f"{self.source} has no column {name}; it has {', '.join(self.columns) or 'no others'}")
        return self.columns[name]

    def groups(self) -> "Groups":
        """Return the rows of each prompt of each model, in their order."""
        width = len(self.prompts.names)
        keys = self.models.codes.astype(np.int64) * width + self.prompts.codes
        order = np.argsort(keys, kind="stable")
        keys_G, starts, sizes = np.unique(keys[order], return_index=True, return_counts=True)
        return Groups(keys_G // width, keys_G % width, order, starts, sizes)

    def take(self, rows: NDArray[Any]) -> "RewardTable":
        """Return some rows."""
        return replace(
            self,
            prompts=self.prompts.take(rows),
            models=self.models.take(rows),
            numbers={name: values[rows] for name, values in self.numbers.items()},
            columns={name: labels.take(rows) for name, labels in self.columns.items()},
        )

    def rewards_by_prompt(self) -> dict[str, Array]:
        """Return the sorted rewards of each prompt: what `optimum` takes, and a trainer's ``reference_rewards``.

        Raises DataError for a table of several models.
        """
        if len(self.models.names) > 1:
            raise DataError(f"{self.source} has the models {listed_names(self.models.names)}; take the rows of one")
        groups = self.groups()
        values = np.split(self.numbers["reward"][groups.order], groups.starts[1:])
        return {self.prompts.names[p]: np.sort(own) for p, own in zip(groups.prompts, values, strict=True)}


class Groups(NamedTuple):
    """The prompts of all models: G groups of rows, which ``order``, (R,), lists one after the other."""

    models: NDArray[np.int64]
    prompts: NDArray[np.int64]
    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    sizes: NDArray[np.intp]


def joined(tables: Sequence[RewardTable]) -> RewardTable:
    """Return the rows of all tables.

    Models of one name in several tables are one if they share no prompt; otherwise the name of the table's file comes
    in front. Raises DataError where two such files have the same name too.
    """
    if len(tables) == 1:
        return tables[0]
    asked = defaultdict[str, list[set[str]]](list)
    for table in tables:
        for code, name in enumerate(table.models.names):
            prompts = np.unique(table.prompts.codes[table.models.codes == code])
            asked[name].append({table.prompts.names[prompt] for prompt in prompts})
    twice = {name for name, prompts in asked.items() if len(set().union(*prompts)) < sum(map(len, prompts))}
    spelled = [
        [f"{Path(table.source).stem}: {name}" if name in twice else name for name in table.models.names]
        for table in tables
    ]
    names = Counter(name for own in spelled for name in own if ": " in name)
    if doubled := [name for name, count in names.items() if count > 1 and name.partition(": ")[2] in twice]:
        raise DataError(f"two files or folders of one name have the model {listed_names(doubled)}; rename one")
    shared = [name for name in tables[0].columns if all(name in table.columns for table in tables)]
    return RewardTable(
        ", ".join(table.source for table in tables),
        Labels.joined([table.prompts for table in tables]),
        Labels.joined([replace(table.models, names=own) for table, own in zip(tables, spelled, strict=True)]),
        {"reward": np.concatenate([table.numbers["reward"] for table in tables])},
        {name: Labels.joined([table.columns[name] for table in tables]) for name in shared},
        tuple(dict.fromkeys(note for table in tables for note in table.notes)),
    )


Rewards = RewardTable | Mapping[str, Any] | Sequence[ArrayLike] | Array
"""A table, rewards by prompt, or those of several models by name."""
