"""What a KL budget buys on stored rewards: known shares, and the same from rewards and from pass rates."""

import json
from pathlib import Path

import numpy as np
import pytest

from infalign.core.errors import DataError
from infalign.evaluation.budget import measure_budgets, read_stored_rewards
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN

CHECKED = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], float)


def test_what_a_budget_buys() -> None:
    """pass@2 today without bias and by shares, silent prompts, the most that can be spent, and the weights."""
    (found,) = measure_budgets(CHECKED, BestOfN(2), [0.1])
    assert (found.metric, found.silent, found.kl) == ("pass@2", 0.5, pytest.approx(0.1, abs=1e-9))
    assert found.today == pytest.approx((0 + 1 / 2 + 5 / 6 + 1) / 4)
    shares = (CHECKED.sum(axis=1) + 0.5) / 5
    assert found.by_shares == pytest.approx((1 - (1 - shares) ** 2).mean())
    assert found.largest_kl == pytest.approx(-np.log(shares).mean())
    best = optimum(CHECKED, BestOfN(2), kl=0.1)
    weights = np.exp(best.shaped_PK / found.beta)
    weights /= ((1 - shares) * np.exp(best.shaping([0.0], CHECKED[1])[0]) + shares * weights[:, -1])[:, None]
    assert found.reached == best.value > found.by_shares
    assert 1 < found.heaviest < 5
    assert 3 < found.effective < 4
    assert measure_budgets(CHECKED, BestOfN(8), [0.1])[0].today is None


def test_pass_rates_are_rewards(tmp_path: Path) -> None:
    """A row per rollout, in any order of prompts, or a row per prompt with the number of rollouts."""
    long, rates = tmp_path / "rewards.csv", tmp_path / "rates.jsonl"
    rows = [f"{prompt},{reward:g}" for k in range(4) for prompt, reward in enumerate(CHECKED[:, k])]
    long.write_text("\n".join(["prompt_id,reward", *rows]))
    rates.write_text("".join(json.dumps({"pass_rate": rate}) + "\n" for rate in CHECKED.mean(axis=1).tolist()))
    assert read_stored_rewards(long, None).tolist() == CHECKED.tolist()
    assert read_stored_rewards(rates, 4).tolist() == CHECKED.tolist()
    for text, rollouts, said in (
        ('{"pass_rate": 0.5}', None, "give --rollouts K, the number of rollouts"),
        ('{"pass_rate": 1.5}', 4, "line 1: pass_rate must be between 0 and 1, found 1.5"),
        ('{"pass_rate": "half"}', 4, "line 1: pass_rate must be between 0 and 1, found 'half'"),
        ('{"prompt_id": 1, "reward": 1}\n' * 2 + '{"prompt_id": 2, "reward": 0}', None, "1 to 2 rewards per prompt"),
    ):
        rates.write_text(text)
        with pytest.raises(DataError, match=said):
            read_stored_rewards(rates, rollouts)
