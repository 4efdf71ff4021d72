"""verl's own code with our reward and our group advantages: what reaches its trainer."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shaped import PROMPTS, REFERENCES, SAID, expected, inside

from infalign import advantages
from infalign.core.errors import ConfigError, DataError
from infalign.data.messages import prompt_id
from infalign.integrations.export import export
from infalign.integrations.verl import compute_score, register
from infalign.method.calibration import calibrate
from infalign.world import gold

pytestmark = inside("verl")


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
    with pytest.raises(DataError, match="lacks reference_rewards"):
        scored_by_verl(tokenizer, tmp_path, rows_for_verl(reference_rewards=None))


def test_verl_starts_on_what_export_writes(calibrated_run: Path, tokenizer: Any) -> None:
    """The printed settings make verl's own configuration, and its data set reads every prompt of the file."""
    from hydra import compose, initialize_config_module
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.dataset.rl_dataset import RLHFDataset

    path, _, command = export(calibrated_run, "verl", transform="exp:10", kl=0.5)
    assert command[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", command[3:])
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert (algorithm.adv_estimator, algorithm.use_kl_in_reward) == ("rloo", True)
    assert f"algorithm.kl_ctrl.kl_coef={algorithm.kl_ctrl.kl_coef}" in command
    rows = pq.read_table(calibrated_run / "calibrated.parquet").to_pylist()
    dataset = RLHFDataset([str(path)], tokenizer, config.data)
    assert len(dataset) == len(rows)
    for row, given in zip(rows, dataset, strict=True):
        found = compute_score("infalign", "Knead the dough.", "", given["extra_info"])
        assert found["reward"] == gold([row["prompt"]], ["Knead the dough."])[0]
        assert found["win_rate"] == calibrate(found["reward"], row["reference_rewards"])


# Group advantages


@pytest.fixture
def recipe(upstream: Callable[..., None]) -> None:
    """Put the recipe for verl where verl's recipes are, and import it as verl would."""
    upstream("verl-recipe", "recipe.pass_at_k", "register")


def of_trainer(rewards: list[float], uids: list[str], name: str = "pass@2", **settings: Any) -> tuple[Any, Any]:
    """Return masks and advantages of a batch as the step of verl's default trainer computes them."""
    import torch
    from hydra import compose, initialize_config_module
    from verl import DataProto
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    if "pass@2" not in ADV_ESTIMATOR_REGISTRY:
        register("pass@2")
    words = [f"algorithm.{key}={value}" for key, value in ({"adv_estimator": name} | settings).items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        algorithm = compose("ppo_trainer", words).algorithm
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]] * 3)[: len(rewards)]
    per_token = torch.zeros(mask.shape)
    per_token[torch.arange(len(rewards)), mask.sum(1) - 1] = torch.tensor(rewards)
    tensors = {"token_level_rewards": per_token, "response_mask": mask}
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(uids, dtype=object)})
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(uids)]
    found = compute_advantage_for_multi_trajectories(
        batch, keys, adv_estimator=algorithm.adv_estimator, config=algorithm
    )
    return mask.numpy(), found.batch["advantages"].numpy()


@pytest.mark.parametrize("name", ["pass@2", "pass_at_k"])
def test_verls_trainer_has_our_advantages_and_none_for_padding(name: str, recipe: None) -> None:
    """By the name that the configuration has, also of the recipe; rows that fill the batch up are in no group."""
    rewards, uids = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 9.0], ["a", "b", "a", "a", "b", "b", "pad03f"]
    mask, found = of_trainer(rewards, uids, name)
    np.testing.assert_allclose(found[:-1], advantages(rewards[:-1], uids[:-1], "pass@2")[:, None] * mask[:-1])
    assert not found[-1].any()


def test_what_would_change_verls_objective_is_refused(recipe: None) -> None:
    """The KL in the reward, and a group that is too small; also by the recipe."""
    with pytest.raises(ValueError, match=r"algorithm\.use_kl_in_reward changes the rewards that pass@k is of"):
        of_trainer([0.0, 1.0], ["a", "a"], "pass_at_k", use_kl_in_reward=True)
    with pytest.raises(ConfigError, match=r"algorithm\.use_kl_in_reward would change the objective, pass@2"):
        of_trainer([0.0, 1.0], ["a", "a"], use_kl_in_reward=True)
    with pytest.raises(DataError, match="pass@2 needs at least 2 responses per group; one group has 1"):
        of_trainer([0.0, 1.0, 1.0], ["a", "a", "b"])


def test_verl_loads_the_estimator_from_a_module_of_the_user(tmp_path: Path) -> None:
    """VERL_USE_EXTERNAL_MODULES is imported while verl is, and registers it."""
    (tmp_path / "mine.py").write_text('from infalign.integrations.verl import register\n\nregister("pass@8")\n')
    code = "from verl.trainer.ppo.core_algos import get_adv_estimator_fn as find; print(find('pass@8').__name__)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": "mine", "PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "estimate\n", ran.stderr[-2000:]
