"""verl's and OpenRLHF's own code with our adapters: what reaches their trainers (`make test-frameworks`)."""

import asyncio
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from listening import listening

from infalign.core.errors import DataError
from infalign.data.messages import prompt_id
from infalign.integrations import environment, openrlhf
from infalign.integrations.export import export
from infalign.integrations.server import app
from infalign.integrations.verl import compute_score
from infalign.method.calibration import calibrate
from infalign.method.transforms import Exponential
from infalign.models.tokenizers import load_tokenizer
from infalign.theory.law import training_beta
from infalign.world import gold

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[{"role": "user", "content": f"How do I bake {what}?"}] for what in ("bread", "a cake")]
REFERENCES = [[-3.0, -1.0, 0.0, 0.5, 2.0], [-2.0, -0.5, 0.1, 0.2, 3.0]]
SAID = ["Knead the dough.", "Please, please knead.", "No.", "Wait an hour, then bake the dough."]


@pytest.fixture
def tokenizer(calibrated_run: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a policy's tokenizer and name gold, the reward of the demo's world, by the environment."""
    folder = calibrated_run / "data" / "tokenizer"
    monkeypatch.setenv("INFALIGN_REWARD", "infalign.world:gold")
    monkeypatch.setenv("INFALIGN_TRANSFORM", "exp:10")
    monkeypatch.setenv("INFALIGN_TOKENIZER", str(folder))
    environment._loaded.cache_clear()
    return load_tokenizer(folder)


def expected(tokenizer: Any) -> np.ndarray:
    """Return Φ of each response's rank, (prompts, responses), for the responses as they decode."""
    texts = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in SAID]
    ranks = [
        calibrate(gold([prompt] * len(texts), texts), references)
        for prompt, references in zip(PROMPTS, REFERENCES, strict=True)
    ]
    return np.exp(10 * (np.array(ranks) - 1))


# verl


def rows_for_verl(**changes: Any) -> list[dict[str, Any]]:
    """Return a row for each prompt in the form of verl's data sets."""
    return [
        {
            "data_source": "infalign",
            "prompt": prompt,
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"prompt": prompt, "prompt_id": prompt_id(prompt), "reference_rewards": references} | changes,
        }
        for prompt, references in zip(PROMPTS, REFERENCES, strict=True)
    ]


def scored_by_verl(tokenizer: Any, folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Return the batch of all responses with the rewards that verl's own data set, loader and manager make."""
    import torch
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils.dataset.rl_dataset import RLHFDataset

    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    adapter = "reward.custom_reward_function.path=pkg://infalign.integrations.verl"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [adapter, f"data.train_files={folder}/train.parquet"])
    dataset = RLHFDataset([str(folder / "train.parquet")], tokenizer, config.data)
    asked = [dataset[place] for place in range(len(rows)) for _ in SAID]
    ids = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in SAID] * len(rows)
    width = max(map(len, ids))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    tensors = {
        "prompts": torch.ones(len(ids), 1, dtype=torch.long),
        "responses": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
        "attention_mask": torch.cat([torch.ones(len(ids), 1, dtype=torch.long), mask], dim=1),
        "response_mask": mask,
        "old_log_probs": -torch.ones(mask.shape),
        "ref_log_prob": -1.5 * torch.ones(mask.shape),
    }
    columns = {name: np.array([row[name] for row in asked], dtype=object) for name in rows[0] if name != "prompt"}
    columns["uid"] = np.array([f"p{place}" for place in range(len(rows)) for _ in SAID], dtype=object)
    batch = DataProto.from_dict(tensors=tensors, non_tensors=columns)

    async def all_of_them() -> list[Any]:
        manager = load_reward_manager(config, tokenizer)
        return await asyncio.gather(*(manager.run_single(batch[row : row + 1]) for row in range(len(batch))))

    found = asyncio.run(all_of_them())
    assert all(set(row["reward_extra_info"]) == {"score", "win_rate", "reward"} for row in found)
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    scores = [row["reward_score"] for row in found]
    batch.batch["token_level_scores"] = resolve_reward_manager_cls(config).assemble_rm_scores(batch, scores)
    return batch


