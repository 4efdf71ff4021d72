"""Rewards that are requested once and stored as they arrive."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infalign.core.errors import DataError
from infalign.core.progress import NOTHING, OnProgress, SoFar
from infalign.core.storage import column_values, read_table, write_table
from infalign.data.messages import Message, prompt_id, prompts_of, to_column
from infalign.method.calibration import Array
from infalign.rewards.base import Batch, RewardFunction, check_left_out, score, score_each
from infalign.rewards.classifier import ClassifierReward

CHECKED_AGAIN = 4  # number of stored rewards that a reward must reproduce
ROUNDING = 1e-4  # relative to the largest of them
KEY_BYTES = 16  # of the hash of a prompt and a response
MADE_BY = b"reward"  # key in the schema of a shard: the reward that scored it


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function, its name in messages, and the label that its scores are stored under."""

    function: RewardFunction
    name: str
    made_by: str


def score_to(
    directory: Path,
    reward: NamedReward,
    rows: Batch,
    *,
    shard_responses: int = 512,
    known: Path | None = None,
    on_progress: OnProgress,
) -> Array:
    """Return the rewards of all rows, shape (rows,), and store them in ``directory``/part-00000.parquet, ….

    The reward of a prompt that is left out is NaN. Only rewards that no shard has are requested, here or in ``known``,
    and equal responses to one prompt are scored once: a stopped run continues, rows can be added, and equal responses
    tie, also with those of ``known``. A shard holds one or more prompts with at most ``shard_responses`` distinct
    responses together (one prompt may have more) and is written atomically; a reward that works on many batches at once
    is given several shards. Responses are held in memory for a few shards only. Shards with another ``made_by`` are
    removed. ``on_progress`` gets numbers of distinct responses. Raises as `score`, with rows counted in the shard.
    """
    prompts, responses, _ = rows
    directory.mkdir(parents=True, exist_ok=True)
    prompt_R, key_R = _keys(prompts, responses)
    key_D, row_D, distinct_R = np.unique(key_R, return_index=True, return_inverse=True)  # distinct responses
    rewards_D, known_D, first = np.full(len(key_D), np.nan), np.zeros(len(key_D), bool), 0
    for shard in (path for of in (directory, known) if of for path in sorted(of.glob("part-[0-9]*.parquet"))):
        table = read_table(shard, ["prompt_id", "response", "reward"])
        if _made_by(table) != reward.made_by:
            if shard.parent == directory:
                shard.unlink()
            continue
        if shard.parent == directory:
            first = 1 + int(shard.stem.removeprefix("part-"))
        identities, texts, given = (column_values(table, name) for name in ("prompt_id", "response", "reward"))
        stored = np.array(list(map(_key, identities, texts)), key_R.dtype)
        _, hits, places = np.intersect1d(key_D, stored, return_indices=True)
        rewards_D[hits], known_D[hits] = np.array(given, float)[places], True
    missing = np.flatnonzero(~known_D)
    missing = missing[np.lexsort((row_D[missing], prompt_R[row_D[missing]]))]
    done, total, said = len(key_D) - len(missing), len(key_D), f"scores by {reward.name}"
    on_progress(done, total, said)
    under_way = dict[int, tuple[NDArray[np.intp], Batch]]()  # what each shard scores, by its number

    def batches() -> Iterator[Batch]:
        for number, part in enumerate(_filled(prompt_R[row_D[missing]], shard_responses)):
            batch = rows.take(row_D[missing[part]].tolist())
            under_way[number] = missing[part], batch
            yield batch

    with closing(score_each(reward.function, batches(), name=reward.name)) as scored:
        for number, values in scored:
            wanted, batch = under_way.pop(number)
            _write(directory / f"part-{first + number:05d}.parquet", reward.made_by, batch, values)
            rewards_D[wanted] = values
            done += len(values)
            on_progress(done, total, said)
    rewards = rewards_D[distinct_R]
    check_left_out(prompts, rewards, name=reward.name)
    return rewards


def score_shard(path: Path, reward: NamedReward, rows: Batch) -> None:
    """Score all rows into one shard as `score_to` does, which is written whole or not at all."""
    named = zip(_prompt_ids(rows.prompts), rows.responses, strict=True)
    distinct = {response: row for row, response in enumerate(named)}
    batch = rows.take(list(distinct.values()))
    ((_, rewards),) = score_each(reward.function, [batch], name=reward.name)
    _write(path, reward.made_by, batch, rewards)


