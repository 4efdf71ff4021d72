"""What reward servers are asked and how they answer: OpenRLHF's protocol, and vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infalign.data.messages import Message, prompt_id, reply

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


def is_vllm(url: str) -> bool:
    """Return whether a server speaks vLLM's protocol, by its path; others speak OpenRLHF's."""
    return urlsplit(url).path.rstrip("/").endswith(("/classify", "/pooling"))


def vllm_protocol() -> RewardProtocol:
    """Return the protocol of vLLM, whose requests are a conversation each, rendered by its model's chat template.

    So the text is the one that the model was trained on. ``use_activation`` is off: a sigmoid would round large rewards
    to 1. The output is ``probs`` of a sequence classifier at /classify; at /pooling it is ``data``, or its last if the
    model has one for each token.
    """

    def body(prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        return {"messages": [*prompts[0], reply(responses[0])], "use_activation": False}

    def rewards(answer: Any) -> object:
        (output,) = answer["data"]
        if "probs" in output:
            return output["probs"]
        values = output["data"]
        return values[-1] if isinstance(values[-1], list) else values

    answers = "JSON object with one `data`, whose output is `probs` or `data`"
    return RewardProtocol(1, 64, answers, body, rewards)


def openrlhf_protocol(tokenizer: PreTrainedTokenizerBase, rows: int) -> RewardProtocol:
    """Return OpenRLHF's protocol with this many rows per request.

    ``query`` is the prompt as ``tokenizer`` renders it for generation, followed by the response; ``prompts`` has only
    the rendered prompt, and ``labels`` the prompt's id. Only ``rewards`` is read from the answer.
    """

    def body(prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        named: list[tuple[str, str]] = []
        for prompt, same in groupby(prompts):  # rows that follow each other are rendered once
            text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
            named += [(text, prompt_id(prompt))] * len(list(same))
        rendered, labels = zip(*named, strict=True)
        return {"query": list(map(str.__add__, rendered, responses)), "prompts": rendered, "labels": labels}

    return RewardProtocol(rows, 16, "JSON object with `rewards`", body, lambda answer: answer["rewards"])
