"""Print how often 95 % intervals over prompts cover the truth, beside scipy's percentile and BCa bootstraps.

    python benchmarks/coverage.py

Each law is a population of prompts whose policies differ in strength, 12 samples a side; an interval is asked for from
20, 50 or 200 prompts drawn from it. The percentile bootstrap is too narrow for few prompts. The last law, with a
longer tail than a win rate should have, shows where ours ends. Length-controlled win rates come from judges that are
swayed by length as the model says. Exits with 1 if an interval of ours for at least 50 prompts covers less than 93 % or
more than 97 %.
"""

import sys
from functools import partial

import numpy as np
from scipy.stats import bootstrap

from infalign.evaluation.intervals import estimate
from infalign.evaluation.length import length_controlled
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates
from infalign.method.procedures import BestOfN, Procedure, Standard, WorstOfN

POPULATION, SAMPLES, SIMULATIONS = 40_000, 12, 2000
SIZES = 20, 50, 200
LAWS: dict[str, tuple[Procedure, float, float]] = {  # procedure, median strength, spread of log strength
    "standard": (Standard(), 1.5, 0.5),
    "best-of-4, close": (BestOfN(4), 1.5, 0.7),
    "best-of-4, far": (BestOfN(4), 6.0, 0.7),
    "worst-of-4": (WorstOfN(4), 2.0, 0.7),
    "worst-of-4, long tail": (WorstOfN(4), 5.0, 0.9),
}


def population(procedure: Procedure, strength: float, spread: float) -> np.ndarray:
    """Return the estimated win rate of each prompt of a population."""
    rng = np.random.default_rng(0)
    strengths = strength * np.exp(spread * rng.normal(size=(POPULATION, 1)))
    u, v = rng.random((POPULATION, SAMPLES)) ** (1 / strengths), rng.random((POPULATION, SAMPLES))
    return win_rates(Samples(u, u), Samples(v, v), procedure)


def swayed(prompts: int, rng: np.random.Generator) -> np.ndarray:
    """Return the values at equal length where the judge prefers the longer response and policies differ."""
    better = 0.5 + 0.5 * rng.normal(size=(prompts, 1))
    longer = [(rng.random((prompts, SAMPLES)) < share).astype(float) for share in (0.7, 0.4)]
    policy, base = (
        score + long + rng.gumbel(size=long.shape) for score, long in zip((better, 0.0), longer, strict=True)
    )
    return length_controlled([(Samples(policy, policy, longer[0]), Samples(base, base, longer[1]))], Standard())


def ours(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return our interval."""
    interval = estimate(values, seed=seed)
    return interval.low, interval.high


def theirs(values: np.ndarray, seed: int, method: str) -> tuple[float, float]:
    """Return scipy's interval."""
    found = bootstrap((values,), np.mean, n_resamples=1000, method=method, rng=np.random.default_rng(seed))
    return found.confidence_interval


def main() -> int:
    """Simulate, print and judge."""
    rng = np.random.default_rng(1)
    ways = {"percentile": partial(theirs, method="percentile"), "BCa": partial(theirs, method="BCa"), "ours": ours}
    print(f"{'':<24}{'mean':>7}{'prompts':>9}" + "".join(f"{way:>12}" for way in ways))
    good = True
    for name, law in LAWS.items():
        values = population(*law)
        for size in SIZES:
            draws = [rng.choice(values, size) for _ in range(SIMULATIONS)]
            covered = {}
            for way, interval in ways.items():
                intervals = np.array([interval(draw, seed=seed) for seed, draw in enumerate(draws)])
                covered[way] = np.mean((intervals[:, 0] <= values.mean()) & (values.mean() <= intervals[:, 1]))
            print(f"{name:<24}{values.mean():>7.1%}{size:>9}" + "".join(f"{c:>12.1%}" for c in covered.values()))
            good &= size < 50 or 0.93 <= covered["ours"] <= 0.97
    truth = swayed(POPULATION, rng).mean()
    for size in SIZES:
        found = [estimate(swayed(size, rng), seed=seed) for seed in range(1000)]
        share = np.mean([interval.low <= truth <= interval.high for interval in found])
        print(f"{'at equal length':<24}{truth:>7.1%}{size:>9}{'':>12}{'':>12}{share:>12.1%}")
        good &= size < 50 or 0.93 <= share <= 0.97
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
