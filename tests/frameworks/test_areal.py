"""AReaL's own workflows and actor with our group advantages and rewards."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shaped import inside

from infalign import CalibratedReward, advantages
from infalign.core.errors import DataError
from infalign.method.calibration import calibrate

pytestmark = inside("areal")
REWARDS = [0.0, 1.0, 0.0, 1.0]


class Replayed:
    """A workflow whose responses have 1, 2, … tokens and the given rewards."""

    def __init__(self, rewards: list[float]) -> None:
        self.left = list(enumerate(rewards))

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        import torch

        place, reward = self.left.pop(0)
        said = place + 1
        return {
            "input_ids": torch.tensor([[1, 2, *range(3, 3 + said)]], dtype=torch.int32),
            "loss_mask": torch.tensor([[0, 0] + [1] * said], dtype=torch.int32),
            "logprobs": torch.full((1, 2 + said), -0.5),
            "versions": torch.zeros((1, 2 + said), dtype=torch.int32),
            "attention_mask": torch.ones((1, 2 + said), dtype=torch.bool),
            "rewards": torch.tensor([reward]),
        }


def group(rewards: list[float], size: int) -> Any:
    """Return the tensors of a group by AReaL's own grouping, its workflow made of what AReaL sends to a worker."""
    from areal.infra.rpc.serialization import deserialize_value, serialize_value
    from areal.utils.dynamic_import import import_from_string

    kwargs = {"workflow": f"{__name__}.Replayed", "workflow_kwargs": {"rewards": rewards}}
    sent = deserialize_value(serialize_value(kwargs | {"group_size": size, "objective": "pass@2"}))
    workflow = import_from_string("infalign.integrations.areal.GroupAdvantages")(**sent)
    return asyncio.run(workflow.arun_episode(None, {}))


def actor(**settings: Any) -> Any:
    """Return AReaL's actor without an engine, which only computes advantages."""
    from areal.api.cli_args import PPOActorConfig
    from areal.trainer.ppo.actor import PPOActor

    config = PPOActorConfig(experiment_name="e", trial_name="t", kl_ctl=0.0, recompute_logprob=False, **settings)
    return PPOActor(config, SimpleNamespace())


def test_the_actor_trains_on_our_advantages() -> None:
    """At every token of a response, and clipped at `reward_clip`."""
    expected = advantages(REWARDS, [0] * 4, "pass@2")
    for clip in (20.0, 0.5):
        found = actor(reward_clip=clip)._compute_advantages(group(REWARDS, 4))
        for row, value in enumerate(expected):
            trained = found["advantages"][row][found["loss_mask"][row].bool()]
            np.testing.assert_allclose(trained, np.full(row + 1, min(value, clip)), atol=1e-6)


def test_a_small_group_is_refused() -> None:
    """Before anything is trained on it."""
    with pytest.raises(DataError, match="pass@2 needs at least 2 responses per group; one group has 1"):
        group([1.0], 1)


def test_a_reward_function_gives_the_reward_of_a_stored_law() -> None:
    """AReaL's wrapper calls it in a process with the columns of the row."""
    from areal.api import AsyncRewardWrapper

    references = [1.0, 2.0, 3.0, 5.0]
    found = asyncio.run(AsyncRewardWrapper(shaped)("Hi", "abc", [1], [2], reference_rewards=references))
    assert found == pytest.approx(np.exp(10 * (calibrate(3.0, references) - 1)))


REWARD = CalibratedReward(lambda prompts, responses: [float(len(text)) for text in responses], "exp:10")


def shaped(prompt: str, completions: str, *ids: Any, reference_rewards: list[float]) -> float:
    """Return the shaped reward in AReaL's form."""
    return REWARD.score(prompt, completions, reference_rewards).score