def test_verl_gets_the_shaped_reward_and_keeps_its_shape(tokenizer: Any, tmp_path: Path) -> None:
    """Through verl's data set and manager Φ arrives at the last token; rloo and grpo without deviation keep it."""
    from verl.trainer.ppo.core_algos import FixedKLController
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage

    batch = scored_by_verl(tokenizer, tmp_path, rows_for_verl())
    shaped = expected(tokenizer)
    scores = batch.batch["token_level_scores"].sum(1).numpy().reshape(shaped.shape)
    np.testing.assert_allclose(scores, shaped, rtol=1e-6)
    batch, _ = apply_kl_penalty(batch, FixedKLController(0.1))
    lengths = batch.batch["response_mask"].sum(1).numpy().reshape(shaped.shape)
    penalized = shaped - 0.1 * 0.5 * lengths

    def advantages(name: str, **options: Any) -> np.ndarray:
        found = compute_advantage(batch, name, num_repeat=len(SAID), **options).batch["advantages"]
        return found[:, 0].numpy().reshape(shaped.shape)

    centered = penalized - penalized.mean(axis=1, keepdims=True)
    np.testing.assert_allclose(advantages("rloo"), centered * len(SAID) / (len(SAID) - 1), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(advantages("grpo", norm_adv_by_std_in_grpo=False), centered, rtol=1e-4, atol=1e-6)


def test_verl_stops_at_a_bad_row(tokenizer: Any, tmp_path: Path) -> None:
    """verl's manager raises what we raise; no row gets a reward of zero."""
    with pytest.raises(DataError, match="has no reference_rewards"):
        scored_by_verl(tokenizer, tmp_path, rows_for_verl(reference_rewards=None))


def test_verl_starts_on_what_export_writes(calibrated_run: Path, tokenizer: Any) -> None:
    """The printed settings make verl's own configuration, and its data set reads every prompt of the file."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.rl_dataset import RLHFDataset

    path, command = export(calibrated_run, "verl", transform="exp:10", kl=0.5)
    assert command[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", command[3:])
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert (algorithm.adv_estimator, algorithm.use_kl_in_reward) == ("rloo", True)
    assert algorithm.kl_ctrl.kl_coef == pytest.approx(training_beta(Exponential(10.0), kl=0.5), rel=1e-5)
    rows = pq.read_table(calibrated_run / "calibrated.parquet").to_pylist()
    dataset = RLHFDataset([str(path)], tokenizer, config.data)
    assert len(dataset) == len(rows)
    for row, given in zip(rows, dataset, strict=True):
        found = compute_score("infalign", "Knead the dough.", "", given["extra_info"])
        assert found["reward"] == gold([row["prompt"]], ["Knead the dough."])[0]
        assert found["win_rate"] == calibrate(found["reward"], row["reference_rewards"])


# OpenRLHF


def test_openrlhf_starts_on_what_export_writes(calibrated_run: Path, tokenizer: Any) -> None:
    """OpenRLHF's preprocessing makes prompts and labels of the file; its command knows every option that is printed."""
    from openrlhf.datasets.prompts_dataset import preprocess_data

    path, command = export(calibrated_run, "openrlhf", transform="exp:10", kl=0.5)
    place = find_spec("openrlhf.cli")
    assert place is not None
    source = (Path(str(place.origin)).parent / "train_ppo_ray.py").read_text()
    assert command[:3] == ["python", "-m", "openrlhf.cli.train_ppo_ray"]
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
def test_what_openrlhf_swallows_is_logged_and_never_a_zero(
    tokenizer: Any, caplog: pytest.LogCaptureFixture, label: str, said: str
) -> None:
    """OpenRLHF drops our error and keeps no reward; the log has had it first."""
    with caplog.at_level(logging.ERROR):
        found = executed(tokenizer, PROMPTS[0], label, SAID[0], openrlhf.__file__)
    assert found["reward"] is None
    assert said in caplog.text
