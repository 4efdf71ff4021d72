"""How long a run takes: its FLOPs, from rows and lengths of the data and sizes of models, and the machine's speed."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from infalign.core.errors import ConfigError, InfalignError
from infalign.data.examples import Example
from infalign.data.messages import spoken
from infalign.data.sources import Source, read_examples
from infalign.models.adapters import adapter_base
from infalign.models.conversion import gguf_file, is_gguf
from infalign.models.pretrained import is_adapter
from infalign.models.settings import Compute, Scratch
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.sampling.settings import MOST_PROMPTS
from infalign.steps.data import HELD_OUT_PAIRS, split
from infalign.steps.run import DRAWN, Pass, Run

SAMPLED_ROWS = 2000  # of a built-in task, which is known to be sound; files are read whole
MEASURED_TEXTS = 256  # examples of which the lengths are counted
LETTERS_PER_TOKEN = 4  # where the tokenizer is not here
TURN_TOKENS = 3  # that a chat template writes around a turn
SIZE_IN_NAME = re.compile(r"(\d+(?:\.\d+)?)([BM])(?![A-Z])", re.IGNORECASE)  # Qwen3-0.6B, SmolLM2-135M
LEAST_PROMPTS = 20  # of which two are held out
USED = 0.3  # of the speed of a matrix product, in a run
OVERHEAD = 1.5e6  # parameters: what a token costs beside its products, which decides for tiny models
H100_FLOPS = 989e12  # per second in bfloat16


class UnknownSizeError(InfalignError):
    """Rows or a model whose size cannot be found here; the text names them."""


class Sampled(NamedTuple):
    """Examples of a source, how many rows were left out, and how many of the source each of these stands for."""

    examples: list[Example]
    skipped: int
    weight: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows by table, mean lengths in tokens of the data's texts and of drawn responses, and parameters of models."""

    rows: Mapping[str, int]  # empty where only the hub knows them
    prompt: float
    response: float
    drawn: float
    parameters: Callable[[Scratch | str], float]  # raises UnknownSizeError

    def flops(self, made: Pass) -> float:
        """Return the FLOPs of a pass. Raises UnknownSizeError."""
        rows = min(made.rows, self.rows.get(made.table, sys.maxsize))
        if rows == sys.maxsize and made.models:
            raise UnknownSizeError("the number of rows on the hub")
        parameters = sum(OVERHEAD + self.parameters(model) for model in made.models)
        response = self.drawn if made.table.endswith("_prompts") else self.response
        return made.flops * parameters * rows * (self.prompt + made.responses * response)


def within_minutes(recipe: Recipe) -> Recipe:
    """Return a recipe with as many of its prompts as have their rollouts within ``rollout.minutes``, if it has these.

    The recorded recipe of its run directory keeps the number for the next run, also on another machine. Raises
    ConfigError where the time cannot be estimated.
    """
    rollout, recorded = recipe.rollout, Path(recipe.run_dir) / "recipe.yaml"
    if rollout.minutes is None or rollout.prompts != MOST_PROMPTS:  # a number that is given is obeyed
        return recipe.model_copy(update={"rollout": rollout.model_copy(update={"minutes": None})})
    known = load_recipe(recorded) if recorded.is_file() else None
    if known is not None and _what_takes_time(known) == _what_takes_time(recipe):
        fitting = known.rollout.prompts
    else:
        run, data = Run.of(recipe), recipe.data
        named = [data.sources, data.test]
        local = [[one for one in part if one.hub is None or one.hub.found_in(data.folder).is_local] for part in named]
        counts = count(run, *([read_sample(run, one) for one in part] for part in local), whole=local == named)
        try:
            each = counts.flops(Pass(DRAWN, run.networks("reference"), "train_prompts", 1, rollout.k))
        except UnknownSizeError as error:
            raise ConfigError(f"rollout.minutes needs {error}; give rollout.prompts as a number") from error
        affordable = 60 * rollout.minutes * job_speed(recipe.compute)[0] * recipe.compute.processes / max(each, 1.0)
        fitting = min(rollout.prompts, max(LEAST_PROMPTS, int(affordable)))  # the data may have fewer, and grow
    return recipe.model_copy(update={"rollout": rollout.model_copy(update={"prompts": fitting})})


def _what_takes_time(recipe: Recipe) -> tuple[object, ...]:
    policy, rollout = recipe.policy, recipe.rollout
    return policy.model, policy.scratch, rollout.minutes, rollout.k, rollout.max_new_tokens


def read_sample(run: Run, source: Source) -> Sampled:
    """Read a local source: of a built-in task the first rows, of a file all. Raises DataError."""
    there = source.world or source.sums or 0
    if there > SAMPLED_ROWS:
        source = source.model_copy(update={"world" if source.world else "sums": SAMPLED_ROWS})
    examples, skipped = read_examples(run.recipe.data, [source], seed=run.recipe.seed)
    return Sampled(examples, len(skipped), max(1.0, there / SAMPLED_ROWS))


