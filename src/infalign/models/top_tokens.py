"""A reference's likeliest tokens, each a class, and all others as one class.

A guide whose Q is one number for all tokens but the reference's n likeliest has the normalizer of n + 1 classes, so the
policy is exact, and a token to train on costs n products instead of a vocabulary's. Needs the ``train`` extra.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from infalign.core.memory import at_once
from infalign.models.logits import Logits

TOKENS_PER_BLOCK = 16  # whose embeddings are gathered at a time, in the processor's cache
LOWEST_LOGPROB = -1e4  # nats, in place of −∞: of the other tokens where there are none


class TopTokens(NamedTuple):
    """A reference's n likeliest tokens at T tokens: their ``ids`` (T, n); ``logprobs`` (T, n + 1) of these and, last,
    of all others together; the ``drawn`` class (T,) and the log-probability of the token ``within`` this class (T,).
    """

    ids: Tensor
    logprobs: Tensor
    drawn: Tensor
    within: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, targets: Tensor, n: int) -> TopTokens:
        """Return the top tokens of logits (T, V), where the tokens ``targets`` (T,) were drawn."""
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, targets[:, None])[:, 0]
        top, ids = logprobs.topk(min(n, logits.shape[-1]))
        others = logprobs.scatter_(-1, ids, -torch.inf).logsumexp(-1).clamp(min=LOWEST_LOGPROB)
        is_target = ids == targets[:, None]
        among = is_target.any(-1)
        drawn = torch.where(among, is_target.byte().argmax(-1), ids.shape[1])
        return cls(ids.int(), torch.cat([top, others[:, None]], -1), drawn, torch.where(among, 0.0, own - others))

    @classmethod
    def of_parts(cls, logits: Logits, targets: Tensor, n: int) -> TopTokens:
        """Return the top tokens of logits that are made in parts."""
        return cls.concatenated([cls.of_logits(part, targets[where], n) for where, part in logits.parts()])

    @classmethod
    def concatenated(cls, parts: Sequence[TopTokens]) -> TopTokens:
        """Return those of consecutive tokens as one."""
        return cls(*map(torch.cat, zip(*parts, strict=True)))

    @property
    def target_logprobs(self) -> Tensor:
        """The reference's log-probability of each token that was drawn, (T,)."""
        return self.logprobs.gather(-1, self.drawn[:, None])[:, 0] + self.within

    def to(self, device: Any) -> TopTokens:
        """Return it on a device."""
        return TopTokens(*(part.to(device) for part in self))


def embedding_products(states: Tensor, ids: Tensor, embedding: Tensor) -> Tensor:
    """Return the products of states (T, width) with the embeddings of ``ids`` (T, n), differentiable in the states."""
    apply: Callable[..., Tensor] = _EmbeddingProducts.apply
    return apply(states, ids, embedding.to(states.dtype))


class _EmbeddingProducts(torch.autograd.Function):
    """Embeddings are gathered anew for the gradient: to keep them would take a vocabulary's memory."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ids: Tensor, embedding: Tensor) -> Tensor:
        ctx.save_for_backward(ids, embedding)
        return torch.cat([torch.bmm(rows, part[..., None])[..., 0] for part, rows in _blocks(states, ids, embedding)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        blocks = _blocks(slope, *ctx.saved_tensors)
        return torch.cat([torch.bmm(part[:, None], rows)[:, 0] for part, rows in blocks]), None, None


def _blocks(of_tokens: Tensor, ids: Tensor, embedding: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield some tokens after the other, with the embeddings (t, n, width) of their ``ids``."""
    tokens = at_once(TOKENS_PER_BLOCK, ids.device.type)
    for start in range(0, max(1, len(ids)), tokens):
        where = slice(start, start + tokens)
        yield of_tokens[where], embedding[ids[where]]
