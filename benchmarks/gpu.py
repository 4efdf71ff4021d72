"""Whether every path works on a GPU, and how fast: ``python benchmarks/gpu.py paths|recipes|shapes FOLDER``.

`paths`: draws, scores and the start of training, each beside its definition, and a run that is killed and continued.
`recipes`: `demo` (a checker) and `preferences` (a learned reward) on the GPU and on this machine's CPU at once; FOLDER
keeps them. `shapes`: tokens per second and memory for random weights of 135 M, 0.6 B and 1.7 B parameters (trained
whole, as an adapter, as a guide), and memory for 4 B; draws are of 16 prompts × 64. Prints a table; exits with 1 where
something fails. On one H100 they take some three, eight and three minutes. Without a GPU all is done on the CPU, with
shapes so small that only the script is tried. A machine that has torch, peft, pyarrow and matplotlib needs besides:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --dest wheels transformers==5.23.0 trl==1.16.0 \
        datasets multiprocess dill pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection \
        ruamel.yaml cyclopts docstring-parser rich-rst docutils huggingface-hub httpx2 httpcore2 truststore \
        typing-extensions idna h11 anyio fsspec click attrs filelock
    pip install --no-deps wheels/*.whl && PYTHONPATH=src python benchmarks/gpu.py paths FOLDER
"""

import copy
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import guides
import numpy as np
import torch
import transformers
from small_models import llama, word_tokenizer, words
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from infalign import ClassifierReward, Rollouts, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}  # nats per token, between two ways to compute the same
PROMPT, RESPONSE, DRAWN, K, PROMPTS = (256, 128, 32, 64, 4) if DEVICE == "cuda" else (16, 16, 8, 4, 2)  # DRAWN: tokens
SIZES = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size"
SHAPES = {  # SmolLM2's and Qwen3's
    "135M": (576, 1536, 30, 9, 3, 64, 49152),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151936),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936),
}
LARGEST, TINY = "4B", (64, 96, 2, 2, 1, 32, 300)
VOCABULARY, WHOLE = 300, "reference, all trained"
FORMS = WHOLE, "adapter"  # rows of guides.py
Works = dict[str, Callable[[], str]]
ENGINES, DRAWN_PROMPTS = ("shared-prefix", "transformers"), 16
DATA = {"demo": "[{sums: 10000}]", "preferences": "[{world: 500}]"}
SMALL = "rollout.prompts=96 rollout.k=16 evaluate.prompts=24 evaluate.samples=64 evaluate.max_n=16 allow_worthless=true"
FIT = "fit: &fit {batch_size: 64, device_batch_size: 16, bf16: true, gradient_checkpointing: true, lora: {rank: 4}}"
LAW = "transform: optimal, kl_budget: 0.05"
MIXED = (  # what the recipes of 4 B parameters ask of a GPU
    "compute.dtype=bfloat16",
    f"policies={{offline: {{{LAW}, solver: qrpo, {FIT}}}, online: {{{LAW}, solver: rloo, generations: 8, fit: *fit}}}}",
)


