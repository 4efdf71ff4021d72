"""Print the peak memory and the time of each stage that reads or writes tables, at 1,000 and at 100,000 prompts.

    python benchmarks/memory.py [K] [PROMPTS …]

Rows, responses and rewards are made up; the tables, their readers and writers and the stages are the real ones, each in
a process of its own, which first does a run of 8 prompts: what that takes (imports, buffers) is subtracted. Every
training prompt has K (16) rollouts of about 32 tokens, and equally many test prompts as many samples. Prints seconds,
those of the processor in brackets, and files and bytes of each folder. 100,000 prompts take ten minutes and 1.5 GB of
disk.

What a prompt costs: in every stage the prompt as it is stored (its text and token ids, here 570 bytes), and up to four
times that while its Parquet file is read; then, with K rollouts,

data       all rows as Python objects, here two a prompt
rollout    which of the rollouts are there (K bytes), a quarter of the prompts at a time
score      where each rollout lies, its reward and the table to write (56·K bytes), a quarter of the prompts at a time
calibrate  the rewards (8·K bytes), and those of a quarter of the prompts as they are sorted
train      where each rollout lies, its length, log-probability and reward (32·K bytes); token ids are in a file
evaluate   as score, but for all prompts, and a column for each reward
results    8·K bytes for each column of scores, of the reference and of one policy, and for as many intermediate arrays

Text and token ids of responses are never all in memory.
"""

import json
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from run_files import load_recipe

from infalign.sampling.prompts import Sampler  # in whose place made-up responses come
from infalign.steps import whole_run  # each stage is measured alone

LENGTHS = (8, 56)  # tokens of a response
PROMPT_WORDS, VOCABULARY, POLICIES = 30, 2048, ("aware", "plain")


class Response(NamedTuple):
    """A response as engines give it."""

    token_ids: tuple[int, ...]
    text: str
    finish: str
    logprob: float


class Synthetic:
    """An engine that draws from a few thousand made-up responses: the same for the same prompt and number."""

    device_type = "cpu"

    def __init__(self) -> None:
        rng = np.random.default_rng(2)
        rows = [tuple(rng.integers(VOCABULARY, size=rng.integers(*LENGTHS)).tolist()) for _ in range(4096)]
        self.responses = [Response(ids, " ".join(f"w{i:03x}" for i in ids), "stop", -float(len(ids))) for ids in rows]

    def sample_together(self, draws: Sequence[tuple[Any, int]]) -> list[Any]:
        """Return responses."""
        return [self.responses[(int(prompt.prompt_id, 16) + 97 * index) % 4096] for prompt, index in draws]


