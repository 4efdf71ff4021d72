"""A reference's likeliest tokens, told apart, and all others as one class: what a guide on these needs of a vocabulary.

A guide whose Q is one number for all tokens but the reference's n likeliest has the normaliser of n + 1 classes, so the
policy is exact, and a token that is learnt from costs n products instead of a vocabulary's. Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infalign.models.vocabulary import Logits

TOKENS = 16  # whose embeddings are gathered at a time, in the processor's cache
NEVER = -1e4  # nats, in place of −∞: where there are no other tokens


class Likely(NamedTuple):
    """What a reference says at T tokens: ``ids`` (T, n) of its likeliest, ``logprobs`` (T, n + 1) of these and, last,
    of all others together; the ``drawn`` class (T,) and the log-probability of the token ``within`` this class (T,).
    """

    ids: Tensor
    logprobs: Tensor
    drawn: Tensor
    within: Tensor

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor, n: int) -> Likely:
        """Return it for logits (T, V) and the tokens that were drawn (T,)."""
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, targets[:, None])[:, 0]
        likely, ids = logprobs.topk(min(n, logits.shape[-1]))
        others = logprobs.scatter_(-1, ids, -torch.inf).logsumexp(-1).clamp(min=NEVER)
        places = ids == targets[:, None]
        among = places.any(-1)
        drawn = torch.where(among, places.byte().argmax(-1), ids.shape[1])
        return cls(ids.int(), torch.cat([likely, others[:, None]], -1), drawn, torch.where(among, 0.0, own - others))

    @classmethod
    def of_parts(cls, logits: Logits, targets: Tensor, n: int) -> Likely:
        """Return it for logits that are made in parts."""
        return cls.joined([cls.of(part, targets[where], n) for where, part in logits.parts()])

    @classmethod
    def joined(cls, parts: Sequence[Likely]) -> Likely:
        """Return those of consecutive tokens as one."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @property
    def of_drawn(self) -> Tensor:
        """The reference's log-probability of each token that was drawn, (T,)."""
        return self.logprobs.gather(-1, self.drawn[:, None])[:, 0] + self.within

    def to(self, device: Any) -> Likely:
        """Return it on a device."""
        return Likely(*(part.to(device) for part in self))

    def guided(self, q: Tensor, others: Tensor) -> Tensor:
        """Return the logits of the classes, (T, n + 1), under a guide that says ``q`` (T, n) and ``others`` (T, 1)."""
        return self.logprobs + torch.cat([q, others], -1)


def products(states: Tensor, ids: Tensor, embedding: Tensor) -> Tensor:
    """Return the products of states (T, width) with the embeddings of ``ids`` (T, n), differentiable in the states."""
    apply: Callable[..., Tensor] = _Products.apply
    return apply(states, ids, embedding.to(states.dtype))


class _Products(torch.autograd.Function):
    """Embeddings are gathered anew for the gradient: to keep them would take a vocabulary's memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ids: Tensor, embedding: Tensor) -> Tensor:
        ctx.save_for_backward(ids, embedding)
        return torch.cat([torch.bmm(rows, part[..., None])[..., 0] for part, rows in _gathered(states, ids, embedding)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        ids, embedding = ctx.saved_tensors
        return (
            torch.cat([torch.bmm(part[:, None], rows)[:, 0] for part, rows in _gathered(slope, ids, embedding)]),
            None,
            None,
        )


def _gathered(of_tokens: Tensor, ids: Tensor, embedding: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some tokens after the other, with the embeddings (t, n, width) of their ``ids``."""
    for start in range(0, max(1, len(ids)), TOKENS):
        where = slice(start, start + TOKENS)
        yield of_tokens[where], embedding[ids[where]]
