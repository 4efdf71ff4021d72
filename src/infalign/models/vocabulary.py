"""Logits of many tokens over a large vocabulary, made for some tokens at a time.

With 49,152 tokens in the vocabulary the logits of a batch and their gradient take most of a training's memory, and with
a guide most of its time. Where the product with the vocabulary is frozen, as under an adapter or a guide on states, a
token's part of the gradient is known once its logits are, so they are made, used and forgotten. Needs the ``train``
extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

TOKENS = 256  # at a time
_changed: WeakSet[nn.Module] = WeakSet()  # heads after which a model does something to the logits


@dataclass(frozen=True)
class Logits:
    """The logits of T tokens: ``states`` (T, width) of which ``head`` makes them, or without one (T, V) themselves."""

    states: Tensor
    head: nn.Linear | None

    def measure(self, of_some: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Return a number per token, (T,), differentiable.

        ``of_some`` makes those of some tokens from their logits (t, V), at least float32, and where they are.
        """
        if self.head is None:
            return of_some(_upcast(self.states), slice(None))
        product = self._product()
        apply: Callable[..., Tensor] = _Measure.apply
        return apply(self.states, lambda states, where: of_some(product(states), where))

    def of(self, where: slice) -> Tensor:
        """Return the logits of some tokens, (t, V), at least float32."""
        return _upcast(self.states[where]) if self.head is None else self._product()(self.states[where])

    def _product(self) -> Callable[[Tensor], Tensor]:
        """Return the head, in the precision of the block that this is called in."""
        assert self.head is not None
        kind, own = self.states.device.type, self.head.weight.dtype
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
        weight, bias = self.head.weight.to(dtype), None if self.head.bias is None else self.head.bias.to(dtype)

        def product(states: Tensor) -> Tensor:
            with torch.autocast(kind, enabled=False):
                return _upcast(linear(states.to(dtype), weight, bias))

        return product


def logits_of(model: Any, run: Callable[[Any], Tensor]) -> Logits:
    """Return the logits (T, V) that ``run`` gets from a causal language model, in parts if its head is frozen."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    trained = torch.is_grad_enabled() and head is not None and head.weight.requires_grad
    if type(head) is not nn.Linear or trained or head in _changed:
        return Logits(run(model), None)
    with _without(head) as seen:
        states = run(model)
    if len(seen) == 1 and seen[0].data_ptr() == states.data_ptr():
        return Logits(states, head)
    _changed.add(head)
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


class _Measure(torch.autograd.Function):
    """A number per token, and its slope in the token's states, found together."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, of_some: Callable[[Tensor, slice], Tensor]) -> Tensor:
        sloped = ctx.needs_input_grad[0]
        values, slopes = list[Tensor](), list[Tensor]()
        for start in range(0, max(1, len(states)), TOKENS):
            where = slice(start, start + TOKENS)
            some = states[where].detach().requires_grad_(sloped)
            with torch.set_grad_enabled(sloped):
                value = of_some(some, where)
            if sloped:
                slopes += torch.autograd.grad(value, some, torch.ones_like(value))
            values.append(value.detach())
        if sloped:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * slope[:, None].to(slopes.dtype), None


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
