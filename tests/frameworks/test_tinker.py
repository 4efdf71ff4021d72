"""tinker-cookbook's own code with our group advantages, and with the reward of a stored law."""

import asyncio
from typing import Any

import numpy as np
import pytest
from shaped import inside
from tiny_models import words

from infalign import CalibratedReward, advantages
from infalign.core.errors import DataError
from infalign.method.calibration import calibrate

pytestmark = inside("tinker_cookbook")


def group(rewards: list[float]) -> Any:
    """Return a group of trajectories of one turn, with half of the reward at the turn and half for the group."""
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

    def trajectory(reward: float) -> Any:
        said = TokensWithLogprobs(tokens=[5, 6], maybe_logprobs=[-0.5, -0.25])
        turn = Transition(ob=ModelInput.from_ints([1, 2]), ac=said, reward=reward / 2, episode_done=True)
        return Trajectory(transitions=[turn], final_ob=ModelInput.from_ints([]))

    halves = [reward / 2 for reward in rewards]
    return TrajectoryGroup([trajectory(reward) for reward in rewards], halves, [{}] * len(rewards))


def test_the_trainer_sends_our_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training module finds them under its own name, and its data have them at every token of a response."""
    from tinker_cookbook.rl import train

    from infalign.integrations.tinker import compute_advantages

    monkeypatch.setattr(train, "compute_advantages", compute_advantages("pass@2"))
    rewards = [[0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]
    groups = [group(row) for row in rewards]
    found = train.compute_advantages(groups)
    expected = [advantages(row, [0] * len(row), "pass@2").tolist() for row in rewards]
    assert [row.tolist() for row in found] == [pytest.approx(row) for row in expected]
    data, _ = train.assemble_training_data(groups, found)
    sent = [datum.loss_fn_inputs["advantages"].to_torch().tolist() for datum in data]
    assert sent == [pytest.approx([0.0, one, one]) for row in expected for one in row]
    with pytest.raises(DataError, match="pass@2 needs at least 2 responses per group; one group has 1"):
        train.compute_advantages([group([1.0])])


def test_an_environment_gives_the_reward_of_a_stored_law() -> None:
    """The step of its own `ProblemEnv` decodes the response and asks `CalibratedReward.score`."""
    from tinker_cookbook.renderers.role_colon import RoleColonRenderer
    from tinker_cookbook.rl.problem_env import ProblemEnv

    reward = CalibratedReward(lambda prompts, responses: [float(len(text)) for text in responses], "exp:10")
    reference_rewards = [1.0, 2.0, 5.0, 9.0]

    class Env(ProblemEnv):
        def get_question(self) -> str:
            return "Hi"

        def check_answer(self, sample_str: str) -> Any:
            asked = [{"role": "user", "content": self.get_question()}]
            return reward.score(asked, sample_str, reference_rewards).score

        def check_format(self, sample_str: str) -> bool:
            return True

        def get_reference_answer(self) -> str:
            return ""

    environment = Env(RoleColonRenderer(words()), format_coef=0.0)
    done = asyncio.run(environment.step([5, 6]))  # w5 w6
    assert done.reward == pytest.approx(np.exp(10 * (calibrate(5.0, reference_rewards) - 1)))
