"""SkyRL's own trainer and environments with our group advantages and rewards."""

import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import typing_extensions
from shaped import inside

from infalign import CalibratedReward, advantages
from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import calibrate

pytestmark = inside("skyrl")
if sys.version_info < (3, 12):  # SkyRL asks for 3.12, from which on pydantic takes this class of the standard library
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
REWARDS, UIDS = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], ["a", "b", "a", "a", "b", "b"]


@pytest.fixture
def trained_on(upstream: Callable[..., None]) -> Any:
    """Return a function that gives the advantages of SkyRL's trainer, of a batch that it has padded."""
    import torch
    from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.trainer import RayPPOTrainer

    from infalign.integrations.skyrl import register

    if "pass@2" not in AdvantageEstimatorRegistry.list_available():
        register("pass@2")
        upstream("SkyRL", "sent_examples.pass_at_k", "main_pass_at_k")

    def run(rewards: list[float], uids: list[str], **settings: Any) -> Any:
        mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]] * 2)[: len(rewards)]
        per_token = torch.zeros(mask.shape)
        per_token[torch.arange(len(rewards)), mask.sum(1) - 1] = torch.tensor(rewards)
        batch = TrainingInputBatch(
            {"rewards": per_token, "response_mask": mask, "loss_mask": mask.float(), "values": None}
        )
        batch.metadata = {"uids": uids, "avg_response_length": 2.0}
        trainer = RayPPOTrainer.__new__(RayPPOTrainer)  # without its workers, which need GPUs
        trainer.cfg, trainer.all_metrics = SkyRLTrainConfig(), {}
        trainer.cfg.trainer.algorithm.advantage_estimator = "pass@2"
        for name, value in settings.items():
            setattr(trainer.cfg.trainer.algorithm, name, value)
        return mask, trainer.compute_advantages_and_returns(pad_training_input_batch(batch, 2))["advantages"]

    return run


@pytest.mark.parametrize("name", ["pass@2", "pass_at_k"])
def test_the_trainer_gets_our_advantages_and_none_for_padding(trained_on: Any, name: str) -> None:
    """At every token of a response, also by what may be sent upstream; rows that fill the batch up are in no group."""
    mask, found = trained_on(REWARDS, UIDS, advantage_estimator=name)
    expected = advantages(REWARDS, UIDS, "pass@2")[:, None] * mask.numpy()
    np.testing.assert_allclose(found[:-2], expected, atol=1e-6)
    assert not found[-2:].any()


def test_what_would_change_the_objective_is_refused(trained_on: Any) -> None:
    """The KL in the reward, normalized advantages, and a group that is too small."""
    for name in ("use_kl_in_reward", "advantage_batch_normalize"):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name} would change the objective, pass@2"):
            trained_on(REWARDS, UIDS, **{name: True})
    with pytest.raises(DataError, match="pass@2 needs at least 2 responses per group; one group has 1"):
        trained_on(REWARDS[:3], ["a", "a", "b"])


def test_an_environment_gives_the_reward_of_a_stored_law() -> None:
    """Its step asks `CalibratedReward.score` with the reference rewards of its row."""
    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    reward = CalibratedReward(lambda prompts, responses: [float(len(text)) for text in responses], "exp:10")

    class Env(BaseTextEnv):
        def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
            super().__init__()
            self.row = extras

        def step(self, action: str) -> Any:
            score = reward.score(self.row["prompt"], action, self.row["reference_rewards"])
            return BaseTextEnvStepOutput(observations=[], reward=score.score, done=True, metadata={})

    skyrl_gym.register("stored-law", entry_point=Env)
    row = {"prompt": [{"role": "user", "content": "Hi"}], "reference_rewards": [1.0, 2.0, 3.0, 5.0]}
    done = skyrl_gym.make("stored-law", env_config={}, extras=row).step("abc")
    assert done["reward"] == pytest.approx(np.exp(10 * (calibrate(3.0, row["reference_rewards"]) - 1)))
