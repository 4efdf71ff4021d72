"""OpenRLHF's own code with our reward: what reaches its trainer."""

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from listening import listening
from shaped import PROMPTS, REFERENCES, SAID, expected, inside

from infalign.data.messages import prompt_id
from infalign.integrations import environment, openrlhf
from infalign.integrations.export import export
from infalign.integrations.server import app
from infalign.world import gold

pytestmark = inside("openrlhf")


def test_openrlhf_starts_on_what_export_writes(calibrated_run: Path, tokenizer: Any) -> None:
    """OpenRLHF's preprocessing makes prompts and labels of the file; its command knows every option that is printed."""
    from openrlhf.datasets.prompts_dataset import preprocess_data

    path, _, command = export(calibrated_run, "openrlhf", transform="exp:10", kl=0.5)
    source = (Path(find_spec("openrlhf.cli").origin).parent / "train_ppo_ray.py").read_text()
    assert command[:3] == ["python", "-m", "openrlhf.cli.train_ppo_ray"]
    options = dict(pairwise(command))
    assert int(options["--data.max_len"]) > int(options["--rollout.max_new_tokens"])
    for word in command:
        assert not word.startswith("--") or f'"{word}"' in source
    for row in pq.read_table(path).to_pylist():
        prompt, label = preprocess_data(row, None, "prompt", "label", tokenizer.apply_chat_template)
        asked = json.loads(label)
        found = openrlhf.reward_func([f"{prompt}Knead the dough.<|end|>"], [prompt], [label])
        (reward,) = gold([asked["prompt"]], [tokenizer.decode(tokenizer.encode("Knead the dough."))])
        assert float(found["scores"][0]) == pytest.approx(reward)


class Generated:
    """What vLLM would generate; only the engine is not there on a CPU."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    async def generate(self, *_: Any, **__: Any) -> Any:
        output = SimpleNamespace(token_ids=self.token_ids, finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


def executed(tokenizer: Any, prompt: list[dict[str, str]], label: str, text: str, endpoint: str) -> dict[str, Any]:
    """Return what OpenRLHF's agent makes of a response, its reward fetched by OpenRLHF's own code."""
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    rendered = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    engine = Generated([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
    settings = SimpleNamespace(max_tokens=32, logprobs=None)
    agent = SingleTurnAgentExecutor(endpoint)
    found: dict[str, Any] = asyncio.run(agent.execute(rendered, label, settings, 512, tokenizer, engine))
    return found


def label_of(place: int, **changes: Any) -> str:
    """Return a row's label."""
    prompt = PROMPTS[place]
    row = {"prompt": prompt, "prompt_id": prompt_id(prompt), "reference_rewards": REFERENCES[place]}
    return json.dumps(row | changes)


def test_openrlhf_gets_the_shaped_reward(tokenizer: Any) -> None:
    """Through OpenRLHF's agent, which decodes with special tokens, from the adapter's file and from a server."""
    reward = app(environment.calibrated("infalign.world:gold", "exp:10"), tokenizer)
    asked = [(PROMPTS[place], label_of(place), text) for place in range(2) for text in SAID]
    with listening(reward) as url, ThreadPoolExecutor(16) as threads:
        for source in (openrlhf.__file__, f"{url}/get_reward"):
            found = list(threads.map(lambda one, source=source: executed(tokenizer, *one, source), asked))
            np.testing.assert_allclose([one["reward"][0] for one in found], expected(tokenizer).ravel(), rtol=1e-6)
            assert set(found[0]["extra_logs"]) == {"win_rate", "reward"}
            assert float(found[0]["scores"][0]) == pytest.approx(float(found[0]["extra_logs"]["reward"][0]))


@pytest.mark.parametrize(
    ("label", "said"), [(label_of(0, reference_rewards=None), "lacks reference_rewards"), ("", "must be a JSON object")]
)
def test_what_openrlhf_drops_is_logged(tokenizer: Any, caplog: pytest.LogCaptureFixture, label: str, said: str) -> None:
    """OpenRLHF drops our error and keeps no reward; the log has had it first."""
    with caplog.at_level(logging.ERROR):
        found = executed(tokenizer, PROMPTS[0], label, SAID[0], openrlhf.__file__)
    assert found["reward"] is None
    assert said in caplog.text
