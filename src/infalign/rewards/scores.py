"""Rewards that are requested once and stored as they arrive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infalign.core.errors import DataError
from infalign.core.progress import NOTHING, SoFar
from infalign.core.storage import listed, read_table, write_table
from infalign.data.examples import MESSAGES, Message, prompt_id
from infalign.method.calibration import Array
from infalign.rewards.base import Batch, RewardFunction, score, score_each

CHECKED_AGAIN = 4  # number of stored rewards that a reward must reproduce
ROUNDING = 1e-4  # relative to the largest of them
MADE_BY = b"reward"  # key in the schema of a shard: the reward that scored it


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function, its name in messages, and the label that its scores are stored under."""

    function: RewardFunction
    name: str
    made_by: str


Wanted = tuple[str, str, list[int]]  # the id of a prompt, a response to it, and its rows


def score_to(
    directory: Path,
    reward: NamedReward,
    prompts: Sequence[list[Message]],
    responses: Sequence[str],
    *,
    shard_responses: int = 512,
    on_progress: Callable[[int, int], None],
) -> Array:
    """Return the rewards of all rows, shape (rows,), and store them in ``directory``/part-00000.parquet, ….

    Only rewards that no shard has are requested, and equal responses to one prompt are scored once: a stopped run
    continues, rows can be added, and equal responses tie. A shard holds one or more prompts with at most
    ``shard_responses`` distinct responses together (one prompt may have more) and is written atomically; a reward that
    works on many batches at once is given several shards. Shards with another ``made_by`` are removed. Calls
    ``on_progress(done, all)`` with numbers of distinct responses. Raises as `score` does, with rows counted from the
    start of the shard. Responses are held in memory for a few prompts only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = sorted(directory.glob("part-[0-9]*.parquet"))
    kept = [shard for shard in shards if _made_by(read_table(shard, [])) == reward.made_by]
    for shard in set(shards).difference(kept):
        shard.unlink()
    stored, rows_of = _stored(kept), _rows_by_prompt(prompts)
    first = 1 + int(kept[-1].stem.removeprefix("part-")) if kept else 0
    rewards, total, done = np.full(len(responses), np.nan), 0, 0
    for identity, rows in rows_of.items():
        texts, known = [responses[row] for row in rows], stored(identity)
        rewards[rows] = [known.get(text, np.nan) for text in texts]
        total += len(set(texts))
        done += len(known.keys() & texts)
    on_progress(done, total)
    under_way: dict[int, list[Wanted]] = {}  # by the number of the shard

    def missing() -> Iterator[list[Wanted]]:
        for identity, rows in rows_of.items():
            by_text: dict[str, list[int]] = {}
            for row in rows[np.isnan(rewards[rows])]:
                by_text.setdefault(responses[row], []).append(row)
            yield [(identity, text, same) for text, same in by_text.items()]

    def batches() -> Iterator[Batch]:
        for number, wanted in enumerate(_filled(missing(), shard_responses)):
            under_way[number] = wanted
            yield [prompts[rows[0]] for _, _, rows in wanted], [text for _, text, _ in wanted]

    with closing(score_each(reward.function, batches(), name=reward.name)) as scored:
        for number, given in scored:
            wanted = under_way.pop(number)
            asked = [prompts[rows[0]] for _, _, rows in wanted]
            _write(directory / f"part-{first + number:05d}.parquet", reward.made_by, asked, wanted, given)
            for (_, _, same), value in zip(wanted, given, strict=True):
                rewards[same] = value
            done += len(wanted)
            on_progress(done, total)
    return rewards


def score_shard(path: Path, reward: NamedReward, prompts: Sequence[list[Message]], responses: Sequence[str]) -> None:
    """Score all rows into one shard as `score_to` does, which is written whole or not at all."""
    rows = {(prompt_id(prompt), text): prompt for prompt, text in zip(prompts, responses, strict=True)}
    asked = list(rows.values())
    ((_, given),) = score_each(reward.function, [(asked, [text for _, text in rows])], name=reward.name)
    _write(path, reward.made_by, asked, [(identity, text, []) for identity, text in rows], given)


def _write(
    path: Path, made_by: str, prompts: Sequence[list[Message]], shard: Sequence[Wanted], given: Sequence[float]
) -> None:
    columns = {
        "prompt_id": pa.array([identity for identity, _, _ in shard], pa.string()),
        "prompt": pa.array(prompts, MESSAGES),
        "response": pa.array([text for _, text, _ in shard], pa.string()),
        "reward": pa.array(given, pa.float64()),
    }
    write_table(path, pa.table(columns, metadata={MADE_BY: made_by.encode()}))


def _filled(missing: Iterable[list[Wanted]], responses: int) -> Iterator[list[Wanted]]:
    """Yield what one shard holds at a time; a prompt is never split."""
    shard: list[Wanted] = []
    for of_prompt in missing:
        if shard and len(shard) + len(of_prompt) > responses:
            yield shard
            shard = []
        shard = shard + of_prompt
    if shard:
        yield shard


def _rows_by_prompt(prompts: Sequence[list[Message]]) -> dict[str, NDArray[np.intp]]:
    """Return the rows of each prompt, by its id."""
    numbers: dict[str, int] = {}
    prompt_R, before = np.empty(len(prompts), np.intp), None
    for row, prompt in enumerate(prompts):
        if prompt is not before:  # usually a row has the same prompt as the row before it
            number, before = numbers.setdefault(prompt_id(prompt), len(numbers)), prompt
        prompt_R[row] = number
    ends = np.cumsum(np.bincount(prompt_R))
    return dict(zip(numbers, np.split(np.argsort(prompt_R, kind="stable"), ends[:-1]), strict=True))


def _stored(shards: list[Path]) -> Callable[[str], dict[str, float]]:
    """Return a function that gives the stored rewards of a prompt, by response; few shards are held at a time."""
    shards_of: dict[str, list[Path]] = {}
    for shard in shards:
        for identity in dict.fromkeys(listed(read_table(shard, ["prompt_id"]), "prompt_id")):
            shards_of.setdefault(identity, []).append(shard)

    @lru_cache(maxsize=4)
    def rewards(shard: Path) -> dict[str, dict[str, float]]:
        found = defaultdict[str, dict[str, float]](dict)
        table = read_table(shard, ["prompt_id", "response", "reward"])
        columns = (listed(table, column) for column in ("prompt_id", "response", "reward"))
        for identity, text, reward in zip(*columns, strict=True):
            found[identity][text] = reward
        return found

    return lambda identity: {
        text: reward for shard in shards_of.get(identity, ()) for text, reward in rewards(shard)[identity].items()
    }


def check_unchanged(reward: NamedReward, shards: Iterable[Path]) -> None:
    """Raise DataError unless ``reward`` reproduces the first 4 rows of the first of ``shards`` that it scored.

    A difference up to 1e-4 of the largest of these rewards counts as rounding. Without such a shard nothing is checked.
    """
    for shard in shards:
        table = read_table(shard)
        if _made_by(table) != reward.made_by:
            continue
        first = table.slice(0, CHECKED_AGAIN)
        prompts, texts, before = (listed(first, column) for column in ("prompt", "response", "reward"))
        now = score(reward.function, prompts, texts, name=reward.name)
        gaps = np.abs(now - before)
        if gaps.max() > ROUNDING * np.abs(before).max():
            worst = int(gaps.argmax())
            raise DataError(
                f"reward {reward.name}: {reward.made_by} now gives {now[worst]:g} where it gave {before[worst]:g} "
                f"({shard}, row {worst}, prompt {prompt_id(prompts[worst])}), so it is not the reward that scored "
                "before; bring that one back (a function must always give the same), or score everything again under "
                "another name, such as a url with ?revision=2"
            )
        return


def _made_by(table: pa.Table) -> str:
    return (table.schema.metadata or {}).get(MADE_BY, b"").decode()


def count_scored(responses: int, folder: Path) -> SoFar:
    """Return how many distinct ones of ``responses`` are scored in the shards of a folder."""
    scored = sum(read_table(shard, ["reward"]).num_rows for shard in folder.glob("part-*.parquet"))
    return SoFar(f"{scored:,} responses scored", min(1.0, scored / responses)) if scored else NOTHING
