"""What reward servers are asked and how they answer: OpenRLHF's protocol, and the two of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from urllib.parse import urlsplit

from infalign.data.examples import Message, prompt_id, reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardProtocol(Protocol):
    """The body of a request for the rewards of some rows, and what its answer says of them."""

    in_flight: ClassVar[int]  # requests at once to each server, by default
    answers: ClassVar[str]  # what an answer is, for messages

    @property
    def rows(self) -> int:
        """The number of rows of a request."""

    def body(self, prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        """Return the body."""

    def rewards(self, answer: Any) -> object:
        """Return what should be one reward for each row. Raises KeyError, TypeError or IndexError for another shape."""


def of_vllm(url: str) -> type[Classify | Pooling] | None:
    """Return the protocol of vLLM that a server speaks, None for a server that speaks OpenRLHF's."""
    path = urlsplit(url).path.rstrip("/")
    return next((spoken for ending, spoken in VLLM.items() if path.endswith(ending)), None)


def protocol(url: str, tokenizer: PreTrainedTokenizerBase, rows: int) -> RewardProtocol:
    """Return the protocol of a server: vLLM's at a path that ends with /classify or /pooling, else OpenRLHF's."""
    spoken = of_vllm(url)
    return OpenRLHF(tokenizer, rows) if spoken is None else spoken()


@dataclass(frozen=True, slots=True)
class OpenRLHF:
    """``query`` is the prompt as ``tokenizer`` renders it for generation, followed by the response.

    ``prompts`` has only the rendered prompt, and ``labels`` the prompt's id. Only ``rewards`` is read from the answer.
    """

    tokenizer: PreTrainedTokenizerBase
    rows: int
    in_flight: ClassVar[int] = 16
    answers: ClassVar[str] = "JSON object with `rewards`"

    def body(self, prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        """Return query, prompts and labels; a prompt whose rows follow each other is rendered once."""
        named = [(text, label) for text, label, rows in self._rendered(prompts) for _ in range(rows)]
        return {
            "query": [prompt + response for (prompt, _), response in zip(named, responses, strict=True)],
            "prompts": [prompt for prompt, _ in named],
            "labels": [label for _, label in named],
        }

    def _rendered(self, prompts: list[list[Message]]) -> Iterator[tuple[str, str, int]]:
        """Yield each prompt with its id and the number of its rows."""
        for prompt, rows in groupby(prompts):
            text = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            yield str(text), prompt_id(prompt), len(list(rows))

    def rewards(self, answer: Any) -> object:
        """Return ``rewards``."""
        return answer["rewards"]


class Conversation:
    """vLLM reads one conversation a request, which it renders with the chat template of the model that it serves.

    So the text is the one that the model was trained on. ``use_activation`` is off: a sigmoid would round large rewards
    to 1.
    """

    rows = 1
    in_flight: ClassVar[int] = 64

    def body(self, prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        """Return the conversation with its response."""
        return {"messages": [*prompts[0], reply(responses[0])], "use_activation": False}


class Classify(Conversation):
    """A sequence classifier of vLLM with one output, at /classify."""

    answers: ClassVar[str] = "JSON object with one `data`, whose output is `probs`"

    def rewards(self, answer: Any) -> object:
        """Return the output."""
        return _only(answer)["probs"]


class Pooling(Conversation):
    """A pooling model of vLLM, at /pooling: its only output, or that at the last token if it has one for each."""

    answers: ClassVar[str] = "JSON object with one `data`, whose output is `data`"

    def rewards(self, answer: Any) -> object:
        """Return the output at the last token."""
        values = _only(answer)["data"]
        return values[-1] if isinstance(values[-1], list) else values


VLLM: dict[str, type[Classify | Pooling]] = {"/classify": Classify, "/pooling": Pooling}


def _only(answer: Any) -> Any:
    (found,) = answer["data"]
    return found
