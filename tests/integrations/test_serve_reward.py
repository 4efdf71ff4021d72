"""`infalign serve-reward`: a real server on 127.0.0.1 that trainers ask."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from listening import listening, metrics

from infalign.core.errors import RequestError
from infalign.data.messages import prompt_id
from infalign.integrations.environment import calibrated, tokenizer
from infalign.integrations.server import MAX_BYTES, app
from infalign.method.calibration import calibrate
from infalign.method.reward import CalibratedReward
from infalign.world import gold

PROMPT = [{"role": "user", "content": "How do I bake bread?"}]
REFERENCES = [-3.0, -1.0, 0.0, 0.5, 2.0]
SAID = ["Knead the dough.", "Please, please knead.", "No."]
LABEL = {"prompt": PROMPT, "prompt_id": prompt_id(PROMPT), "reference_rewards": REFERENCES}


@pytest.fixture(scope="module")
def url(calibrated_run: Path) -> Iterator[str]:
    """Return the URL of a server of the run's reward."""
    source = str(calibrated_run)
    with listening(app(calibrated(source, "exp:10"), tokenizer(source))) as found:
        yield found


def expected(texts: list[str]) -> tuple[list[float], list[float], list[float]]:
    """Return scores, win rates and rewards of responses to the prompt."""
    rewards = gold([PROMPT] * len(texts), texts)
    ranks = calibrate(rewards, REFERENCES)
    return np.exp(10 * (ranks - 1)).tolist(), ranks.tolist(), rewards


def test_both_protocols_get_shaped_reward_and_reward(url: str) -> None:
    """OpenRLHF's lists, with special tokens in the query, and slime's single row."""
    scores, ranks, rewards = expected(SAID)
    rendered = "<|user|>How do I bake bread?<|end|><|assistant|>"
    queries = [f"{rendered}{text}<|end|>" for text in SAID]
    body = {"query": queries, "prompts": [rendered] * 3, "labels": [json.dumps(LABEL)] * 3}
    found = httpx2.post(f"{url}/get_reward", json=body).raise_for_status().json()
    assert found["rewards"] == pytest.approx(scores)
    assert found["scores"] == pytest.approx(rewards)
    assert found["extra_logs"] == {"win_rate": pytest.approx(ranks), "reward": pytest.approx(rewards)}
    for place, text in enumerate(SAID):
        row = {"prompt": rendered, "response": text, "label": LABEL}
        one = httpx2.post(f"{url}/get_reward", json=row).raise_for_status().json()
        assert one == pytest.approx({"score": scores[place], "win_rate": ranks[place], "reward": rewards[place]})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"response": "No.", "label": {"prompt": PROMPT}}, "lacks reference_rewards"),
        ({"response": "No.", "label": json.dumps(LABEL | {"reference_rewards": [0.0, float("nan")]})}, "is nan"),
        ({"response": "No.", "label": LABEL | {"prompt_id": "0123456789abcdef"}}, "differs from the one with these"),
        ({"response": "No.", "label": "bread"}, "must be a JSON object"),
        ({"response": "No.", "label": "[" * 200_000}, "must be a JSON object"),
        ({"response": "No.", "label": LABEL | {"columns": "[1]"}}, "columns must be a JSON object"),
        ({"response": "No.", "label": LABEL | {"columns": "null"}}, "columns must be a JSON object"),
        ({"response": "No.", "label": LABEL | {"columns": '{"a": 1, "a": 2}'}}, "columns must be a JSON object"),
        ({"response": "a" * 1_000_001, "label": LABEL}, "1,000,001 characters"),
        ({"query": ["b" * 1_000_001], "prompts": ["b"], "labels": [LABEL]}, "1,000,001 characters"),
        ({"response": None, "label": LABEL}, "response must be text"),
        ({"query": ["a"], "prompts": ["b"], "labels": [LABEL]}, "must begin with its prompt"),
        ({"query": ["a"], "prompts": [], "labels": [LABEL]}, "lists of the same length"),
        ({"query": [1], "prompts": ["b"], "labels": [LABEL]}, "must be text"),
        ({"text": "No."}, "must have query"),
        (["No."], "must have query"),
    ],
)
def test_a_bad_request_is_refused_with_the_reason(url: str, body: Any, said: str) -> None:
    """Status 422, never a reward of zero."""
    found = httpx2.post(f"{url}/get_reward", json=body)
    assert found.status_code == 422
    assert said in found.json()["error"]


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"{", 422, "not JSON that can be read"),
        (b"[" * 100_000, 422, "not JSON that can be read"),
        (b'{"response": "\\ud800", "label": {}}', 422, "half a surrogate pair"),
        (b" " * (MAX_BYTES + 1), 413, "more than 64,000,000"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(url: str, content: bytes, status: int, said: str) -> None:
    """Broken, nested without end, or without end itself."""
    found = httpx2.post(f"{url}/get_reward", content=content)
    assert (found.status_code, said in found.json()["error"]) == (status, True)


def test_a_bad_request_spoils_none_of_its_batch(url: str) -> None:
    """Of 64 requests at once every seventh is refused, the others get their own reward; the metrics count all."""
    texts = [f"Knead the dough {'please ' * (i % 5)}{i} times." for i in range(64)]
    scores, _, _ = expected(texts)
    before = metrics(url)

    def ask(i: int) -> Any:
        label = LABEL | {"reference_rewards": [2.0, 1.0]} if i % 7 == 0 else LABEL
        return httpx2.post(f"{url}/get_reward", json={"prompt": "", "response": texts[i], "label": label}, timeout=60)

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, range(64)))
    for i, answer in enumerate(answers):
        if i % 7 == 0:
            assert answer.status_code == 422
        else:
            assert answer.json()["score"] == pytest.approx(scores[i])
    spent = {name: value - before[name] for name, value in metrics(url).items()}
    assert spent["infalign_rows_total"] == 64
    assert spent["infalign_failed_total"] == 10


def test_a_text_that_the_rewards_server_refuses_is_a_bad_request() -> None:
    """Not an error of this server: the same text is refused again."""

    def refuse(prompts: list[Any], responses: list[str]) -> list[float]:
        raise RequestError("400: too long")

    with listening(app(CalibratedReward(refuse, "exp:10"), None)) as url:
        found = httpx2.post(f"{url}/get_reward", json={"response": "No.", "label": LABEL})
    assert (found.status_code, found.json()) == (422, {"error": "400: too long"})


def test_a_query_needs_the_tokenizer_of_the_policy() -> None:
    """A server that was started without one says what to set, and its health what is served."""
    with listening(app(calibrated("infalign.world:gold", "exp:10"), None)) as url:
        queries = {"query": ["b a"], "prompts": ["b"], "labels": [LABEL]}
        assert "INFALIGN_TOKENIZER" in httpx2.post(f"{url}/get_reward", json=queries).json()["error"]
        assert httpx2.get(f"{url}/health").json() == {"status": "ok", "transform": "exp:10"}