class Small:
    """A random model in one precision, and what it drew."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype, self.tokenizer = folder, dtype, word_tokenizer(VOCABULARY)
        for path in (folder, folder / "reward"):
            self.tokenizer.save_pretrained(path)
        self.model = llama(VOCABULARY, hidden=128, layers=4, num_attention_heads=4, tie_word_embeddings=True)
        self.model = self.model.to(DEVICE, getattr(torch, dtype))
        rng = np.random.default_rng(0)
        self.asked = rng.integers(5, 200, (3, 20)).repeat(16, axis=0).tolist()
        self.responses = rng.integers(5, 200, (48, 32)).tolist()

    def near(self, values: Any, others: Any, tokens: Any = 1) -> str:
        """Return the largest difference per token. Raises AssertionError for one beyond rounding."""
        apart, limit = float((np.abs(np.subtract(values, others)) / tokens).max()), ROUNDING[self.dtype]
        assert apart <= limit, f"{apart:.1e} apart, limit {limit:g}"
        return f"{apart:.1e} apart, limit {limit:g}"

    @torch.inference_mode()
    def padded(self, asked: Any, responses: Any) -> Any:
        """Return the log-probabilities of a padded pass."""
        rows = pad_sequence([torch.tensor([*pair[0], *pair[1]]) for pair in zip(asked, responses, strict=True)], True)
        rows, longest = rows.to(DEVICE), max(map(len, responses))
        found = self.model(rows).logits[:, -longest - 1 : -1].float().log_softmax(-1)
        of_token = found.gather(-1, rows[:, -longest:, None])[..., 0]
        lengths = torch.tensor([*map(len, responses)], device=DEVICE)[:, None]
        return (of_token * (torch.arange(longest, device=DEVICE) < lengths)).sum(1).cpu().numpy()

    def packed(self, policy: Any) -> Any:
        """Return the log-probabilities of a packed pass."""
        return guides.logprobs(policy, guides.pack(self.asked, self.responses, DEVICE)).cpu().numpy()

    def engine(self, kind: str) -> str:
        """Compare an engine's log-probabilities with those of a padded pass."""
        prompts = [words(prompt) for prompt in self.asked[::16]]
        drawn = sample((self.model, self.tokenizer), prompts, 16, max_new_tokens=32, engine={"kind": kind}).drawn
        responses = drawn["token_ids"].to_pylist()
        found = self.padded(self.asked, responses)
        return self.near(found, drawn["logprob"].to_pylist(), [*map(len, responses)])

    def start(self, form: str) -> str:
        """Compare an untrained policy, by a packed pass, with its reference; take a step, after which it is another."""
        policy = guides.FORMS[form](copy.deepcopy(self.model))[0]
        before = self.padded(self.asked, self.responses)
        said = self.near(self.packed(policy), before, 32)
        optimizer = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], lr=3e-2)
        guides.gradients(policy, [guides.pack(self.asked, self.responses, DEVICE)])
        optimizer.step()
        moved = np.abs(self.packed(policy) - before) / 32
        assert ROUNDING[self.dtype] < moved.max() < np.inf, f"a step moved it by {moved.max():.1e}"
        return said

    def scores(self) -> str:
        """Compare a classifier's scores on this device with those in float32 on the CPU."""
        self.model.config.id2label = {0: "reward"}
        LlamaForSequenceClassification(self.model.config).save_pretrained(folder := self.folder / "reward")
        rows = [[{"role": "user", "content": text}] for text in "abcdefgh"], ["bake bread"] * 8
        devices = ((DEVICE, self.dtype), ("cpu", "float32"))
        return self.near(*(ClassifierReward.load(str(folder), device=on, dtype=dtype)(*rows) for on, dtype in devices))


def infalign(recipe: str, folder: Path, device: str, *more: str, small: bool) -> "subprocess.Popen[bytes]":
    """Start a run, of few rows if it is ``small``, with more changes of its recipe."""
    processes = 1 if small or device == "cuda" else 4
    changes = [f"run_dir={folder}", f"compute.device={device}", f"compute.processes={processes}"]
    changes += [f"data.sources={DATA[recipe]}", *SMALL.split()] if small else []
    words = [word for change in [*changes, *more] for word in ("--set", change)]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "infalign", "run", recipe, *words], stdout=log, stderr=log)


def killed_and_continued(folder: Path) -> str:
    """Kill a run at its rollouts, by SIGKILL, and run it again to the end."""
    running = infalign("demo", folder, DEVICE, small=True)
    while running.poll() is None and not any(folder.glob("rollouts/*/*.parquet")):
        time.sleep(0.1)
    running.kill()
    assert running.wait() == -signal.SIGKILL, f"it ended before it was killed, see {folder}.log"
    made = [path.stat().st_mtime_ns for path in folder.glob("models/reference/*.safetensors")]
    assert infalign("demo", folder, DEVICE, small=True).wait() == 0, f"see {folder}.log"
    assert made == [path.stat().st_mtime_ns for path in folder.glob("models/reference/*.safetensors")], "trained twice"
    return "continued, nothing trained twice"


def in_bfloat16(folder: Path) -> str:
    """Train adapters in mixed precision with checkpointed gradients, offline and on-policy, and evaluate them."""
    assert infalign("demo", folder, DEVICE, *MIXED, small=True).wait() == 0, f"see {folder}.log"
    kls = [
        (policy, found["kl"]["mean"])
        for policy, found in json.loads((folder / "results.json").read_text())["policies"].items()
    ]
    assert all(np.isfinite(kl) for _, kl in kls), kls
    return ", ".join(f"{policy} {kl:.3f} nats" for policy, kl in kls)


def paths(folder: Path) -> Works:
    """Return the paths on a small model."""
    works: Works = {}
    for dtype in ROUNDING:
        small = Small(folder / dtype, dtype)
        works |= {f"draws, {kind}, {dtype}": partial(small.engine, kind) for kind in ENGINES}
        works |= {f"{form}, {dtype}": partial(small.start, form) for form in (*FORMS, "guide on states")}
        works[f"scores, {dtype}"] = small.scores
    now = time.time_ns()
    works["adapters in bfloat16, offline and on-policy"] = partial(in_bfloat16, folder / f"bfloat16-{now}")
    return works | {"a run that was killed": partial(killed_and_continued, folder / f"killed-{now}")}


