"""Which model a run starts from, how it is trained, and on what machine."""

import os
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from infalign.core.distributed import processes
from infalign.core.errors import ConfigError
from infalign.core.settings import Count, Positive, Settings

NEW_WEIGHTS_RATE, PRETRAINED_RATE, ADAPTER_RATE = 1e-3, 2e-5, 2e-4  # the last two keep what a pretrained model knows
TRIAL_RATES = (0.3, 1.0, 3.0)  # learning rates that are tried, of the usual one
TRIAL_SHARE = 0.25  # of the passes, for each of them
PROMPT_EXAMPLES = 8  # examples of one prompt that an offline policy has in a batch, which computes the prompt once
SEEN_ROWS, MOST_PASSES = 100_000, 2.0  # of an offline policy by default, at most

ANY_MODEL = "a folder, GGUF file, `package:NAME` of an installed package with either, or hub id"


def is_hub_id(model: str) -> bool:
    """Return whether a model that is no folder here can be one of the hub: ``owner/name``, or ``name``."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.gguf)", model) is not None


Width = Annotated[int, Field(ge=4, multiple_of=4)]


def attention_heads(hidden: int, *, width: int) -> int:
    """Return how many heads share ``hidden`` dimensions evenly: one per ``width`` of them if that divides, or fewer."""
    return next(n for n in range(max(2, hidden // width), 0, -1) if hidden % (2 * n) == 0)


class Scratch(Settings):
    """The shape of a small Llama trained from nothing, with a tokenizer trained on the data."""

    vocabulary: Annotated[int, Field(ge=300)] = Field(
        2048, description="vocabulary size of the tokenizer; a reward uses the policy's"
    )
    hidden: Width = Field(128, description="width, a multiple of 4; there is an attention head per 32 of it")
    layers: Count = Field(4, description="layers")
    context: Count = Field(512, description="maximum number of tokens in prompt and response")


class Lora(Settings):
    """Low-rank adaptation; the model is saved with the adapter merged, and the adapter by itself in `adapter/`."""

    rank: Count = Field(16, description="rank of the adapter's matrices, on all linear layers")
    layers: Count | None = Field(
        None,
        description="train only the last layers; for offline policies the states below them are computed once and "
        "kept on disk",
    )


class Fit(Settings):
    """How a model is trained."""

    epochs: Annotated[float, Field(gt=0, le=10_000)] | None = Field(
        None,
        description="passes over the rows; may be a fraction; default 1, or for an offline policy "
        f"{SEEN_ROWS:,} rows, in at most {MOST_PASSES:g} passes",
    )
    batch_size: Count = Field(32, description="sequences (or pairs) per optimizer step")
    device_batch_size: Count | None = Field(None, description="sequences processed at once on the device; default: all")
    learning_rate: Positive | None = Field(
        None,
        description=f"after warm-up, falling to 0; default {NEW_WEIGHTS_RATE:g} for new weights, {PRETRAINED_RATE:g} "
        f"for pretrained ones, {ADAPTER_RATE:g} for an adapter on them; an offline policy tries three",
    )
    max_length: Count = Field(512, description="longer rows are dropped and counted")
    bf16: bool = Field(False, description="mixed precision, on a GPU or CPU that supports it")
    gradient_checkpointing: bool = Field(False, description="recompute activations to save memory")
    lora: Lora | None = Field(
        None, description="train an adapter instead of all weights; merged when the model is saved"
    )

    def with_learning_rate(self, *, pretrained: bool, adapter: bool = False) -> "Fit":
        """Return this fit with a learning rate: its own, or the default for the weights that are trained."""
        if self.learning_rate is not None:
            return self
        rate = (ADAPTER_RATE if adapter else PRETRAINED_RATE) if pretrained else NEW_WEIGHTS_RATE
        return self.model_copy(update={"learning_rate": rate})

    @property
    def last_layers(self) -> int:
        """How many last layers an adapter is on; 0 for all layers."""
        return self.lora.layers or 0 if self.lora else 0

    @property
    def passes(self) -> float:
        """Passes over the rows."""
        return 1.0 if self.epochs is None else self.epochs

    def passes_over(self, rollouts: float) -> float:
        """Return the passes over so many rollouts of an offline policy."""
        return min(SEEN_ROWS / rollouts, MOST_PASSES) if self.epochs is None else self.epochs

    @model_validator(mode="after")
    def _whole_accumulation(self) -> "Fit":
        if self.device_batch_size is not None and self.batch_size % self.device_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of the device's {self.device_batch_size}"
            )
        return self


class Model(Settings):
    """A model: `model` (folder or hub id) or `scratch`, trained by `fit`; without `fit` it is used as it is."""

    model: str | None = Field(None, description=ANY_MODEL)
    scratch: Scratch | None = Field(
        None, description="instead of `model`: a small Llama trained from scratch, with its tokenizer"
    )
    fit: Fit | None = Field(None, description="training before use; without it, the model is used as it is")

    @model_validator(mode="after")
    def _one_start(self) -> "Model":
        if self.model is not None and self.scratch is not None:
            raise ValueError("give `model` or `scratch`, not both")
        return self


class PolicyModel(Model):
    """The policy before alignment; after `fit` (supervised fine-tuning) it is the reference policy."""

    chat_template: str | None = Field(
        None, description="for a model that has none: `plain`, or a Jinja file, FILE.jinja, beside the recipe"
    )

    @model_validator(mode="after")
    def _has_start(self) -> "PolicyModel":
        if (self.model is None) == (self.scratch is None):
            raise ValueError("give exactly one of `model`, `scratch`")
        if self.scratch is not None and self.fit is None:
            raise ValueError("a policy from `scratch` needs `fit`")
        if self.chat_template is not None and self.scratch is not None:
            raise ValueError("a policy from `scratch` has its own chat template: leave chat_template out")
        return self


class Compute(Settings):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of models that sample, score or are evaluated; for training see fit.bf16"
    )
    processes: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="worker processes: for rollouts, and for models trained side by side (CPU)"
    )
    threads: Count | None = Field(
        None, description="torch threads per process; a step that runs alone has those of all; default: torch decides"
    )

    def torch_device(self) -> str:
        """Return the torch device; ``auto`` is a GPU if there is one. Raises ConfigError for a missing one."""
        if self.device == "cpu":
            return self.device
        import torch

        if torch.cuda.is_available():
            if processes() > 1:  # each has a GPU of its own, which is not the first of all
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            return "cuda"
        if self.device == "cuda":
            raise ConfigError("compute.device is cuda, but torch finds no GPU; use auto or cpu, or fix the driver")
        return "cpu"

    def check(self) -> None:
        """Raise ConfigError for a GPU that is not there; torch is loaded only where a GPU is asked for."""
        if self.device == "cuda":
            self.torch_device()

    def imitates_bfloat16(self) -> bool:
        """Return whether the device has no bfloat16 of its own, so that torch computes it by way of float32."""
        import torch

        if self.torch_device() == "cuda":
            return not torch.cuda.is_bf16_supported(including_emulation=False)
        return not any(there for feature, there in torch.cpu.get_capabilities().items() if "bf16" in feature)
