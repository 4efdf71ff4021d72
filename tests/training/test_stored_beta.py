"""β of every shaping comes from the stored rewards where they tie, and `optimal` is trained on its own log-ratios."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.optimize import brentq
from scipy.special import expit, logit, rel_entr

from infalign.core.errors import ConfigError
from infalign.core.storage import write_table
from infalign.method.calibration import Array
from infalign.method.optimum import Optimal, optimum
from infalign.method.procedures import BestOfN, parse_procedure
from infalign.method.shapings import Ranked, mean_kl, parse_shaping, shape_rollouts
from infalign.method.transforms import Exponential
from infalign.recipe.data_dependent import resolved_policy
from infalign.recipe.layout import Layout
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.optimum import optimal
from infalign.training.solvers import read_solver
from infalign.training.solvers.base import RecipeFacts
from infalign.training.solvers.qrpo import regression_targets
from infalign.training.solvers.theory import stored_beta

K = 32
COUNTS = np.array([0, 0, 1, 1, 2, 3, 5, 8, 13, 21, 30, 32])
CHECKED = np.array([[0.0] * (K - c) + [1.0] * c for c in COUNTS])
FREE = np.sort(np.random.default_rng(0).normal(size=(12, K)))


def spent(p: Array, gap: Array, beta: float) -> float:
    """Return the mean KL of policies with logit q = logit p + gap/β, where there is signal."""
    q = expit(logit(p) + gap / beta)
    return float((rel_entr(q, p) + rel_entr(1 - q, 1 - p))[(p > 0) & (p < 1)].sum() / p.size)


@pytest.mark.parametrize(
    ("name", "gap"),
    [
        ("raw", np.ones_like),
        ("identity", lambda p: np.full_like(p, 0.5)),
        ("exp:10", lambda p: np.exp(10 * (1 - p / 2)) - np.exp(10 * (1 - p) / 2)),
    ],
)
def test_rewards_of_0_and_1_have_the_beta_of_their_closed_form(name: str, gap: Any) -> None:
    """Mid-ranks are 1 − p/2 and (1 − p)/2; β of raw Φ by root finding on the success probabilities."""
    with np.errstate(divide="ignore"):
        root = brentq(lambda x: spent(COUNTS / K, gap(COUNTS / K), np.exp(x)) - 0.2, -8, 14, xtol=1e-13)
    assert stored_beta(parse_shaping(name), CHECKED, 0.2) == pytest.approx(np.exp(root), rel=1e-9)


@pytest.mark.parametrize("transform", [Exponential(10), Exponential(-10)])
def test_rewards_without_ties_have_the_beta_of_continuous_ranks(transform: Exponential) -> None:
    """Exactly; where some prompts have ties, both kinds together spend the budget."""
    shaping = Ranked(transform)
    assert stored_beta(shaping, FREE, 0.2) == law_at_kl(transform, kl=0.2).beta
    beta = stored_beta(shaping, np.concatenate([FREE, CHECKED]), 0.2)
    tied = mean_kl(shape_rollouts(shaping, CHECKED), beta / shaping.scale)
    assert (tied + aligned_law(transform, beta=beta).kl) / 2 == pytest.approx(0.2, abs=1e-10)


def test_maxk_has_the_beta_of_the_optimum() -> None:
    """For 0/1 rewards that of pass@4 for the reward itself, half of it for the win rate, else that of ranks."""
    best = optimum(CHECKED, BestOfN(4), kl=0.2).beta
    settings = {"solver": "maxk", "kl_budget": 0.2}
    by_reward = read_solver(**settings, objective="reward")
    assert by_reward.theory.raw_beta(BestOfN(4), lambda: CHECKED) == best
    assert by_reward.reward_shaping(BestOfN(4)).name == "raw"
    by_wins = read_solver(**settings).theory
    assert by_wins.raw_beta(BestOfN(4), lambda: CHECKED) == pytest.approx(best / 2, rel=1e-9)
    assert by_wins.raw_beta(BestOfN(4), lambda: FREE) == optimal(BestOfN(4), kl=0.2).beta


def test_what_a_given_n_spends_is_not_known_by_ranks_that_tie() -> None:
    """Fine-tuning on the best of 4 of 0/1 rewards spends less than log 4 − 3/4 nats."""
    theory = read_solver(solver="bon-sft", n=4).theory
    assert theory.kl(BestOfN(4), lambda: FREE) == pytest.approx(np.log(4) - 0.75)
    assert theory.kl(BestOfN(4), lambda: CHECKED) is None


def test_a_prompt_without_a_success_is_trained_on() -> None:
    """By the optimum its failures have the target log((1 − q)/(1 − p̃)), p̃ = ½/(K + 1); others sum to 1 by p̃ and q."""
    shaping = optimum(CHECKED, BestOfN(8), kl=0.2).shaping
    for c, targets_K in zip(COUNTS, regression_targets(CHECKED, shaping, shaping.beta), strict=True):
        p = (c + 0.5) / (K + 1)
        q = expit(brentq(lambda x, p=p: x - logit(p) - 8 * expit(-x) ** 7 / shaping.beta, -9, 99, xtol=1e-13))
        expected = np.where(CHECKED[0] * 0 + np.arange(K) >= K - c, np.log(q / p), np.log((1 - q) / (1 - p)))
        assert targets_K == pytest.approx(np.maximum(expected, -np.log(K)), abs=1e-9)


def test_a_law_is_solved_once_for_all_its_prompts_and_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,200 prompts with ten distinct shares of successes."""
    solved = []
    solve = "infalign.method.optimum.Laws.solve"
    plain = optimum.__globals__["Laws"].solve
    monkeypatch.setattr(solve, lambda laws, beta: solved.append(laws) or plain(laws, beta))
    shape_rollouts(Optimal(BestOfN(8), 0.1234), np.tile(CHECKED, (100, 1)))
    assert len(solved) == len(set(COUNTS))


