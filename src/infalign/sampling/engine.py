"""What an engine is: prompts, responses, and a random stream for each response. Needs the ``train`` extra.

Samples follow the policy itself: temperature 1 and no truncation, whatever a model folder or a server would apply.
Tokens are picked by inverse CDF from a separate random stream for each response, so K can grow without redrawing.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.core.settings import Settings
from infalign.models.conversations import decode
from infalign.models.policy import AnyModel
from infalign.models.pretrained import eos_token_id
from infalign.models.settings import Compute

if TYPE_CHECKING:
    from torch import Tensor

CDF_BLOCK = 64
GREEDY = 1e9  # times the logits: only the likeliest token has a chance
UNDEFINED_POLICY = "the model returns NaN or infinite logits; use an earlier checkpoint"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How long responses may be, and the seed of their random streams.

    A ``greedy`` response has the likeliest token at each place. Engines do not read ``stop``: `serving.answers` cuts
    responses before the first of these texts.
    """

    max_new_tokens: int
    seed: int = 0
    greedy: bool = False
    stop: tuple[str, ...] = ()


class Response(NamedTuple):
    """One response: its token ids with the EOS that ended it, and its text without special tokens.

    ``finish`` is ``"stop"`` (EOS) or ``"length"``; ``logprob`` is Σ log-probability of ``token_ids``, NaN if not known.
    """

    token_ids: tuple[int, ...]
    text: str
    finish: str
    logprob: float


class Prompt(NamedTuple):
    """A prompt as the model sees it; ``prompt_id`` names it in every table and keys its random streams.

    ``columns`` are the other columns of its row, as JSON, which are stored with its responses.
    """

    prompt_id: str
    token_ids: Sequence[int]
    columns: str = "{}"

    def check_not_empty(self) -> None:
        """Raise DataError for a prompt without tokens."""
        if len(self.token_ids) == 0:
            raise DataError(f"prompt {self.prompt_id!r} is empty; give it at least a BOS token or drop it")


Draw = tuple[Prompt, int]
"""A rollout: its prompt, and its number among those of the prompt."""


class Engine(ABC):
    """Draws responses on this machine."""

    device_type: str = "cpu"  # torch's name of what it computes on

    @abstractmethod
    def sample_together(self, draws: Sequence[Draw]) -> list[Response]:
        """Return the rollouts, in the order of ``draws``, where those of a prompt are neighbors."""

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return rollouts number ``indices`` of the prompt, in that order."""
        return self.sample_together([(Prompt(prompt_id, prompt_ids), index) for index in indices])


AskedDraws = tuple[Prompt, Sequence[int]]
"""A prompt, and the numbers of the rollouts that are asked for."""


@runtime_checkable
class ConcurrentEngine(Protocol):
    """Draws elsewhere, for many prompts at once."""

    def sample_each(self, asked: Iterable[AskedDraws]) -> Generator[tuple[AskedDraws, list[Response]]]:
        """Yield each of ``asked`` with its rollouts, as they come, in any order.

        What is under way when one fails comes before the error.
        """


OpenEngine = AbstractContextManager[Engine | ConcurrentEngine]


class EngineSettings(Settings):
    """The settings of an engine; the kinds are listed in `sampling.settings`."""

    is_local: ClassVar[bool] = True  # whether it computes here, as training does

    kind: str

    @property
    def server(self) -> tuple[str | None, str | None]:
        """The URL of a server that must be there, if any, and the variable with its key."""
        return None, None

    def has(self, *, reference: bool, guided: bool) -> bool:
        """Return whether it can draw from the reference, or from a policy, with a guide or without."""
        return True

    @abstractmethod
    def open(self, model: AnyModel, sampling: Sampling, compute: Compute, probe: Prompt) -> OpenEngine:
        """Return a context that gives the engine, ready to draw from the folder or id ``model``.

        Engines that compute here also take one that is loaded, ``(model, tokenizer)``.

        Raises ConfigError for a model or server that cannot be sampled from; some engines test this on ``probe``.
        """


def check_prompt(prompt: Prompt, model: Any, sampling: Sampling) -> None:
    """Raise if ``model`` cannot answer the prompt with ``max_new_tokens`` tokens."""
    prompt.check_not_empty()
    check_evaluating(model)
    prompt_id, prompt_ids, _ = prompt
    config, longest = model.config.get_text_config(decoder=True), sampling.max_new_tokens
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and len(prompt_ids) + longest > context:
        raise DataError(
            f"prompt {prompt_id!r} has {len(prompt_ids)} tokens; with a response of up to {longest}, it exceeds the "
            f"model's context of {context}; shorten it to {max(context - longest, 0)}, drop it, or lower "
            "max_new_tokens"
        )
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < config.vocab_size:
        raise DataError(f"prompt {prompt_id!r} has token ids outside the model's vocabulary of {config.vocab_size}")


def check_evaluating(model: Any) -> None:
    """Raise ConfigError for a model in training mode."""
    if model.training:
        raise ConfigError("the model is in training mode, so dropout would change the policy; call model.eval()")


def token_uniforms(sampling: Sampling, prompt_id: str, indices: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return one uniform on [0, 1) for each response and token (indices × max_new_tokens), from Philox streams."""
    keys = (stream_key(sampling, prompt_id, index) for index in indices)
    return np.stack([np.random.Generator(np.random.Philox(key=key)).random(sampling.max_new_tokens) for key in keys])


