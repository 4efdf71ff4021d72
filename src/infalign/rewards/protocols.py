"""What reward servers are asked and how they answer: OpenRLHF's protocol, and the two of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infalign.data.examples import Message, prompt_id, reply

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class RewardProtocol:
    """The body of a request for the rewards of some rows, and what its answer says of them.

    ``rewards`` returns what should be one reward for each row; it raises KeyError, TypeError, ValueError or IndexError
    for another shape.
    """

    rows: int  # of a request
    in_flight: int  # requests at once to each server, by default
    answers: str  # what an answer is, for messages
    body: Callable[[list[list[Message]], list[str]], dict[str, Any]]
    rewards: Callable[[Any], object]


def _conversation(prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
    """Return the one conversation of a request of vLLM, which renders it with its model's chat template.

    So the text is the one that the model was trained on. ``use_activation`` is off: a sigmoid would round large rewards
    to 1.
    """
    return {"messages": [*prompts[0], reply(responses[0])], "use_activation": False}


def _output(answer: Any, key: str) -> Any:
    (found,) = answer["data"]
    return found[key]


def _last_output(answer: Any) -> Any:
    values = _output(answer, "data")
    return values[-1] if isinstance(values[-1], list) else values


VLLM = {
    "/classify": RewardProtocol(  # a sequence classifier with one output
        1,
        64,
        "JSON object with one `data`, whose output is `probs`",
        _conversation,
        lambda answer: _output(answer, "probs"),
    ),
    "/pooling": RewardProtocol(  # a pooling model: its only output, or that at the last token if it has one for each
        1, 64, "JSON object with one `data`, whose output is `data`", _conversation, _last_output
    ),
}


def vllm_protocol(url: str) -> RewardProtocol | None:
    """Return the protocol of vLLM that a server speaks, None for a server that speaks OpenRLHF's."""
    path = urlsplit(url).path.rstrip("/")
    return next((protocol for ending, protocol in VLLM.items() if path.endswith(ending)), None)


def openrlhf_protocol(tokenizer: PreTrainedTokenizerBase, rows: int) -> RewardProtocol:
    """Return OpenRLHF's protocol with so many rows per request.

    ``query`` is the prompt as ``tokenizer`` renders it for generation, followed by the response; ``prompts`` has only
    the rendered prompt, and ``labels`` the prompt's id. Only ``rewards`` is read from the answer.
    """

    def body(prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        named: list[tuple[str, str]] = []
        for prompt, same in groupby(prompts):  # rows that follow each other are rendered once
            text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
            named += [(text, prompt_id(prompt))] * len(list(same))
        return {
            "query": [prompt + response for (prompt, _), response in zip(named, responses, strict=True)],
            "prompts": [prompt for prompt, _ in named],
            "labels": [label for _, label in named],
        }

    return RewardProtocol(rows, 16, "JSON object with `rewards`", body, lambda answer: answer["rewards"])