@pytest.mark.parametrize(
    ("settings", "procedure", "said"),
    [
        (
            {"transform": "optimal"},
            "rewind:0.5:4",
            "transform is optimal, which needs a procedure by rank",
        ),
        ({"transform": "optimal:best"}, "best-of-4", "optimal needs the rewards of a run"),
    ],
)
def test_where_the_optimum_is_not_known_it_is_refused(settings: dict[str, Any], procedure: str, said: str) -> None:
    """Rewind-and-Repeat looks at more than ranks, and nothing else is spelled so."""
    facts = RecipeFacts(parse_procedure(procedure), 16, **{field.name: True for field in fields(RecipeFacts)[2:]})
    with pytest.raises((ValueError, ConfigError), match=said):
        read_solver(kl_budget=0.2, **settings).check(facts)


def test_a_student_of_an_optimum_has_the_shaping_of_its_teacher(tmp_path: Path) -> None:
    """Both are the optimum on the stored rewards; the recipe's own policies stay as they were read."""
    fit = {"epochs": 1, "batch_size": 8}
    aware = {"transform": "optimal", "kl_budget": 0.2, "fit": fit}
    policies = {"student": read_solver(solver="distil", teacher="aware", fit=fit), "aware": read_solver(**aware)}
    policies["student"].find_teacher(policies)
    layout = Layout(tmp_path)
    write_table(layout.calibrated, pa.table({"reference_rewards": CHECKED.tolist()}))
    best = optimum(CHECKED, BestOfN(4), kl=0.2)
    for name in policies:
        found = resolved_policy(name, policies, BestOfN(4), layout)
        assert isinstance(found.shaping, Optimal)
        assert (found.shaping(CHECKED[5], CHECKED[5]) == best.shaping(CHECKED[5], CHECKED[5])).all()
        assert policies[name].shaping.name == "optimal"
