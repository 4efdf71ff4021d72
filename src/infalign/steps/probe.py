"""How fast models are: measured here with random weights, or told by FLOPs for what is not here."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, inf
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import TaskType, get_peft_model
from psutil import Process
from torch.autograd.graph import saved_tensors_hooks
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

from infalign.core.http import within
from infalign.models import guided, pooled  # noqa: F401 - so that transformers knows them
from infalign.models.gguf import gguf_file, is_gguf
from infalign.models.likely import Likely
from infalign.models.logprobs import LOGITS
from infalign.models.packed import Packed, packing, packs
from infalign.models.scratch import new_policy
from infalign.models.settings import Fit, Lora, Scratch, is_hub_id
from infalign.sampling.engine import Sampling
from infalign.sampling.shared_prefix import SharedPrefixEngine
from infalign.steps.passes import Architecture, Aside, Draw, Last, Read, Taken, Train, UnknownSizeError
from infalign.training.common import lora

LARGEST = 200_000_000  # parameters of a model that is measured; for a larger one its FLOPs are told
ENOUGH = 2e10  # FLOPs of one measurement: half a second of a CPU core, and more where a single text takes more
FEWEST = 16  # texts of one measurement, if there are so many: mixed precision converts the weights for each
ASKED_SECONDS = 3.0  # for what the hub says of a model
REPEATED = 0.3  # seconds in which a measurement is repeated
DRAWN_AGAIN = 3  # times that it is made for draws
BATCH_TOKENS = 16384  # as scoring and KL have them
WEIGHT = 4  # bytes of a parameter, a gradient or a moment of Adam in float32
TRAINERS = 170e6  # bytes of the libraries that train, beyond those that a probe needs
TRAINED, ADAPTED, RUN = 6, 4, 2  # FLOPs a parameter and token; an adapter needs no gradients of the weights


class Accelerator(NamedTuple):
    """A device that is not here: its name, its peaks in FLOP/s, and what of them is assumed to be used."""

    name: str
    bfloat16: float
    float32: float
    used: float  # in training, and in passes over whole texts
    used_drawing: float  # with hundreds of responses at once

    def __str__(self) -> str:
        peaks = f"{self.bfloat16 / 1e12:.0f} TFLOP/s in bfloat16, {self.float32 / 1e12:.0f} in float32"
        return f"{self.name} ({peaks}), training and scoring at {self.used:.0%} of it, draws at {self.used_drawing:.0%}"


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch compute with ``count`` threads inside the block, as silently as a worker of the run does."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_num_threads(before)


H100 = Accelerator("one H100", 989e12, 67e12, used=0.4, used_drawing=0.15)


@dataclass(frozen=True)
class Shape:
    """What a configuration says: parameters in all, those that a token goes through, and those that training changes.

    ``cached`` are the numbers of keys and values that a token leaves, ``width`` those of its state after a layer.
    """

    parameters: int
    passed: int
    trained: int
    cached: int
    width: int


class Probe:
    """Speeds of models on the device of this machine, and of larger ones on an accelerator that is assumed.

    Nothing is downloaded or written: a model has random weights in its own architecture. ``tokenizer`` is the policy's,
    or one like it; ``dtype`` is of drawing and scoring. Without a ``device``, nothing is measured. Raises ConfigError
    for a model that is harmful to load, unless it is among those that were ``checked``. ``ggufs`` names the GGUF of
    each folder that is made of one, which need not be there yet.
    """

    def __init__(
        self,
        device: str | None,
        tokenizer: Any,
        dtype: str,
        *,
        checked: Collection[str] = (),
        ggufs: Mapping[str, str] | None = None,
        assumed: Accelerator = H100,
    ) -> None:
        self.device, self.tokenizer, self.checked, self.assumed = device, tokenizer, checked, assumed
        self.bf16, self.ggufs = dtype == "bfloat16", ggufs or {}
        self.at_start = Process().memory_info().rss if device == "cpu" else 0
        self.measures, self.assumes = False, False  # whether anything was measured, or told by FLOPs
        self._step, self._read, self._draw = cache(self._step_of), cache(self._read_of), cache(self._draw_of)
        self._model, self.shape, self._packs = cache(self._built), cache(self._shape_of), cache(self._packs_of)
        self._on_hub = cache(_parameters_on_hub)

    @property
    def how(self) -> str:
        """How the speeds were found, in words."""
        here = "measured on this machine with random weights in the models' shapes" if self.measures else ""
        told = (
            f"by FLOPs, {TRAINED} a parameter and token that is trained on and {RUN} else, on {self.assumed}, memory "
            "without activations"
            if self.assumes
            else ""
        )
        return "; ".join(filter(None, [here, told]))

    # What the passes ask

    def train(self, asked: Train) -> Taken:
        """Return what a training takes."""
        shape = self.shape(asked.model)
        own = shape.trained if asked.fit.lora is None else 0  # the adapter itself is small
        state = WEIGHT * (shape.parameters + 3 * own)
        flops = TRAINED if asked.fit.lora is None else ADAPTED
        if not self._here(asked.model):
            return self._told(flops * shape.passed * asked.tokens, state, bf16=asked.fit.bf16)
        at_once = asked.rows * (asked.fit.device_batch_size or asked.fit.batch_size) // asked.fit.batch_size
        a_row = asked.prompt / asked.each + asked.response
        rows = max(min(at_once, FEWEST), min(at_once, int(ENOUGH / (TRAINED * shape.passed * a_row))))
        passes, update, activations = self._step(
            asked.model, rows, asked.each, ceil(asked.prompt), ceil(asked.response), asked.fit.lora, asked.fit.bf16
        )
        seconds = asked.steps * (passes * asked.rows / rows + update)
        return Taken(seconds, self.at_start + TRAINERS + state + activations * at_once / rows)

    def draw(self, asked: Draw) -> Taken:
        """Return what drawing responses takes."""
        shape = self.shape(asked.model)
        tokens = asked.together * (asked.prompt + asked.k * asked.most)
        memory = (2 if asked.by_server else self._bytes) * (shape.parameters + shape.cached * tokens)
        if asked.by_server or not self._here(asked.model):
            read = asked.tokens + asked.prompts * asked.prompt
            return self._told(RUN * shape.passed * read, memory, bf16=asked.by_server or self.bf16, drawing=True)
        start, step, row = self._draw(asked.model, asked.k, ceil(asked.prompt), asked.most)
        each = start + asked.most * step / asked.together + asked.k * asked.response * row
        return Taken(asked.prompts * each, self.at_start + memory)

    def read(self, asked: Read) -> Taken:
        """Return what a pass without gradients takes."""
        shape = self.shape(asked.model)
        if not self._here(asked.model):
            bf16 = self.bf16 if asked.fit is None else asked.fit.bf16
            return self._told(RUN * shape.passed * asked.tokens, self._bytes * shape.parameters, bf16=bf16)
        if not self._packs(asked.model):  # the prompt is read with each response
            asked = replace(asked, prompts=asked.prompts * asked.k, k=1)
        mixed = None if asked.fit is None else asked.fit.bf16
        a_token, of_token = self._read(
            asked.model, asked.k, ceil(asked.prompt), ceil(asked.response), asked.vocabulary, mixed
        )
        at_once = min(asked.tokens, BATCH_TOKENS, LOGITS / _vocabulary(self._model(asked.model)))
        return Taken(asked.tokens * a_token, self.at_start + WEIGHT * shape.parameters + of_token * at_once)

    # By FLOPs

    def _told(self, flops: float, memory: float, *, bf16: bool, drawing: bool = False) -> Taken:
        self.assumes = True
        peak = self.assumed.bfloat16 if bf16 else self.assumed.float32
        return Taken(flops / (peak * (self.assumed.used_drawing if drawing else self.assumed.used)), memory)

    @property
    def _bytes(self) -> int:
        return 2 if self.bf16 else WEIGHT

    def _here(self, model: Architecture) -> bool:
        found = self.device is not None and self.shape(model).passed <= LARGEST and self._has_config(model)
        self.measures |= found
        return found

    def _has_config(self, model: Architecture) -> bool:
        model = _whole(model)
        return isinstance(model, Scratch) or self._place(model) is not None

    def _config(self, model: str) -> tuple[str, str | None]:
        place = self._place(model)
        assert place is not None
        return place

    def _place(self, model: str) -> tuple[str, str | None] | None:
        return _place(model if Path(model).is_dir() else self.ggufs.get(model, model))

    def _shape_of(self, model: Architecture) -> Shape:
        if isinstance(model, Aside | Last):
            return self._shape_of_part(model)
        if not self._has_config(model):
            size = self._on_hub(str(model))
            if isinstance(size, str):
                raise UnknownSizeError(size)
            return Shape(size, size, size, cached=0, width=0)
        with torch.device("meta"):
            found = self._new(model)
        config = found.config.get_text_config(decoder=True)
        size, all_heads = found.num_parameters(), getattr(config, "num_attention_heads", None)
        if all_heads is None:  # of a state space, say
            return Shape(size, size, size, cached=0, width=config.hidden_size)
        heads = getattr(config, "num_key_value_heads", None) or all_heads
        of_head = getattr(config, "head_dim", None) or config.hidden_size // all_heads
        cached = 2 * config.num_hidden_layers * heads * of_head
        return Shape(size, size, size, cached, config.hidden_size)

    def _shape_of_part(self, model: Aside | Last) -> Shape:
        """Return the shape of a part; a token goes through the vocabulary, or through a guide's likely tokens.

        In the embedding of a trunk that reads tokens it is looked up.
        """
        whole, trunk = self.shape(model.model), model.trunk if isinstance(model, Aside) else None
        if trunk is not None:
            self.shape(trunk)  # raises for one that is harmful to load
        for part in (model.model, trunk):
            if part is not None and not self._has_config(part):
                raise UnknownSizeError(f"the layers of {part}")
        with torch.device("meta"):
            found = self._part(model)
        if isinstance(model, Last):
            return replace(whole, passed=found.num_parameters())
        tokens, width = found.reference.get_output_embeddings().weight.shape
        vocabulary = min(tokens, model.guide.likely or tokens) * width
        trained = sum(weight.numel() for weight in found.parameters() if weight.requires_grad)
        looked_up = 0 if model.trunk is None else found.trunk.get_input_embeddings().weight.numel()
        passed = trained - looked_up + vocabulary
        return replace(whole, parameters=whole.parameters + trained, passed=passed, trained=trained)

    # Measured

    def _part(self, model: Aside | Last) -> Any:
        """Return the last layers as a model, or a guide beside as few layers as it reads."""
        if isinstance(model, Last):
            return self._new(model.model, model.layers)
        side, likely = model.guide.side, model.guide.likely
        base = self._new(model.model, 1 if side is None else side.reads)
        if side is not None:
            return guided.GuidedForCausalLM.reading(base, **side.model_dump(exclude={"stored"}), likely=likely)
        assert model.trunk is not None
        return guided.GuidedForCausalLM.beside(base, self._new(model.trunk).base_model, likely=likely)

    def _new(self, model: Scratch | str, layers: int | None = None) -> Any:
        """Return a model with random weights, and with another number of ``layers`` if given."""
        if isinstance(model, Scratch):
            shape = model if layers is None else model.model_copy(update={"layers": layers})
            return new_policy(shape, self.tokenizer, seed=0)
        place, file = self._config(model)
        try:
            options = {"trust_remote_code": False} | ({} if file is None else {"gguf_file": file})
            config = AutoConfig.from_pretrained(place, **options)
            if layers is not None:
                text = config.get_text_config(decoder=True)
                text.num_hidden_layers = layers
                if getattr(text, "layer_types", None):
                    text.layer_types = text.layer_types[-layers:]
            encodes = getattr(config, "is_decoder", None) is False or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
            return (AutoModel if encodes else AutoModelForCausalLM).from_config(config, trust_remote_code=False)
        except Exception as error:  # of a folder that transformers cannot read; the run says what is wrong with it
            raise UnknownSizeError(f"the architecture of {model}") from error

    def _built(self, model: Architecture) -> Any:
        new = self._part(model) if isinstance(model, Aside | Last) else self._new(model)
        return new.float().to(self.device).eval()

    def _packs_of(self, name: Architecture) -> bool:
        return packs(self._model(name))

    def _packing(self, name: Architecture) -> Any:
        """Return a model for what needs packed passes."""
        if not self._packs(name):
            raise UnknownSizeError(f"the speed of {name}, which has layers without full attention")
        return self._model(name)

    def _packed(self, model: Any, rows: int, each: int, prompt: int, response: int) -> Packed:
        ids = torch.Generator().manual_seed(0)
        known = min(part.num_embeddings for part in model.modules() if isinstance(part, torch.nn.Embedding))
        groups, responses = (
            torch.randint(known, (count, length), generator=ids).tolist()
            for count, length in ((ceil(rows / each), prompt), (rows, response))
        )
        packed = Packed.of([groups[row // each] for row in range(rows)], responses, model.device)
        reads, likely = getattr(model.config, "reads", ()), getattr(model.config, "likely", None)
        if not reads and likely is None:
            return packed
        width = max(1, len(reads)) * model.config.hidden_size
        packed = replace(packed, states=torch.randn(len(packed.tokens), width, device=model.device))
        if likely is None:
            return packed
        said = torch.randn(len(packed.targets), _vocabulary(model), device=model.device)
        return replace(packed, likely=Likely.of(said, packed.targets, likely))

    def _step_of(
        self, name: Architecture, rows: int, each: int, prompt: int, response: int, adapter: Lora | None, bf16: bool
    ) -> tuple[float, float, float]:
        """Return the seconds of forward and backward pass, those of an update, and the bytes that the passes keep."""
        model = self._packing(name)
        batch = self._packed(model, rows, each, prompt, response)
        if adapter is not None:
            model = get_peft_model(model, lora(Fit(lora=adapter), TaskType.CAUSAL_LM, model.config))
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=0.0)
        kept = dict[int, int]()

        def keep(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        def passes() -> None:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
                found = batch.logprobs(model).mean()
            torch.autograd.backward(found)

        def step() -> None:
            passes()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        model.train()
        with packing(model):
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                step()
            found = self._timed(passes), self._timed(step)
        model.zero_grad(set_to_none=True)
        if adapter is not None:
            model = model.unload()
            model.requires_grad_(True)
        model.eval()
        weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        activations = sum(size for place, size in kept.items() if place not in weights)
        return found[0], max(0.0, found[1] - found[0]), float(activations)

    def _read_of(
        self, name: Architecture, k: int, prompt: int, response: int, vocabulary: bool, mixed: bool | None
    ) -> tuple[float, float]:
        """Return the seconds of a token, and the bytes of its logits and their logarithms."""
        model = self._packing(name) if vocabulary else self._model(name)
        rows = max(FEWEST, min(k, int(ENOUGH / (RUN * self.shape(name).passed * (prompt / k + response)))))
        batch = self._packed(model, rows, min(k, rows), prompt, response) if self._packs(name) else None
        length = min(prompt + response, getattr(model.config, "max_position_embeddings", prompt + response))
        ids = torch.zeros(FEWEST, length, dtype=torch.long, device=model.device)  # where nothing is packed

        def read() -> None:
            with torch.autocast(model.device.type, torch.bfloat16, enabled=bool(mixed)):
                if batch is None:
                    model.base_model(ids)
                elif vocabulary:
                    batch.logprobs(model)
                else:
                    batch.ends(model.get_decoder())

        # Weights that are converted in inference mode could not be trained afterwards.
        as_passed = nullcontext() if batch is None else packing(model)
        with self._as_drawn(model) if mixed is None else nullcontext(), torch.inference_mode(), as_passed:
            seconds = self._timed(read) / (ids.numel() if batch is None else len(batch.tokens))
        return seconds, 3.0 * WEIGHT * _vocabulary(model) if vocabulary else 0.0

    @contextmanager
    def _as_drawn(self, model: Any) -> Iterator[None]:
        """Let a model have the precision of drawing and scoring inside the block."""
        model.to(torch.bfloat16 if self.bf16 else torch.float32)
        try:
            yield
        finally:
            model.float()

    def _draw_of(self, name: Architecture, k: int, prompt: int, most: int) -> tuple[float, float, float]:
        """Return the seconds of a prompt, of a step of all its responses, and of each response in it."""
        model = self._packing(name)
        size = self.shape(name).parameters
        rows = max(2, min(k, int(ENOUGH / (8 * RUN * size))))
        steps = max(2, min(most, int(ENOUGH / (RUN * size * rows))))
        ids = torch.randint(_vocabulary(model), (prompt,), generator=torch.Generator().manual_seed(0)).tolist()

        def seconds(rows: int, steps: int) -> float:
            engine = SharedPrefixEngine(model, self.tokenizer, Sampling(steps))
            # What is told is differences of these, many times over.
            return min(self._timed(lambda: engine.sample(ids, "probe", range(rows))) for _ in range(DRAWN_AGAIN))

        few = max(1, rows // 4)
        with self._as_drawn(model):
            start, whole, part = seconds(rows, 1), seconds(rows, steps), seconds(few, steps)
        row = max(0.0, (whole - part) / ((rows - few) * (steps - 1)))
        step = max(0.0, (whole - start) / (steps - 1) - rows * row)
        return start, step, row

    def _timed(self, work: Callable[[], Any]) -> float:
        """Return the seconds of a call: the least of several, as other programs only add to it."""
        least, whole = inf, 0.0
        while whole < REPEATED:
            least = min(least, once := self._once(work))
            whole += once
        return least

    def _once(self, work: Callable[[], Any]) -> float:
        alone = self.device == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter  # the first does not count waiting for a core
        started = clock()
        work()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return clock() - started


def _whole(model: Architecture) -> Scratch | str:
    return model.model if isinstance(model, Aside | Last) else model


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _place(model: str) -> tuple[str, str | None] | None:
    """Return the folder with a model's configuration, and the name of its GGUF in it; None if only the hub has it."""
    if is_gguf(model):
        file = gguf_file(model)
        return str(file.parent), file.name
    if Path(model).is_dir():
        return model, None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json") if is_hub_id(model) else None
    return (str(Path(cached).parent), None) if isinstance(cached, str) else None


def _parameters_on_hub(model: str) -> int | str:
    """Return what the hub says of a model's size, or what is unknown; nothing is downloaded."""
    from huggingface_hub import HfApi

    try:
        weights = within(ASKED_SECONDS, partial(HfApi().model_info, model, timeout=ASKED_SECONDS)).safetensors
    except Exception:  # no network, no such model, or a hub that answers otherwise
        return f"the size of {model}, for which the hub could not be asked"
    return f"the size of {model}, which the hub does not say" if weights is None else int(weights.total)
