"""Logits of many tokens over a large vocabulary, made for some tokens at a time.

With 49,152 tokens in the vocabulary the logits of a batch and their gradient take most of a training's memory, and with
a guide most of its time. Where the product with the vocabulary is frozen, as under an adapter or a guide on states, a
token's part of the gradient is known once its logits are, so they are made, used and forgotten. Needs the ``train``
extra.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

TOKENS_PER_BLOCK = 256  # at a time
_heads_before_more: WeakSet[nn.Module] = WeakSet()  # heads after which a model does something to the logits

Slope = Callable[[], Tensor]
Measure = Callable[[Tensor, slice], tuple[Tensor, Slope]]
"""Of the logits (t, V) of some tokens, at least float32, and where these are: numbers (t,), and their slope (t, V)."""


@dataclass(frozen=True)
class Logits:
    """The logits of T tokens: ``states`` (T, width) of which ``head`` makes them, or without one (T, V) themselves."""

    states: Tensor
    head: nn.Linear | None

    def measured(self, measure: Measure) -> Tensor:
        """Return a number per token, (T,), differentiable."""
        apply: Callable[..., Tensor] = _Measured.apply
        return apply(self.states, measure, *self._product())

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield some tokens after the other: where they are, and their logits (t, V), at least float32."""
        return _parts(self.states, *self._product())

    def _product(self) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of the head: in mixed precision as there, otherwise at least float32.

        A product in bfloat16 would round each logit to 1 part in 256 and with it the log-probability.
        """
        if self.head is None:
            return None, None
        kind, own = self.states.device.type, self.head.weight.dtype
        mixed = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if mixed else torch.promote_types(own, torch.float32)
        return self.head.weight.to(dtype), None if self.head.bias is None else self.head.bias.to(dtype)


def logprob_of(targets: Tensor) -> Measure:
    """Measure the log-probability of each token's target, (T,)."""

    def measure(logits: Tensor, where: slice) -> tuple[Tensor, Slope]:
        logprobs, targets_t = logits.log_softmax(-1), targets[where, None]

        def slope() -> Tensor:
            ones = logprobs.new_ones(targets_t.shape)
            return logprobs.exp_().neg_().scatter_add_(-1, targets_t, ones)

        return logprobs.gather(-1, targets_t)[:, 0], slope

    return measure


def kl_from(teacher: Logits) -> Measure:
    """Measure KL(teacher ‖ π) at each token."""
    product = teacher._product()

    def measure(logits: Tensor, where: slice) -> tuple[Tensor, Slope]:
        own, its = logits.log_softmax(-1), _times(teacher.states[where], *product).log_softmax(-1)
        expected = its.exp()
        return torch.linalg.vecdot(expected, its.sub_(own)), lambda: own.exp_().sub_(expected)

    return measure


def logits_of(model: Any, run: Callable[[Any], Tensor]) -> Logits:
    """Return the logits (T, V) that ``run`` gets from a causal language model, in parts if its head is frozen."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    trained = torch.is_grad_enabled() and head is not None and head.weight.requires_grad
    if type(head) is not nn.Linear or trained or head in _heads_before_more:
        return Logits(run(model), None)
    with _without(head) as seen:
        states = run(model)
    if len(seen) == 1 and seen[0].data_ptr() == states.data_ptr():
        return Logits(states, head)
    _heads_before_more.add(head)
    return Logits(run(model), None)


@contextmanager
def _without(head: nn.Module) -> Iterator[list[Tensor]]:
    """Let ``head`` return its input inside the block, and yield what it has returned."""
    seen: list[Tensor] = []

    def forward(states: Tensor) -> Tensor:
        seen.append(states)
        return states

    head.forward = forward
    try:
        yield seen
    finally:
        del head.forward


class _Measured(torch.autograd.Function):
    """A number per token, and its slope in the token's states, found together."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, measure: Measure, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        values, slopes = list[Tensor](), list[Tensor]()
        with torch.autocast(states.device.type, enabled=False):  # but for the product, which has the weight's precision
            for where, logits in _parts(states, weight, bias):
                value, slope = measure(logits, where)
                values.append(value)
                if ctx.needs_input_grad[0]:
                    of_logits = slope()
                    slopes.append(of_logits if weight is None else of_logits.to(weight.dtype) @ weight)
        if slopes:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * slope[:, None].to(slopes.dtype), None, None, None


def _parts(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, max(1, len(states)), TOKENS_PER_BLOCK):
        where = slice(start, start + TOKENS_PER_BLOCK)
        yield where, _times(states[where], weight, bias)


def _times(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return states that are logits, or what their product with the vocabulary gives, at least float32."""
    logits = states
    if weight is not None:
        with torch.autocast(states.device.type, enabled=False):
            logits = linear(states.to(weight.dtype), weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
