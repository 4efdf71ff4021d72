"""Rollouts, rewards and token ids are read a few at a time: what is held does not grow with their text."""

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import enumerable
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import job_in
from micro import silent
from psutil import Process
from transformers import Trainer, TrainingArguments

from infalign.core.sequences import Lazy, chained, in_blocks, token_lists, token_lists_on_disk
from infalign.models.pretrained import load_policy
from infalign.models.settings import Fit
from infalign.rewards.base import Batch
from infalign.rewards.scores import NamedReward, score_to
from infalign.sampling.engine import Engine, Prompt, Response
from infalign.sampling.rollouts import draw, find_rollouts, read_rollouts
from infalign.training.callbacks import TrimHeap
from infalign.training.common import run_training, trainer_config

K = 8


class Long(Engine):
    """An engine of long responses that say to which prompt and under which number they were given."""

    def __init__(self, words: int) -> None:
        self.words = words

    def sample_together(self, draws: Sequence[tuple[Prompt, int]]) -> list[Response]:
        return [Response((1, i), f"{asked.prompt_id} {i}" + " word" * self.words, "stop", -1.0) for asked, i in draws]


def prompts(count: int) -> list[Prompt]:
    """Return prompts."""
    return [Prompt(f"p{i:05d}", [i]) for i in range(count)]


def ids(count: int) -> list[str]:
    """Return their ids."""
    return [prompt.prompt_id for prompt in prompts(count)]