def reward(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return a number that depends on the response."""
    return [float(int(text[1:4], 16) + len(text) / 1000) for text in responses]


def judge(prompts: list[Any], responses: list[str]) -> list[float]:
    """Return another number."""
    return [float(int(text[-3:], 16)) for text in responses]


def write_rows(folder: Path, prompts: int) -> None:
    """Write as many training and test pairs as there are to be prompts."""
    rng = np.random.default_rng(0)
    words = np.array([f"w{i:03x}" for i in range(1000)])
    for name in ("train", "test"):
        with (folder / f"{name}.jsonl").open("w") as file:
            for i in range(prompts):
                prompt, chosen, rejected = (" ".join(words[rng.integers(1000, size=n)]) for n in (PROMPT_WORDS, 12, 12))
                row = {"prompt": f"{name} {i} {prompt}", "chosen": f"{chosen} a", "rejected": f"{rejected} b"}
                file.write(f"{json.dumps(row)}\n")


def run(folder: Path, prompts: int, k: int) -> Any:
    """Return the context of a run on the rows in ``folder``."""
    settings = {
        "run_dir": str(folder / "run"),
        "data": {"folder": str(folder), "sources": [{"path": "train.jsonl"}], "test": [{"path": "test.jsonl"}]},
        "policy": {"scratch": {"vocabulary": VOCABULARY}, "fit": {}},
        "reward": {"function": "memory:reward"},
        "judge": {"function": "memory:judge"},
        "rollout": {"prompts": prompts, "k": k, "max_new_tokens": LENGTHS[1]},
        "policies": {name: {"transform": "exp:10", "kl_budget": 0.5 + i} for i, name in enumerate(POLICIES)},
        "evaluate": {"prompts": prompts, "samples": k, "max_n": 4, "rewind": "rewind:0.75:4"},
        "compute": {"device": "cpu", "threads": 1},
    }
    (folder / "recipe.yaml").write_text(json.dumps(settings))  # JSON is YAML
    return whole_run.open_run(load_recipe(folder / "recipe.yaml"))


# Stages


def quiet(done: int, total: int, note: str) -> None:
    """Report to nobody."""


@contextmanager
def synthetic_engine(*_: object, **__: object) -> Iterator[Synthetic]:
    """Yield the engine in place of the one that the recipe names."""
    yield Synthetic()


def do(which: str, run: Any) -> None:
    """Do the units of a run that are named, or all units of a stage."""
    for unit in whole_run.units(run):
        if {unit.name, unit.stage} & {*which.split()}:
            unit.output.parent.mkdir(parents=True, exist_ok=True)
            unit.work(on_progress=quiet)


def read_for_training(run: Any) -> None:
    """Read the rollouts as the offline solvers get them, each once."""
    rollout, rows = run.recipe.rollout, run.stored.rows()
    assert sum(len(row["prompt_ids"]) > 0 for row in rows) == rollout.prompts * rollout.k


def write_policies(run: Any) -> None:
    """Write the scores of policies, which are the reference's but for noise, in place of evaluating models."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(1)
    table = pq.read_table(run.layout.evaluation("reference") / "scores.parquet")
    for name in POLICIES:
        changed = table
        for column in ("reward", "judge"):
            noisy = table[column].to_numpy() + rng.normal(50, 100, table.num_rows)
            changed = changed.set_column(changed.column_names.index(column), column, pa.array(noisy))
        changed = changed.append_column("kl", pa.array(rng.gamma(2.0, 0.25, table.num_rows)))
        folder = run.layout.evaluation(name)
        folder.mkdir(parents=True)
        pq.write_table(changed, folder / "scores.parquet")


STAGES: dict[str, Callable[[Any], None]] = {
    "data": partial(do, "data"),
    "rollout": partial(do, "rollout"),
    "score": partial(do, "score"),
    "calibrate": partial(do, "calibrate"),
    "train: read the rollouts": read_for_training,
    "evaluate": partial(do, "samples-reference evaluate-reference"),
    "policies": write_policies,
    "results": partial(do, "results"),
}
NOT_SHOWN = "policies"
WARM = "warm"  # folder of the run that a process does first


# Measuring


def peak() -> int:
    """Return the most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measured(stage: str, folder: Path, prompts: int, k: int) -> tuple[int, float, float]:
    """Run a stage and return by how many bytes it raised the peak, its seconds and those of the processor."""
    Sampler.open = synthetic_engine
    for name, count in ((WARM, 8), (".", prompts)):  # the first has the imports and all that is allocated once
        with run(folder / name, count, k) as asked:
            before, start, computing = peak(), time.perf_counter(), time.process_time()
            STAGES[stage](asked)
    return peak() - before, time.perf_counter() - start, time.process_time() - computing


def in_own_process(*arguments: Any) -> tuple[int, float, float]:
    """Return what `measured` returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, *arguments).result()


def main() -> None:
    """Measure every stage at every number of prompts and print the tables."""
    k, *sizes = [int(word) for word in sys.argv[1:]] or [16]
    sizes = sizes or [1_000, 100_000]
    found: dict[str, list[tuple[int, float, float]]] = {stage: [] for stage in STAGES}
    folders: dict[str, list[str]] = {}
    for prompts in sizes:
        folder = Path(tempfile.mkdtemp())
        try:
            for place, count in ((folder / WARM, 8), (folder, prompts)):
                (place / "run").mkdir(parents=True)
                write_rows(place, count)
            for stage in STAGES:
                found[stage].append(in_own_process(stage, folder, prompts, k))
                print(stage, prompts, found[stage][-1], file=sys.stderr, flush=True)
            for place in ("rollouts", "scores", "calibrated.parquet", "evaluation"):
                path = folder / "run" / place
                files = [file for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
                size = sum(file.stat().st_size for file in files)
                said = f"{len(files):,} files, {size / 1e6:,.1f} MB, {size / prompts / k:,.0f} bytes a rollout"
                folders.setdefault(place, []).append(said)
        finally:
            shutil.rmtree(folder)
    heads = [f"{prompts:,} prompts × {k}" for prompts in sizes]
    print(f"| stage | {' | '.join(heads)} | bytes a prompt |\n|{'---|' * (len(sizes) + 2)}")
    for stage, values in found.items():
        if stage != NOT_SHOWN:
            cells = [f"{size / 2**20:,.0f} MiB, {wall:.1f} s ({computing:.1f} s)" for size, wall, computing in values]
            grown = (values[-1][0] - values[0][0]) / max(sizes[-1] - sizes[0], 1)
            print(f"| {stage} | {' | '.join(cells)} | {grown:,.0f} |")
    print(f"\n| folder | {' | '.join(heads)} |\n|{'---|' * (len(sizes) + 1)}")
    for place, said in folders.items():
        print(f"| {place} | {' | '.join(said)} |")


if __name__ == "__main__":
    main()