def recipes(folder: Path) -> Works:
    """Start two recipes on both devices, and return the comparison of their results."""
    devices = {"gpu": DEVICE, "cpu": "cpu"}
    places = {(name, on): folder / f"{name}-{on}" for name in DATA for on in devices}
    small = DEVICE == "cpu"
    running = {key: infalign(key[0], place, devices[key[1]], small=small) for key, place in places.items()}

    def compared(name: str) -> str:
        ended = [running[name, on].wait() for on in devices]
        assert not any(ended), f"exit codes {ended}, see {folder}/{name}-*.log"
        here, there = (json.loads((places[name, on] / "results.json").read_text()) for on in devices)
        found = []
        for policy in here["policies"]:
            by, how = here["judges"][-1], here["procedure"]
            one, other = (run["policies"][policy]["win_rates"][by][how] for run in (here, there))
            found.append(f"{policy} {100 * one['mean']:.1f} beside {100 * other['mean']:.1f}")
            apart = max(one["low"], other["low"]) > min(one["high"], other["high"])
            assert not apart, f"{found[-1]}, intervals apart"
        return "win rates, GPU beside CPU: " + ", ".join(found)

    return {name: partial(compared, name) for name in DATA}


def measured(name: str, form: str) -> str:
    """Return tokens per second of draws, but for the largest shape, and of training, and GB."""
    sizes = dict(zip(SIZES.split(), SHAPES[name] if DEVICE == "cuda" else TINY, strict=True))
    with torch.device(DEVICE):
        base = Qwen3ForCausalLM(Qwen3Config(**sizes, eos_token_id=sizes["vocab_size"] - 1, tie_word_embeddings=True))
    model, said = guides.FORMS[form](base if form == WHOLE else base.bfloat16())[0].eval(), []
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    asked = torch.randint(3, sizes["vocab_size"] - 1, (PROMPTS, PROMPT)).tolist()
    autocast = torch.autocast(DEVICE, torch.bfloat16)
    if name != LARGEST:
        if form == WHOLE:
            model.bfloat16()  # `sample` holds a float32 model to float32's rounding
        policy, drawn = (model, word_tokenizer(sizes["vocab_size"])), list[Rollouts]()
        prompts = [words([shard, *asked[shard % PROMPTS][1:]]) for shard in range(DRAWN_PROMPTS)]
        with autocast:
            seconds = guides.fastest(lambda: drawn.append(sample(policy, prompts, K, max_new_tokens=DRAWN)))
        tokens = sum(map(len, drawn[0].drawn["token_ids"].to_pylist()))
        said.append(f"draws {tokens / seconds:,.0f} tokens/s")
        if form == WHOLE:
            model.float()
    responses = torch.randint(3, sizes["vocab_size"], (8 * PROMPTS, RESPONSE)).tolist()
    batch = guides.pack([asked[i // 8] for i in range(8 * PROMPTS)], responses, DEVICE)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-5)

    def step() -> None:
        with autocast:
            guides.gradients(model, [batch])
        optimizer.step()
        optimizer.zero_grad()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    said.append(f"training {8 * PROMPTS * RESPONSE / guides.fastest(step):,.0f} tokens/s")
    assert all(weight.isfinite().all() for weight in model.parameters()), "not finite after a step"
    return "; ".join([*said, *([f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB"] if DEVICE == "cuda" else [])])


def shapes(_: Path) -> Works:
    """Return the measurement of each shape in each form; the largest is not trained whole."""
    asked = [(name, form) for name in SHAPES for form in FORMS if (name, form) != (LARGEST, WHOLE)]
    return {", ".join(one): partial(measured, *one) for one in asked}


def main() -> int:
    """Do one part and print its table."""
    part, folder = sys.argv[1:]
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU: the CPU, with tiny shapes"
    print(f"{device}; torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| path | | found | took |\n|---|---|---|---|")
    Path(folder).mkdir(parents=True, exist_ok=True)
    works = {"paths": paths, "recipes": recipes, "shapes": shapes}[part](Path(folder).resolve())
    failures = 0
    for name, work in works.items():
        started = time.perf_counter()
        try:
            passed, said = "pass", work()
        except Exception as error:  # of any kind, so that the other paths are still tried
            passed, said = "fail", " ".join(f"{type(error).__name__}: {error}".split())[:300]
        failures += passed == "fail"
        print(f"| {name} | {passed} | {said} | {time.perf_counter() - started:.0f} s |", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