def _write(path: Path, made_by: str, batch: Batch, rewards: Sequence[float]) -> None:
    prompts, responses, columns = batch
    table = {
        "prompt_id": pa.array(_prompt_ids(prompts), pa.string()),
        "prompt": to_column(prompts),
        "response": pa.array(responses, pa.string()),
        "reward": pa.array(rewards, pa.float64(), from_pandas=True),  # NaN is null
    } | ({} if columns is None else {"columns": pa.array(columns, pa.string())})
    write_table(path, pa.table(table, metadata={MADE_BY: made_by.encode()}))


def _filled(prompt_M: NDArray[np.intp], responses: int) -> Iterator[slice]:
    """Yield what one shard holds at a time of responses in the order of their prompts; a prompt is never split."""
    begin = end = 0
    for following in (np.flatnonzero(np.diff(prompt_M, append=-1)) + 1).tolist():  # where a prompt's responses end
        if begin < end and following - begin > responses:
            yield slice(begin, end)
            begin = end
        end = following
    if begin < end:
        yield slice(begin, end)


def _keys(prompts: Sequence[list[Message]], responses: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.bytes_]]:
    """Return the number of each row's prompt, in the order in which they first occur, and the key of each row."""
    numbers: dict[str, int] = {}
    prompt_R, key_R = np.empty(len(prompts), np.intp), np.empty(len(prompts), f"S{KEY_BYTES}")
    for row, (identity, text) in enumerate(zip(_prompt_ids(prompts), responses, strict=True)):
        prompt_R[row], key_R[row] = numbers.setdefault(identity, len(numbers)), _key(identity, text)
    return prompt_R, key_R


def _key(identity: str, text: str) -> bytes:
    return blake2b(f"{identity} {text}".encode(), digest_size=KEY_BYTES).digest()


def _prompt_ids(prompts: Iterable[list[Message]]) -> Iterator[str]:
    before, identity = None, ""
    for prompt in prompts:
        if prompt is not before:  # usually a row has the same prompt as the row before it
            before, identity = prompt, prompt_id(prompt)
        yield identity


def check_unchanged(reward: NamedReward, shards: Iterable[Path]) -> None:
    """Raise DataError unless ``reward`` reproduces the first 4 rows of the first of ``shards`` that it scored.

    A difference up to 1e-4 of the largest of these rewards counts as rounding. A classifier, known by its weights,
    tolerates any that it has. Without such a shard nothing is checked.
    """
    shard = next((shard for shard in shards if _made_by(read_table(shard, [])) == reward.made_by), None)
    if shard is None:
        return
    first = read_table(shard).slice(0, CHECKED_AGAIN)
    prompts, texts, before = prompts_of(first), column_values(first, "response"), column_values(first, "reward")
    kept = column_values(first, "columns") if "columns" in first.column_names else None
    now = score(reward.function, prompts, texts, columns=kept, name=reward.name)
    known = np.array(before, float)
    gaps = np.where(np.isnan(now) == np.isnan(known), np.abs(np.nan_to_num(now) - np.nan_to_num(known)), np.inf)
    if isinstance(reward.function, ClassifierReward):
        reward.function.tolerate(float(gaps.max()))
    elif gaps.max() > ROUNDING * np.abs(np.nan_to_num(known)).max():
        worst = int(gaps.argmax())
        raise DataError(
            f"reward {reward.name}: {reward.made_by} now returns {now[worst]:g} instead of {known[worst]:g} "
            f"({shard}, row {worst}, prompt {prompt_id(prompts[worst])}), so it is not the reward that scored "
            "before; restore that one (a function must be deterministic), or score everything again under another "
            "name, such as a url with ?revision=2"
        )


def _made_by(table: pa.Table) -> str:
    return (table.schema.metadata or {}).get(MADE_BY, b"").decode()


def count_scored(responses: int, folder: Path) -> SoFar:
    """Return how many distinct ones of ``responses`` are scored in the shards of a folder."""
    scored = sum(read_table(shard, ["reward"]).num_rows for shard in folder.glob("part-*.parquet"))
    return SoFar(f"{scored:,} responses scored", min(1.0, scored / responses)) if scored else NOTHING
