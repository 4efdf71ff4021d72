"""Print how often 95 % intervals over prompts cover the truth, beside scipy's percentile and BCa bootstraps.

    python benchmarks/interval_coverage.py

Each law is a population of prompts whose policies differ in strength, 12 samples a side; an interval is asked for from
20, 50 or 200 prompts drawn from it. The percentile bootstrap is too narrow for few prompts, and near 100 % all
bootstraps are, also ours without the end of the range in view (`estimate`). Outcomes of one comparison a prompt are 0
or 1. Length-controlled win rates come from judges that are swayed by length as the model says. The last columns have
the mean width of our interval relative to that of `estimate`. Exits with 1 if an interval of ours for at least 50
prompts covers less than 93 % or more than 97 %, or near the end, for any number of prompts, less than 94 %. Values that
are no shares, and rare differences, are covered in 93 % or more also from 20.
An argument gives the number of simulations instead of 2000.
"""

import sys
from functools import partial

import numpy as np
from scipy.stats import bootstrap

from infalign.evaluation.intervals import estimate, estimate_difference, estimate_share
from infalign.evaluation.length import length_controlled
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import prompt_win_rates
from infalign.method.procedures import BestOfN, Procedure, Standard, WorstOfN

POPULATION, SAMPLES = 40_000, 12
SIMULATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
SIZES = 20, 50, 200
LAWS: dict[str, tuple[Procedure, float, float]] = {  # procedure, median strength, spread of log strength
    "standard": (Standard(), 1.5, 0.5),
    "best-of-4, close": (BestOfN(4), 1.5, 0.7),
    "best-of-4, far": (BestOfN(4), 6.0, 0.7),
    "worst-of-4": (WorstOfN(4), 2.0, 0.7),
}
NEAR_THE_END: dict[str, tuple[Procedure, float, float]] = {
    "worst-of-4, long tail": (WorstOfN(4), 5.0, 0.9),
    "worst-of-4, 98.6 %": (WorstOfN(4), 15.0, 0.9),
    "worst-of-4, 99 %": (WorstOfN(4), 12.5, 0.7),
}
ANYWHERE = {  # laws of values that are no shares, and their means
    "log-normal": (lambda rng, size: rng.lognormal(size=size), np.exp(0.5)),
    "Student's t3": (lambda rng, size: rng.standard_t(3, size=size), 0.0),
}
RARE = {"differences, 3 % and 1 %": (0.03, 0.01), "differences, 5 % and 0": (0.05, 0.0)}  # of prompts won and lost
OUTCOMES = 0.9, 0.98, 0.995  # the share of prompts that are won outright, the others lost


def population(procedure: Procedure, strength: float, spread: float) -> np.ndarray:
    """Return the estimated win rate of each prompt of a population."""
    rng = np.random.default_rng(0)
    strengths = strength * np.exp(spread * rng.normal(size=(POPULATION, 1)))
    u, v = rng.random((POPULATION, SAMPLES)) ** (1 / strengths), rng.random((POPULATION, SAMPLES))
    return prompt_win_rates(Samples(u, u), Samples(v, v), procedure)


def swayed(prompts: int, rng: np.random.Generator) -> np.ndarray:
    """Return the values at equal length where the judge prefers the longer response and policies differ."""
    better = 0.5 + 0.5 * rng.normal(size=(prompts, 1))
    longer = [(rng.random((prompts, SAMPLES)) < share).astype(float) for share in (0.7, 0.4)]
    policy, base = (
        score + long + rng.gumbel(size=long.shape) for score, long in zip((better, 0.0), longer, strict=True)
    )
    return length_controlled([(Samples(policy, policy, longer[0]), Samples(base, base, longer[1]))], Standard())


def outcomes(won: float) -> np.ndarray:
    """Return the outcome of one comparison for each prompt of a population."""
    return (np.arange(POPULATION) < won * POPULATION).astype(float)


def ours(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return our interval."""
    interval = estimate_share(values, seed=seed)
    return interval.low, interval.high


def unbounded(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return our interval for values that may lie anywhere."""
    interval = estimate(values, seed=seed)
    return interval.low, interval.high


def theirs(values: np.ndarray, seed: int, method: str) -> tuple[float, float]:
    """Return scipy's interval."""
    if np.ptp(values) == 0.0:  # BCa has none
        return values[0], values[0]
    found = bootstrap((values,), np.mean, n_resamples=1000, method=method, rng=np.random.default_rng(seed))
    return found.confidence_interval


def main() -> int:
    """Simulate, print and judge."""
    rng = np.random.default_rng(1)
    ways = {
        "percentile": partial(theirs, method="percentile"),
        "BCa": partial(theirs, method="BCa"),
        "unbounded": unbounded,
        "ours": ours,
    }
    print(f"{'':<24}{'mean':>7}{'prompts':>9}" + "".join(f"{way:>12}" for way in ways) + f"{'width':>12}")
    good = True
    populations = {name: population(*law) for name, law in (LAWS | NEAR_THE_END).items()}
    populations |= {f"won outright, {won:.1%}": outcomes(won) for won in OUTCOMES}
    for name, values in populations.items():
        for size in SIZES:
            draws = [rng.choice(values, size) for _ in range(SIMULATIONS)]
            covered, width = {}, {}
            for way, interval in ways.items():
                intervals = np.array([interval(draw, seed=seed) for seed, draw in enumerate(draws)])
                covered[way] = np.mean((intervals[:, 0] <= values.mean()) & (values.mean() <= intervals[:, 1]))
                width[way] = np.mean(intervals[:, 1] - intervals[:, 0])
            cells = "".join(f"{c:>12.1%}" for c in covered.values()) + f"{width['ours'] / width['unbounded']:>12.2f}"
            print(f"{name:<24}{values.mean():>7.1%}{size:>9}{cells}", flush=True)
            if name in LAWS:
                good &= size < 50 or 0.93 <= covered["ours"] <= 0.97
            else:
                good &= covered["ours"] >= 0.94
    truth = swayed(POPULATION, rng).mean()
    for size in SIZES:
        found = [estimate(swayed(size, rng), seed=seed) for seed in range(1000)]
        share = np.mean([interval.low <= truth <= interval.high for interval in found])
        print(f"{'at equal length':<24}{truth:>7.1%}{size:>9}{'':>24}{share:>12.1%}")
        good &= size < 50 or 0.93 <= share <= 0.97
    for size in (20, 80):
        for name, (draw, truth) in ANYWHERE.items():
            found = [estimate(draw(rng, size), seed=seed) for seed in range(SIMULATIONS)]
            share = np.mean([interval.low <= truth <= interval.high for interval in found])
            print(f"{name:<24}{truth:>7.2f}{size:>9}{'':>24}{share:>12.1%}", flush=True)
            good &= share >= 0.93
        for name, (won, lost) in RARE.items():
            draws = rng.choice([1.0, -1.0, 0.0], (SIMULATIONS, size), p=[won, lost, 1 - won - lost])
            found = [estimate_difference(draw, seed=seed) for seed, draw in enumerate(draws)]
            share = np.mean([interval.low <= won - lost <= interval.high for interval in found])
            print(f"{name:<24}{won - lost:>7.1%}{size:>9}{'':>36}{share:>12.1%}", flush=True)
            good &= share >= 0.93
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