def stream_key(sampling: Sampling, prompt_id: str, index: int) -> int:
    """Return the key, 128 bits, of the random stream of rollout number ``index`` of a prompt."""
    name = json.dumps([sampling.seed, prompt_id, int(index)]).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")


def pick_tokens(
    logits: Tensor, uniforms: Tensor, absent: Tensor | None = None, greedy: Sequence[bool] = ()
) -> tuple[Tensor, Tensor]:
    """Return a token and its log-probability for each row of ``logits`` (rows × V), by inverse CDF at ``uniforms``.

    Tokens that are ``absent`` have probability 0, and the others share theirs. Rows that are ``greedy``, one value per
    row or none, have the likeliest token.
    """
    import torch
    from torch.nn.functional import pad

    logits = logits.float()
    if absent is not None:
        logits = logits.index_fill(-1, absent, -torch.inf)
    if any(greedy):
        logits = torch.where(torch.tensor(greedy, device=logits.device)[:, None], GREEDY * logits, logits)
    probabilities = torch.softmax(logits, dim=-1)
    # Two levels, a block of tokens and then a token: one cumulative sum over the vocabulary is slow and less precise.
    padding = -probabilities.shape[-1] % CDF_BLOCK
    padded = pad(probabilities, (0, padding)) if padding else probabilities
    blocks = padded.view(len(padded), -1, CDF_BLOCK)
    mass = blocks.sum(dim=-1).double()
    cdf = mass.cumsum(dim=-1)
    target = uniforms[:, None] * cdf[:, -1:]
    # right=True skips entries of probability 0; only NaN reaches the clamps, and callers report it.
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[-1] - 1)
    inside = blocks.take_along_dim(block[..., None], dim=1)[:, 0].double().cumsum(dim=-1)
    fraction = (target - (cdf - mass).gather(-1, block)) / mass.gather(-1, block)
    below = (fraction * inside[:, -1:]).minimum(inside[:, -1:].nextafter(inside.new_zeros(())))
    tokens = block * CDF_BLOCK + torch.searchsorted(inside, below, right=True)
    tokens.clamp_(max=probabilities.shape[-1] - 1)
    return tokens[:, 0], (probabilities.gather(-1, tokens).double() / cdf[:, -1:]).log()[:, 0]


class Vocabulary:
    """What a policy may say: the tokens that end a response, and those that its tokenizer has.

    A response ends with the tokenizer's EOS or with another end of ``generation``, a model's generation configuration,
    such as ``<|eom_id|>``. Ids below ``size`` that the tokenizer lacks, which pad a model's vocabulary, are ``absent``:
    they are never drawn.
    """

    def __init__(self, tokenizer: Any, generation: Any = None, size: int = 0) -> None:
        others = getattr(generation, "eos_token_id", None) or []
        self.tokenizer, self.eos = tokenizer, eos_token_id(tokenizer)
        self.ends = sorted({self.eos, *(others if isinstance(others, list) else [others])})
        self.absent = sorted(set(range(size)) - set(tokenizer.get_vocab().values()))

    def absent_on(self, device: Any) -> Tensor | None:
        """Return the absent ids as a tensor, made once as they can be thousands; None if there are none."""
        import torch

        return torch.tensor(self.absent, device=device) if self.absent else None

    @classmethod
    def of(cls, model: Any, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a loaded model."""
        return cls(tokenizer, model.generation_config, model.config.get_text_config(decoder=True).vocab_size)

    def responses(self, ids: Sequence[Sequence[int]], logprobs: Sequence[float]) -> list[Response]:
        """Return the tokens of each response, with its log-probability, as responses."""
        texts = decode(self.tokenizer, ids, self.ends)
        finishes = ["stop" if row[-1] in self.ends else "length" for row in ids]
        return list(map(Response, map(tuple, ids), texts, finishes, logprobs))