def peak(work: Callable[[], object]) -> int:
    """Return the most bytes that Python held while ``work`` ran."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_lazy_items_are_made_when_they_are_asked_for() -> None:
    """Places count from either end and can be sliced, nothing lies beyond the ends, and no other item is made."""
    made: list[int] = []
    squares = Lazy(5, lambda i: made.append(i) or i * i)
    assert (squares[2], squares[-1], squares[1:3]) == (4, 16, [1, 4])
    assert made == [2, 4, 1, 2]
    assert list(squares) == [0, 1, 4, 9, 16]
    with pytest.raises(IndexError):
        squares[5]
    assert list(chained(["ab", "", "c", squares])) == ["a", "b", "c", 0, 1, 4, 9, 16]


def test_a_block_is_read_once_while_its_items_are_asked_for() -> None:
    """Going through 7 items in blocks of 3 reads three blocks, and going back reads one again."""
    read: list[int] = []

    def block(start: int) -> list[int]:
        read.append(start)
        return list(range(start, min(start + 3, 7)))

    items = in_blocks(7, 3, block)
    assert (list(items), items[0], read) == ([0, 1, 2, 3, 4, 5, 6], 0, [0, 3, 6, 0])


def test_token_lists_are_those_of_the_columns(tmp_path: Path) -> None:
    """In memory and on the disk, where no file can be seen, lists come back as they were, empty ones too."""
    lists = [[5, 70_000], [], [1], [2, 3, 4]]
    column = pa.chunked_array([pa.array(lists[:1], pa.list_(pa.int32())), pa.array(lists[1:], pa.list_(pa.int32()))])
    assert list(token_lists(column.slice(1))) == lists[1:]
    kept = token_lists_on_disk([column, column.slice(2)], tmp_path)
    assert list(kept) == [*lists, [1], [2, 3, 4]]
    assert (kept[3], list(tmp_path.iterdir())) == ([2, 3, 4], [])


def test_blocks_of_rollouts_are_whatever_shards_they_lie_in(tmp_path: Path) -> None:
    """Drawn in another order, then more of each, rollouts are read in any order of prompts, a column at a time."""
    draw(Long(0), prompts(40)[::-1], 2, tmp_path, on_progress=silent)
    draw(Long(0), prompts(50), 5, tmp_path, on_progress=silent)
    order = [*ids(50)[::-3], *ids(50)[::3]]
    rollouts = find_rollouts(tmp_path, order, 4)
    expected = [f"{prompt_id} {i}" for prompt_id in order for i in range(4)]
    assert list(rollouts.values("text")) == expected
    tables = list(rollouts.tables(["text"]))
    assert [table.num_rows for table in tables[:-1]] == [64] * (len(tables) - 1)
    assert pa.concat_tables(tables)["text"].to_pylist() == expected
    assert read_rollouts(tmp_path, order, 4)["text"].to_pylist() == expected


def test_a_shard_of_rewards_is_bounded_by_its_responses(tmp_path: Path) -> None:
    """Five distinct responses a shard are one prompt of many or two prompts of two, never part of a prompt."""
    said = {"a": ["1", "2", "3", "4", "5", "6"], "b": ["1", "2"], "c": ["1", "1", "2", "1"], "d": ["1", "2"]}
    rows = [([{"role": "user", "content": name}], text) for name, texts in said.items() for text in texts]
    asked, responses = map(list, zip(*rows, strict=True))

    def reward(prompts: list[Any], texts: list[str]) -> list[float]:
        return [float(text) for text in texts]

    named = NamedReward(reward, "reward", "a")
    found = score_to(tmp_path, named, Batch(asked, responses), shard_responses=5, on_progress=silent)
    assert found.tolist() == [float(text) for text in responses]
    assert [pq.read_table(path).num_rows for path in sorted(tmp_path.iterdir())] == [6, 4, 2]


def test_drawing_and_scoring_hold_no_text_but_of_a_few_prompts(tmp_path: Path) -> None:
    """Four times the prompts, of 5,000 characters a response, cost less than 500 bytes more for each response."""
    few, many = (np.array(peaks(tmp_path / str(count), count)) for count in (64, 256))
    assert ((many - few) / (192 * K) < 500).all(), (few, many)


def peaks(folder: Path, count: int) -> tuple[int, int, int]:
    """Return the most bytes held while responses are drawn, scored, and read again with their scores."""
    asked = [[{"role": "user", "content": prompt_id}] for prompt_id in ids(count)]

    def score() -> None:
        rollouts = find_rollouts(folder, ids(count), K)
        rewards = score_to(
            folder / "scores",
            NamedReward(lambda _, texts: [float(text.split()[1]) for text in texts], "reward", "a"),
            Batch(Lazy(len(rollouts), lambda i: asked[i // K]), rollouts.values("text")),
            shard_responses=64,
            on_progress=silent,
        )
        np.testing.assert_array_equal(rewards, np.tile(np.arange(float(K)), count))

    return peak(lambda: draw(Long(1000), prompts(count), K, folder, on_progress=silent)), peak(score), peak(score)


class Pieces:
    """400 MB in pieces that are freed, between pieces that are kept."""

    kept: ClassVar[list[bytearray]] = []

    def __init__(self) -> None:
        freed = []
        for _ in range(4000):
            freed.append(bytearray(b"x" * 100_000))
            self.kept.append(bytearray(b"x" * 1_000))
        self.in_use = Process().memory_info().rss

    def given_back(self) -> int:
        """Return by how many bytes the process has become smaller since."""
        return self.in_use - Process().memory_info().rss


class LeavesPieces(Trainer):
    """Fine-tuning that leaves pieces at its last step, or in its last evaluation."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        if self.state.global_step + model.training == self.state.max_steps:
            self.pieces = Pieces()
        return super().compute_loss(model, inputs, *arguments, **options)


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_training_gives_back_what_it_freed(evaluated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when it is over; and so does an evaluation."""
    monkeypatch.setattr(TrimHeap, "SECONDS", 0.0)
    case = enumerable.enumerable(tmp_path / "reference")
    model, _ = load_policy(case.folder)
    rows = [{"input_ids": ids, "labels": ids} for ids in case.prompt_ids[:1]] * 4
    fit, job = Fit(batch_size=1, learning_rate=1e-4), job_in(tmp_path)
    options = {"eval_strategy": "steps", "eval_steps": 1.0} if evaluated else {}
    args = trainer_config(TrainingArguments, fit, job, **options)
    trainer = LeavesPieces(model=model, args=args, train_dataset=rows, eval_dataset=rows[:1] if evaluated else None)
    run_training(trainer, job)
    assert trainer.pieces.given_back() > 300_000_000  # a training may take some itself
