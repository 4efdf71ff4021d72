"""Best-of-n itself as an alignment method, which trains nothing: its KL, and what it wins when it is served.

Its responses are selected from one half of the reference's samples, and the other half is the base.
"""

from collections.abc import Sequence
from math import comb
from typing import Any

import numpy as np
from methods import extreme_procedure
from numpy.typing import ArrayLike
from run_files import Evaluated, Recipe, drawn
from scipy.special import xlog1py

from infalign import BestOfN, DataError, OrderStatistics, Samples, WorstOfN, win_rates_of

BEST_OF_N = "best-of-n"
LEAST_LOG = -700.0  # below this, e^x underflows


def best_of_n_kl_bound(n: int) -> float:
    """Return log n − (n−1)/n nats: no policy spends more by serving the best of n draws; without atoms it is exact.

    Raises ConfigError unless n is a whole number of at least 1.
    """
    BestOfN(n)  # raises ConfigError for an invalid n
    return float(np.log(n) - (n - 1) / n)


def best_of_n_kl_given(log_probabilities: ArrayLike, n: int) -> np.ndarray:
    """Return the KL in nats of Best-of-n to the policy, estimated from responses that it served, shape of the input.

    ``log_probabilities`` are log ε, with ε the policy's probability of the response that was served:
    (1−ε)^n·[log n + (n−1)·log(1−ε) − (n−1)/n] + [1 − (1−ε)^n]·log([1 − (1−ε)^n]/ε) (Beirami et al., arXiv 2401.01879).
    It is the exact KL where the best response has probability ε and all others have none of their own: the bound as
    ε → 0, and 0 at ε = 1.

    Raises DataError for a log-probability that is NaN or above 0, ConfigError as `best_of_n_kl_bound`.
    """
    given = np.asarray(log_probabilities, float)
    bad = ~(given <= 0)
    if bad.any():
        raise DataError(
            f"log_probabilities has {given[bad][0]:g}; give logs of probabilities in nats, which are at most 0"
        )
    log_epsilon = np.maximum(given, LEAST_LOG)  # there the bound is reached to all digits
    epsilon, others = np.exp(log_epsilon), -np.expm1(log_epsilon)
    missed = np.exp(xlog1py(n, -epsilon))  # the probability that all n draws miss it
    among_others = missed * best_of_n_kl_bound(n) + xlog1py((n - 1) * missed, -epsilon)
    more = -others * np.expm1(xlog1py(n - 1, -epsilon)) / epsilon  # [1 − (1−ε)^n]/ε − 1, without cancellation
    return np.asarray(among_others + (1.0 - missed) * np.log1p(more))


def best_of_n_kl(rewards_PM: np.ndarray, log_probabilities_PM: np.ndarray, n: int) -> np.ndarray:
    """Return each prompt's mean of `best_of_n_kl_given` over what Best-of-n serves of M ≥ n samples, shape (P,).

    ``log_probabilities_PM`` are the samples' own, in nats, under the policy that drew them. Every sample counts with
    the probability that it is the best of n, so that the mean is unbiased for the estimator's over all draws. Raises
    DataError for other shapes and for fewer samples than n, and as `best_of_n_kl_given`.
    """
    if rewards_PM.shape != log_probabilities_PM.shape:
        raise DataError(
            f"rewards {rewards_PM.shape} and log-probabilities {log_probabilities_PM.shape} "
            "must both be prompts × samples"
        )
    kl_PM = best_of_n_kl_given(log_probabilities_PM, n)
    return np.asarray((BestOfN(n).weights(rewards_PM) * kl_PM).sum(axis=1))


def of_best(procedure: BestOfN | WorstOfN, n: int) -> BestOfN | OrderStatistics:
    """Return what ``procedure`` serves, as one procedure, of a policy that itself serves the best of ``n`` draws.

    Best-of-N of Best-of-n is Best-of-Nn. Worst-of-N serves the worst of the bests of N groups of n: it is below the
    j-th smallest of the Nn draws unless each group has one of the others, which inclusion and exclusion count.

    >>> of_best(WorstOfN(2), 2).name
    'worst-of-2 of best-of-2'
    """
    if isinstance(procedure, BestOfN):
        return BestOfN(procedure.n * n)
    groups, draws = procedure.n, procedure.n * n
    none_within = [  # of the groups within the j smallest draws; exact, since the terms cancel
        sum((-1) ** k * comb(groups, k) * comb(draws - n * k, j - n * k) for k in range(min(groups, j // n) + 1))
        / comb(draws, j)
        for j in range(draws + 1)
    ]
    probabilities = 0.0 - np.diff(none_within)
    name = f"{procedure.name} of best-of-{n}"
    return OrderStatistics(name, tuple(float(q) for q in probabilities))


def largest_n(recipe: Recipe) -> int:
    """Return the largest n for which the reference has samples; below 2 there is nothing to compare."""
    return recipe.evaluate.samples // 2 // extreme_procedure(recipe).n


def serve_best_of_n(
    evaluated: Evaluated, n: int, served: Sequence[Any]
) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
    """Return the estimated KL (P,) of Best-of-n to the reference, and its win rates by judge and procedure.

    Served by a procedure that is not extreme, it is served once.
    """
    logprobs, samples = drawn(evaluated.folder / "reference" / "samples", "logprob"), range(evaluated.samples)
    logprobs_PM = np.array([[logprobs[one, index] for index in samples] for one in evaluated.prompt_ids])
    reward = evaluated.column("reference", "reward")
    kl = best_of_n_kl(reward, logprobs_PM, n)
    half = reward.shape[1] // 2
    wins: dict[str, dict[str, np.ndarray]] = {}
    for judge in evaluated.sources:
        judged = evaluated.column("reference", judge)
        ours, base = (Samples(reward[:, part], judged[:, part]) for part in (slice(half), slice(half, None)))
        inner = [of_best(p, n) if isinstance(p, BestOfN | WorstOfN) else BestOfN(n) for p in served]
        names = (procedure.name for procedure in served)
        wins[judge] = dict(zip(names, win_rates_of(ours, base, inner, served), strict=True))
    return kl, wins
