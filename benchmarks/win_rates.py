"""Print how many samples the win-rate estimator saves for an interval of ±1 point: ``python benchmarks/win_rates.py``.

A policy of known law (exp:5 at a KL of 0.5 nats) and a base, all prompts alike; how many prompts, and how many policy
and base samples together, make the 95 % interval ±1 point, from the spread over 3,000 prompts. Exits with 1 if
M = 16·N needs no fewer samples than one comparison a prompt or than 16 groups of N.
"""

import sys

import numpy as np

from infalign import BestOfN, Exponential, Samples, law_at_kl, win_rates_of

PROMPTS, POINT = 3000, 0.01


def drawn(prompts: int, samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return calibrated rewards of a policy and of the base."""
    rng = np.random.default_rng(0)
    law = law_at_kl(Exponential(5.0), kl=0.5)
    u = np.interp(rng.random((prompts, samples)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
    return u, rng.random((prompts, samples))


def win(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return 1 where the first is larger, 1/2 for a tie, else 0."""
    return (1.0 + np.sign(ours - theirs)) / 2.0


def needed(values: np.ndarray) -> float:
    """Return the prompts for ±1 point."""
    return values.var(ddof=1) * (1.96 / POINT) ** 2


def samples_needed() -> bool:
    """Print prompts and samples for ±1 point; return whether ours are fewer than of the other ways."""
    fewer = True
    for n in (4, 32):
        print(f"Best-of-{n:<27}{'samples a side':>16}{'prompts':>10}{'samples':>10}")
        u, v = drawn(PROMPTS, 16 * n)
        best_u, best_v = (side.reshape(PROMPTS, 16, n).max(axis=2) for side in (u, v))
        rows = [
            ("one comparison a prompt", n, needed(win(best_u[:, 0], best_v[:, 0]))),
            ("16 groups of N, compared in turn", 16 * n, needed(win(best_u, best_v).mean(axis=1))),
        ]
        for m in (2 * n, 4 * n, 16 * n):
            few = [Samples(side[:, :m], side[:, :m]) for side in (u, v)]
            rows += [("ours", m, needed(win_rates_of(*few, [BestOfN(n)])[0]))]
        for way, m, prompts in rows:
            print(f"{way:<35}{m:>16}{prompts:>10,.0f}{2 * m * prompts:>10,.0f}")
        totals = [m * prompts for _, m, prompts in rows]
        fewer &= totals[-1] < min(totals[:2])
    return fewer


if __name__ == "__main__":
    sys.exit(not samples_needed())