def count(run: Run, train: Sequence[Sampled], test: Sequence[Sampled], *, whole: bool) -> Counts:
    """Return rows and lengths of a run's texts before they are prepared; ``whole``: the hub has no other rows.

    Without any example here, texts are as long as the recipe allows.
    """
    recipe, parameters = run.recipe, cache(partial(parameters_of, run))
    longest, most = recipe.rollout.max_new_tokens, recipe.data.max_prompt_tokens
    examples, tests = ([example for part in parts for example in part.examples] for parts in (train, test))
    if not examples:
        return Counts({}, most, longest, longest, parameters)
    tokens = _token_counter(run, examples)

    def asked(example: Example) -> int:
        return sum(TURN_TOKENS + tokens(turn["content"]) for turn in example.prompt)

    prompts = [length for e in _some(examples) if (length := asked(e)) <= most]
    chosen = [1 + tokens(spoken(e.chosen)) for e in _some(examples) if e.chosen] or [longest]
    lengths = fmean(prompts or [most]), fmean(chosen), fmean(min(length, longest) for length in chosen)
    rows = dict[str, int]()
    if whole:
        weights = {example.where: part.weight for part in (*train, *test) for example in part.examples}
        splits = split(recipe, examples, tests)
        rows = {name: round(sum(weights[e.where] for e in table)) for name, table in splits.tables.items()}
        rows["test_pairs"] = min(rows["test_pairs"], HELD_OUT_PAIRS)
        for name, asking in splits.asking.items():
            distinct = list({e.prompt_id: e for e in asking}.values())
            there, fit = sum(weights[e.where] for e in distinct), [asked(e) <= most for e in _some(distinct)]
            rows[f"{name}_prompts"] = round(there * fmean(fit or [0]))
            rows[f"{name}_prompts_too_long"] = round(there) - rows[f"{name}_prompts"]
    return Counts(rows, *lengths, parameters)


def _some(examples: Sequence[Example]) -> Sequence[Example]:
    return examples[:: max(1, len(examples) // MEASURED_TEXTS)]


def _token_counter(run: Run, examples: Sequence[Example]) -> Callable[[str], int]:
    """Return what counts the tokens of a text, without transformers, which takes seconds to load."""
    policy = run.recipe.policy
    if policy.scratch is not None:
        from infalign.models.scratch import train_bpe

        texts = (t["content"] for e in _some(examples) for t in (e.prompt[-1], *e.chosen, *(e.rejected or ())))
        tokenizer = train_bpe(texts, policy.scratch.vocabulary)
    elif (file := Path(str(policy.model)) / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
    else:
        return lambda text: len(text) // LETTERS_PER_TOKEN
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def parameters_of(run: Run, model: Scratch | str) -> float:
    """Return the parameters of a Llama from scratch, by a folder's headers, or by the name of a hub id.

    A GGUF that is not converted yet is taken for a byte per parameter. Raises UnknownSizeError.
    """
    if isinstance(model, Scratch):
        vocabulary = (run.recipe.policy.scratch or model).vocabulary
        width, layers = model.hidden, model.layers
        return width * (vocabulary + 1) + layers * (13 * width + 2) * width
    folder, named = Path(model), run.ggufs.get(model, model)
    if not folder.is_dir() and is_adapter(named):
        return parameters_of(run, adapter_base(named))
    if not folder.is_dir() and is_gguf(named):
        return gguf_file(named).stat().st_size
    try:
        if not folder.is_dir():
            number, unit = SIZE_IN_NAME.findall(model)[-1]
            return float(number) * (1e9 if unit in "Bb" else 1e6)
        return sum(map(_parameters_in, folder.glob("*.safetensors")))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:  # a run says why
        raise UnknownSizeError(f"the size of {model}") from error


def _parameters_in(weights: Path) -> int:
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def has_gpu() -> bool:
    """Return whether a device file speaks for a GPU: torch, which knows it, takes seconds to load."""
    return any(path.exists() for path in map(Path, ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))


def job_speed(compute: Compute) -> tuple[float, str]:
    """Return the FLOP/s of a job, and in words how they were found: by a matrix product on this machine."""
    if compute.device == "cuda" and not has_gpu():
        return USED * H100_FLOPS, f"one H100 at {USED:.0%} of its {H100_FLOPS / 1e12:.0f} TFLOP/s"
    if compute.device != "cpu" and has_gpu() and compute.torch_device() == "cuda":
        import torch

        on_gpu = torch.ones((8192, 8192), dtype=torch.bfloat16, device="cuda")
        peak = _product_speed(on_gpu, time.perf_counter, torch.cuda.synchronize)
    else:  # a wait for a core is not counted
        cores = os.cpu_count() or 1
        of_core = _product_speed(np.ones((1024, 1024), np.float32), time.process_time, lambda: None)
        peak = min(compute.threads or cores, cores) * of_core
    return USED * peak, f"this machine, at {USED:.0%} of the {peak / 1e9:,.0f} GFLOP/s of a matrix product"


def _product_speed(matrix: Any, clock: Callable[[], float], synchronize: Callable[[], None]) -> float:
    """Return the FLOP/s of a square matrix times itself, the second time."""
    seconds = 0.0
    for _ in range(2):
        begun = clock()
        matrix @ matrix
        synchronize()
        seconds = clock() - begun
    return float(2 * len(matrix) ** 3 / max(1e-6, seconds))
