"""The forms of a guide Q: which network gives its hidden states, and which head makes Q of them.

Q(s, ·) = (A·h(s) + b)·Eᵀ, with h the guide's hidden states, E an output embedding and A = b = 0 at the start. In the
literature Q on a language model's states is the prefix scorer of Controlled Decoding (Mudgal et al., ICML 2024), and a
network that reads the reference's states is the side network of Ladder Side-Tuning (Sung et al., NeurIPS 2022). A new
form is a subclass of `Guide` and an entry of `FORMS`. Needs the ``train`` extra.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from infalign.models.submodels import as_part
from infalign.models.top_tokens import TopTokens, embedding_products

GuideSettings = Mapping[str, Any]
Kept = slice | Tensor  # of the tokens of a pass


class Head(nn.Module, ABC):
    """Makes Q, a number for each token of the vocabulary, from hidden states; ``output`` is the reference's head."""

    shares_product: ClassVar[bool] = False  # whether guided logits are one product of ``output`` with some states

    def __init__(self, hidden_size: int, reference: PreTrainedModel) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, reference.config.hidden_size)

    def start(self, output: nn.Linear) -> None:
        """Make Q zero."""
        for weight in self.parameters():
            weight.zero_()

    @abstractmethod
    def guided_logits(self, last: Tensor, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Return the reference's logits + Q, (…, V), from its last hidden states (…, width) and the guide's."""


class ReferenceVocabularyHead(Head):
    """E is the reference's output embedding: Q costs no product with the vocabulary of its own."""

    shares_product = True

    def guided_logits(self, last: Tensor, hidden: Tensor, output: nn.Linear) -> Tensor:
        return output(last + self.linear(hidden))


class OwnVocabularyHead(Head):
    """E is trained, and starts as the reference's output embedding."""

    def __init__(self, hidden_size: int, reference: PreTrainedModel) -> None:
        super().__init__(hidden_size, reference)
        self.embedding = nn.Parameter(torch.zeros(reference.config.vocab_size, reference.config.hidden_size))

    def start(self, output: nn.Linear) -> None:
        super().start(output)
        self.embedding.copy_(output.weight)

    def guided_logits(self, last: Tensor, hidden: Tensor, output: nn.Linear) -> Tensor:
        return output(last) + self.linear(hidden) @ self.embedding.T


class TopTokenHead(Head):
    """Q tells the reference's ``count`` likeliest tokens apart, and is one number for all others (`TopTokens`)."""

    def __init__(self, hidden_size: int, reference: PreTrainedModel, count: int) -> None:
        super().__init__(hidden_size, reference)
        self.others, self.count = nn.Linear(hidden_size, 1), count

    def guided_logits(self, last: Tensor, hidden: Tensor, output: nn.Linear) -> Tensor:
        logits: Tensor = output(last)
        top, ids = logits.topk(min(self.count, logits.shape[-1]))
        q = embedding_products(self.linear(hidden).flatten(0, -2), ids.flatten(0, -2), output.weight).view(ids.shape)
        return (logits + self.others(hidden)).scatter(-1, ids, (top + q).to(logits.dtype))

    def class_logits(self, top: TopTokens, hidden: Tensor, output: nn.Linear) -> Tensor:
        """Return the guided logits of the classes of T tokens, (T, count + 1), from hidden states (T, hidden)."""
        q = embedding_products(self.linear(hidden), top.ids, output.weight)
        return top.logprobs + torch.cat([q, self.others(hidden)], -1)


class Guide(nn.Module, ABC):
    """A network with a `Head`, made from the ``settings`` of its form beside a reference."""

    head: Head
    reads: Sequence[int] = ()  # the layers of the reference whose states are its input; none: it reads tokens

    def start(self, reference: PreTrainedModel) -> None:
        """Make it an untrained guide, which changes nothing."""
        self.head.start(reference.get_output_embeddings())

    @abstractmethod
    def hidden_states(self, reference: PreTrainedModel, states: Tensor, kept: Kept, **asked: Any) -> Tensor:
        """Return the hidden states (rows, kept, hidden) of a pass with the arguments ``asked`` of a decoder.

        ``states`` are the reference's after the layers that the guide `reads`, side by side; ``kept`` are the tokens.
        """


class NetworkGuide(Guide):
    """A second language model, without its head, that reads tokens."""

    def __init__(
        self, settings: GuideSettings, reference: PreTrainedModel, network: PreTrainedModel | None = None
    ) -> None:
        super().__init__()
        self.network = as_part(network, AutoModel, settings["network"], reference.config._attn_implementation)
        self.head = _head(settings, self.network.config.hidden_size, reference, OwnVocabularyHead)

    def hidden_states(self, reference: PreTrainedModel, states: Tensor, kept: Kept, **asked: Any) -> Tensor:
        return self.network(**asked).last_hidden_state[:, kept]


class SideGuide(Guide):
    """A small language model that reads the reference's states, of each token those after some layers."""

    def __init__(self, settings: GuideSettings, reference: PreTrainedModel) -> None:
        super().__init__()
        self.network = as_part(None, AutoModel, settings["network"], reference.config._attn_implementation)
        self.reads = settings["reads"]
        hidden, width = self.network.config.hidden_size, reference.config.hidden_size
        self.read = nn.Sequential(
            nn.Unflatten(-1, (len(self.reads), width)),
            nn.RMSNorm(width, elementwise_affine=False),
            nn.Flatten(-2),
            nn.Linear(len(self.reads) * width, hidden),
        )
        self.head = _head(settings, hidden, reference, ReferenceVocabularyHead)

    def start(self, reference: PreTrainedModel) -> None:
        """Make it an untrained guide; what the network would embed tokens with is not trained."""
        super().start(reference)
        self.network.get_input_embeddings().requires_grad_(False)

    def hidden_states(self, reference: PreTrainedModel, states: Tensor, kept: Kept, **asked: Any) -> Tensor:
        asked |= {"input_ids": None, "inputs_embeds": self.read(states)}
        return self.network(**asked).last_hidden_state[:, kept]


FORMS: Mapping[str, Callable[..., Guide]] = {"network": NetworkGuide, "side": SideGuide}


def _head(settings: GuideSettings, hidden_size: int, reference: PreTrainedModel, whole_vocabulary: type[Head]) -> Head:
    if settings["top_tokens"]:
        return TopTokenHead(hidden_size, reference, settings["top_tokens"])
    return whole_vocabulary(hidden_size, reference)
