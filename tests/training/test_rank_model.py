"""A model that is trained to predict ranks, and the reward of a prediction."""

from pathlib import Path
from typing import Any

import enumerable
import numpy as np
import pytest
import torch
from enumerable import quiet
from scipy.special import expit, logit

from infalign.core.errors import DataError
from infalign.data.messages import Message
from infalign.method.reward import PredictedRankReward
from infalign.method.transforms import Exponential, Function, Log
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Fit, Scratch
from infalign.rewards.classifier import ClassifierReward
from infalign.training.common import save_model
from infalign.training.supervised import fit_rank_model

SCRATCH = Scratch(vocabulary=300, hidden=16, layers=1, heads=2, context=64)
PROMPT: list[Message] = [{"role": "user", "content": "a word"}]


@pytest.mark.slow
def test_a_rank_that_is_in_the_text_is_learned(tmp_path: Path) -> None:
    """Where the rank is said by the first letter, those of unseen words are predicted much better than by 1/2."""
    words = [f"{letter}{i}" for i in range(30) for letter in "abcd"]
    ranks = np.array([(ord(word[0]) - ord("a") + 0.5) / 4 for word in words])
    tokenizer = train_tokenizer(words, SCRATCH)
    save_model(new_policy(SCRATCH, tokenizer, seed=0), tokenizer, tmp_path / "start")
    rows = [(PROMPT, word, float(rank)) for word, rank in zip(words, ranks, strict=True)][:80]
    torch.manual_seed(0)
    fit = Fit(epochs=12, batch_size=16, learning_rate=1e-2, max_length=64)
    fit_rank_model(str(tmp_path / "start"), tokenizer, rows, fit, enumerable.job_in(tmp_path, quiet))
    outputs = ClassifierReward.load(tmp_path / "policy")([PROMPT] * 40, words[80:])
    assert np.mean((expit(outputs) - ranks[80:]) ** 2) < 0.2 * np.mean((0.5 - ranks[80:]) ** 2)


def test_the_predicted_rank_is_transformed() -> None:
    """Outputs whose sigmoids are 1/4 and 1/2 give e^{10(u−1)}, for text and messages; the mean of u is logged."""
    outputs = {"a": float(logit(0.25)), "b": 0.0}
    reward = PredictedRankReward(lambda prompts, responses: [outputs[r] for r in responses], Exponential(10))
    logged: dict[str, float] = {}
    found = reward(["p", "p"], ["a", [{"role": "assistant", "content": "b"}]], log_metric=logged.__setitem__)
    assert found == pytest.approx([np.exp(-7.5), np.exp(-5.0)])
    assert logged == {"win_rate": pytest.approx(0.375)}
    assert reward.__name__ == "exp:10"


@pytest.mark.parametrize(
    ("output", "transform", "said"),
    [
        (np.nan, Exponential(10), "response 1: the rank model's output is nan"),
        (np.inf, Exponential(10), "output is inf and exp:10 of its sigmoid is 1.0"),
        (-800.0, Log(), "output is -800.0 and log of its sigmoid is -inf"),
        (40.0, Function("odds", lambda u: u / (1 - u)), "odds of its sigmoid is inf"),
    ],
)
def test_what_is_not_finite_is_no_reward(output: float, transform: Any, said: str) -> None:
    """An output or a value of Φ that is not finite is an error that names the response."""
    with pytest.raises(DataError, match=said):
        PredictedRankReward(lambda prompts, responses: [0.0, output], transform)(["p", "p"], ["a", "b"])
    with pytest.raises(DataError, match=r"returned shape \(1,\) for 2 responses"):
        PredictedRankReward(lambda prompts, responses: [0.0], transform)(["p", "p"], ["a", "b"])
