"""β of every shaping comes from the stored rewards where they tie, and `optimal` is trained on its own log-ratios."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import betabinom

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import write_table
from infalign.method.optimum import fitted_prior, left_out, optimum
from infalign.method.procedures import BestOfN, WorstOfN, parse_procedure
from infalign.method.shapings import Ranked, mean_kl, shape_rollouts
from infalign.method.transforms import Exponential
from infalign.recipe.stored_laws import read_law, write_law
from infalign.theory.aims import tilted
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.optimum import rank_optimum
from infalign.training.solvers import read_solver
from infalign.training.solvers.qrpo import regression_targets

K = 32
COUNTS = np.array([0, 0, 1, 1, 2, 3, 5, 8, 13, 21, 30, 32])
CHECKED = np.array([[0.0] * (K - c) + [1.0] * c for c in COUNTS])
FREE = np.sort(np.random.default_rng(0).normal(size=(12, K)))


@pytest.mark.parametrize("transform", [Exponential(10), Exponential(-10)])
def test_rewards_without_ties_have_the_beta_of_continuous_ranks(transform: Exponential) -> None:
    """Exactly; where some prompts have ties, both kinds together spend the budget."""
    shaping = Ranked(transform)
    free, law = tilted(FREE, shaping, kl=0.2), tilted(np.concatenate([FREE, CHECKED]), shaping, kl=0.2)
    assert (free.paper_beta, free.kl_over) == (pytest.approx(law_at_kl(transform, kl=0.2).beta, rel=1e-15), "ranks")
    tied = mean_kl(shape_rollouts(shaping, CHECKED), law.beta)
    assert (tied + aligned_law(transform, beta=law.paper_beta).kl) / 2 == pytest.approx(0.2, abs=1e-10)


def test_maxk_has_the_beta_of_the_optimum() -> None:
    """For 0/1 rewards that of pass@4 for the reward itself, half of it for the win rate, else that of ranks."""
    best = optimum(CHECKED, BestOfN(4), kl=0.2).beta
    settings = {"solver": "maxk", "kl_budget": 0.2}
    by_reward = read_solver(**settings, objective="reward")
    ascent = by_reward.ascent(by_reward.aim(BestOfN(4)).law(CHECKED), BestOfN(4))
    assert (ascent.beta, ascent.shaping.name) == (best, "raw")
    by_wins = read_solver(**settings).aim(BestOfN(4))
    assert by_wins.law(CHECKED).beta == pytest.approx(best / 2, rel=1e-9)
    assert (by_wins.law(FREE).beta, by_wins.law(FREE).kl) == (rank_optimum(BestOfN(4), kl=0.2).beta, 0.2)


def test_a_given_n_spends_less_on_rewards_that_tie() -> None:
    """Fine-tuning on the best of 4 of 0/1 rewards spends less than log 4 − 3/4 nats."""
    aim = read_solver(solver="bon-sft", n=4).aim(BestOfN(4))
    assert aim.law(FREE).kl == pytest.approx(np.log(4) - 0.75)
    assert aim.law(CHECKED).kl < np.log(4) - 0.75


def test_targets_of_the_optimum_are_by_the_rate_of_the_others() -> None:
    """A right rollout is 8(1 − q)⁷/β above a wrong one of the same others; by the fitted prior the mean of e^T is 1."""
    law = optimum(CHECKED, BestOfN(8), kl=0.2)
    a, b = fitted_prior(COUNTS, np.full(len(COUNTS), K))
    for c, rewards_K, log_ratios_K in zip(COUNTS, law.rewards_PK, left_out(law).log_ratios_PK, strict=True):
        targets_K = regression_targets(log_ratios_K)
        for reward in set(rewards_K):
            p = (c - reward + a) / (K - 1 + a + b)
            logit_q = brentq(lambda x, p=p: x - logit(p) - 8 * expit(-x) ** 7 / law.beta, -9, 99, xtol=1e-13)
            q = expit(logit_q)
            expected = np.log(q / p) if reward else np.log((1 - q) / (1 - p))
            assert targets_K[rewards_K == reward] == pytest.approx(expected, abs=1e-8)
    every = optimum([[1.0] * c + [0.0] * (K - c) for c in range(K + 1)], BestOfN(8), beta=law.beta)
    prior = fitted_prior(range(K + 1), [K] * (K + 1))
    means_C = np.exp(np.array(left_out(every).log_ratios_PK)).mean(axis=1)
    assert betabinom(K, *prior).pmf(range(K + 1)) @ means_C == pytest.approx(1.0, abs=1e-8)


@pytest.mark.parametrize(
    ("settings", "procedure", "said"),
    [
        ({"transform": "optimal"}, "rewind:0.5:4", "transform is optimal, which needs a procedure by rank"),
        ({"transform": "optimal:best"}, "best-of-4", "optimal needs the rewards of a run"),
    ],
)
def test_where_the_optimum_is_not_known_it_is_refused(settings: dict[str, Any], procedure: str, said: str) -> None:
    """Rewind-and-Repeat looks at more than ranks, and nothing else is spelled so."""
    with pytest.raises((ValueError, ConfigError), match=said):
        read_solver(kl_budget=0.2, **settings).check(parse_procedure(procedure), 16, has_reward_model=True)


@pytest.mark.parametrize(("procedure", "kl", "kept"), [(BestOfN(4), 0.2, 0), (WorstOfN(8), 1.25, 1)])
def test_a_law_is_read_as_it_was_written(procedure: BestOfN | WorstOfN, kl: float, kept: int, tmp_path: Path) -> None:
    """Its log-ratios and numbers to the bit, and its shaping; a student aims at its teacher's."""
    fit = {"epochs": 1, "batch_size": 8}
    aware = {"transform": "optimal", "kl_budget": kl, "fit": fit}
    policies = {"student": read_solver(solver="distil", teacher="aware", fit=fit), "aware": read_solver(**aware)}
    policies["student"].find_teacher(policies)
    aim = policies["student"].aim(procedure)
    assert aim == policies["aware"].aim(procedure)
    law, names = aim.law(CHECKED[kept:]), [f"prompt {c}" for c in COUNTS[kept:]]
    write_law(tmp_path / "law.parquet", names, law)
    prompts, found = read_law(tmp_path / "law.parquet", aim)
    assert (prompts, found.beta, found.kl, found.kl_over) == (names, law.beta, law.kl, "classes")
    assert (found.log_ratios_PK == law.log_ratios_PK).all()
    assert (found.shaping, bool(found.shaping.raised)) == (law.shaping, procedure == WorstOfN(8))
    write_table(tmp_path / "other.parquet", pa.table({"prompt_id": names}))
    with pytest.raises(DataError, match=r"other\.parquet is no law of a policy; remove it"):
        read_law(tmp_path / "other.parquet", aim)
