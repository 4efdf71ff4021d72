"""Print how often 95 % intervals over prompts cover the truth, beside scipy's BCa bootstrap.

    python benchmarks/interval_coverage.py

Each law is a population of prompts, or their paired differences between two policies, from which 20 or 80 prompts are
drawn many times. For win rates, policies differ in strength from prompt to prompt, 12 samples a side. For checked
answers, each prompt has its own probability of a right one, 32 samples, and four wrong answers share the rest. Outcomes
of one comparison are 0 or 1. Length-controlled win rates come from judges that are swayed by length as the model says.
Widths are means, in points. Exits with 1 if an interval of ours covers less than 93 %. An argument gives the number of
simulations instead of 250, whose standard error is 1.4 points.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import expit, logit
from scipy.stats import bootstrap

from infalign import (
    BestOfN,
    Estimate,
    Metric,
    Samples,
    WorstOfN,
    estimate,
    estimate_difference,
    estimate_share,
    length_controlled,
    parse_procedure,
    win_rates_of,
)

POPULATION, SAMPLES = 20_000, 12
CHECKED_POPULATION, CHECKED = 3000, 32  # maj@k takes 2 ms per prompt
SIMULATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 250
SIZES = 20, 80
STRENGTHS: dict[str, tuple[Any, float, float]] = {  # procedure, median strength, spread of log strength
    "standard": (parse_procedure("standard"), 1.5, 0.5),
    "best-of-4, close": (BestOfN(4), 1.5, 0.7),
    "best-of-4, far": (BestOfN(4), 6.0, 0.7),
    "worst-of-4": (WorstOfN(4), 2.0, 0.7),
    "worst-of-4, long tail": (WorstOfN(4), 5.0, 0.9),
    "worst-of-4, 98.6 %": (WorstOfN(4), 15.0, 0.9),
    "worst-of-4, 99 %": (WorstOfN(4), 12.5, 0.7),
}
OUTCOMES = 0.9, 0.98, 0.995  # the share of prompts that are won outright, the others lost
RATES = {"hard": (0.4, 1.6), "easy": (3.0, 0.5)}  # of right responses, beta distributed over prompts
METRICS = "avg@1", "pass@8", "pass@32", "pass^8", "maj@8"
SHIFT = 0.4  # of the logit of the rate, from one policy to the other
RARE = {"3 % won, 1 % lost": (0.03, 0.01), "5 % won, none lost": (0.05, 0.0)}

Law = tuple[Callable[..., Estimate], np.ndarray]


def win_rates(procedure: Any, strengths_P: np.ndarray, seed: int) -> np.ndarray:
    """Return the estimated win rate of each prompt of a population, against a base that is the same for all seeds."""
    base = np.random.default_rng(0).random((POPULATION, SAMPLES))
    policy = np.random.default_rng(seed).random((POPULATION, SAMPLES)) ** (1 / strengths_P[:, None])
    return win_rates_of(Samples(policy, policy), Samples(base, base), [procedure])[0]


def checked(rates_P: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return the metrics of each prompt of a population."""
    right = rng.random((len(rates_P), CHECKED)) < rates_P[:, None]
    answers = np.where(right, 0, rng.integers(1, 5, right.shape))
    return {name: Metric.parse(name).of_prompts(right, answers) for name in METRICS}


def laws(rng: np.random.Generator) -> dict[str, Law]:
    """Return the interval and the population of each law."""
    found: dict[str, Law] = {}
    for name, (procedure, strength, spread) in STRENGTHS.items():
        strengths_P = strength * np.exp(spread * rng.normal(size=POPULATION))
        wins = win_rates(procedure, strengths_P, 1)
        found[name] = estimate_share, wins
        found[f"{name}, paired"] = estimate_difference, win_rates(procedure, 1.3 * strengths_P, 2) - wins
    for won in OUTCOMES:
        found[f"won outright, {won:.1%}"] = estimate_share, (np.arange(POPULATION) < won * POPULATION).astype(float)
    for kind, of in RATES.items():
        rates_P = rng.beta(*of, CHECKED_POPULATION)
        policy, other = checked(rates_P, rng), checked(expit(logit(rates_P) + SHIFT), rng)
        for name in METRICS:
            found[f"{kind}, {name}"] = estimate_share, policy[name]
            found[f"{kind}, {name}, paired"] = estimate_difference, other[name] - policy[name]
    for name, (won, lost) in RARE.items():
        share = np.arange(POPULATION) / POPULATION
        found[name] = estimate_difference, (share < won) * 1.0 - (share >= 1 - lost)
    found["log-normal"] = estimate, rng.lognormal(size=POPULATION)
    found["Student's t3"] = estimate, rng.standard_t(3, size=POPULATION)
    return found


def swayed(prompts: int, rng: np.random.Generator) -> np.ndarray:
    """Return the values at equal length where the judge prefers the longer response and policies differ."""
    better = 0.5 + 0.5 * rng.normal(size=(prompts, 1))
    longer = [(rng.random((prompts, SAMPLES)) < share).astype(float) for share in (0.7, 0.4)]
    policy, base = (
        score + long + rng.gumbel(size=long.shape) for score, long in zip((better, 0.0), longer, strict=True)
    )
    return length_controlled(
        [(Samples(policy, policy, longer[0]), Samples(base, base, longer[1]))], parse_procedure("standard")
    )


def bca(values: np.ndarray, seed: int) -> tuple[float, float]:
    """Return scipy's interval."""
    if np.ptp(values) < 1e-12:  # BCa has none
        return values[0], values[0]
    rng = np.random.default_rng(seed)
    return bootstrap((values,), np.mean, n_resamples=1000, method="BCa", rng=rng).confidence_interval


def main() -> int:
    """Simulate, print and judge."""
    rng, worst = np.random.default_rng(1), 1.0
    print(f"{'':<32}{'mean':>8}{'prompts':>9}{'BCa':>8}{'width':>8}{'ours':>8}{'width':>8}")

    def show(name: str, truth: float, size: int, interval: Callable[..., Estimate], draws: list[np.ndarray]) -> None:
        nonlocal worst
        found = [interval(draw, seed=seed) for seed, draw in enumerate(draws)]
        cells = ""
        for ends in ([bca(draw, seed) for seed, draw in enumerate(draws)], [(one.low, one.high) for one in found]):
            low, high = np.array(ends).T
            covered = np.mean((low <= truth) & (truth <= high))
            cells += f"{covered:>8.1%}{100 * np.mean(high - low):>8.2f}"
        print(f"{name:<32}{truth:>8.3f}{size:>9}{cells}", flush=True)
        worst = min(worst, covered)

    for name, (interval, values) in laws(rng).items():
        for size in SIZES:
            draws = [rng.choice(values, size) for _ in range(SIMULATIONS)]
            show(name, values.mean(), size, interval, draws)
    truth = swayed(POPULATION, rng).mean()
    for size in SIZES:
        show("at equal length", truth, size, estimate, [swayed(size, rng) for _ in range(SIMULATIONS)])
    return int(worst < 0.93)


if __name__ == "__main__":
    sys.exit(main())
