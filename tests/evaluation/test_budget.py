"""What a KL budget buys on stored rewards: known shares, and the same from rewards and from pass rates."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import softmax

from infalign.core.display import share
from infalign.core.errors import DataError
from infalign.evaluation.budget import budget_rows, measure_budgets, read_stored_rewards
from infalign.evaluation.extrapolation import Counts
from infalign.evaluation.measures import pass_at_k
from infalign.evaluation.worth import worth
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN

CHECKED = np.array([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]], float)


def test_what_a_budget_buys() -> None:
    """Silent prompts, the most that can be spent, the weights, and the limits of policies that know the rates."""
    (found,) = measure_budgets(CHECKED, BestOfN(2), [0.1])
    assert (found.metric, found.silent, found.kl) == ("pass@2", 0.5, 0.1)
    shares = (CHECKED.sum(axis=1) + 0.5) / 5
    assert found.largest_kl == pytest.approx(-np.log(shares).mean())
    assert 3 < found.effective < 4
    assert found.worth == worth(Counts([0, 1, 2, 4], 4), "best-of-2", [0.1], known=True)[0]
    rows = budget_rows([found])
    assert [row[0] for row in rows] == ["0 (reference)", "0.1"]
    assert rows[0][1] == rows[0][2] == share(pass_at_k(CHECKED, 2).as_dict())
    assert measure_budgets(CHECKED, BestOfN(8), [0.1])[0].worth is None


def test_two_values_are_a_checkers() -> None:
    """Rewards of −1 and 1 buy what those of 0 and 1 buy, at twice the β, up to the same largest KL."""
    both = (measure_budgets(rewards, BestOfN(2), [0.7])[0] for rewards in (CHECKED, 2 * CHECKED - 1))
    of_shares, of_signs = map(asdict, both)
    assert of_signs.pop("beta") == pytest.approx(2 * of_shares.pop("beta"))
    assert of_signs == of_shares
    assert of_shares["largest_kl"] > 0.7 > -np.log([0.25, 0.5]).sum() / 4  # what rates that are not smoothed can spend


def test_graded_rewards_are_served_as_stored() -> None:
    """By enumeration of the laws on K rollouts that spend the KL: the reward's own tilt, and the optimum."""
    rewards = np.array([[0.0, 0.5, 2.0], [1.0, 3.0, 3.5]])
    (found,) = measure_budgets(rewards, BestOfN(2), [0.2])
    assert found.worth is not None
    pairs = [[max(row[i], row[j]) for i, j in ((0, 1), (0, 2), (1, 2))] for row in rewards]
    assert found.worth.today.mean == pytest.approx(np.mean(pairs))

    def tilted(beta: float) -> np.ndarray:
        return softmax(rewards / beta, axis=1)

    beta = brentq(lambda beta: (tilted(beta) * np.log(3 * tilted(beta))).sum(axis=1).mean() - 0.2, 0.1, 100.0)
    best = [
        sum(p * q * max(row[i], row[j]) for i, p in enumerate(law) for j, q in enumerate(law))
        for row, law in zip(rewards, tilted(beta), strict=True)
    ]
    assert found.worth.ordinary.mean == pytest.approx(np.mean(best), abs=1e-6)
    assert found.worth.law.mean == pytest.approx(optimum(rewards, BestOfN(2), kl=0.2, objective="reward").value)
    assert found.worth.difference.mean > 0


def test_pass_rates_are_rewards(tmp_path: Path) -> None:
    """A row per rollout, in any order of prompts, or a row per prompt with the number of rollouts."""
    long, rates = tmp_path / "rewards.csv", tmp_path / "rates.jsonl"
    rows = [f"{prompt},{reward:g}" for k in range(4) for prompt, reward in enumerate(CHECKED[:, k])]
    long.write_text("\n".join(["prompt_id,reward", *rows]))
    rates.write_text("".join(json.dumps({"pass_rate": rate}) + "\n" for rate in CHECKED.mean(axis=1).tolist()))
    assert read_stored_rewards(long, None).tolist() == CHECKED.tolist()
    assert read_stored_rewards(rates, 4).tolist() == CHECKED.tolist()
    calibrated = ({"prompt_id": str(i), "reference_rewards": row} for i, row in enumerate(CHECKED.tolist()))
    rates.write_text("".join(map(json.dumps, calibrated)).replace("}{", "}\n{"))  # as a run has them
    assert read_stored_rewards(rates, None).tolist() == CHECKED.tolist()
    for text, rollouts, said in (
        ('{"pass_rate": 0.5}', None, "give --rollouts K, the number of rollouts"),
        ('{"pass_rate": 1.5}', 4, "line 1: pass_rate must be between 0 and 1, found 1.5"),
        ('{"pass_rate": "half"}', 4, "line 1: pass_rate must be between 0 and 1, found 'half'"),
        ('{"pass_rate": 0.5}\n{"rate": 0.5}', 4, "line 2: pass_rate must be between 0 and 1, found None"),
        ('{"prompt_id": 1, "reward": 1}\n' * 2 + '{"prompt_id": 2, "reward": 0}', None, "1 to 2 rewards per prompt"),
        ('{"prompt_id": 1, "reference_rewards": [2.5, 2.5]}', None, "no prompt has two different rewards"),
    ):
        rates.write_text(text)
        with pytest.raises(DataError, match=said):
            read_stored_rewards(rates, rollouts)
