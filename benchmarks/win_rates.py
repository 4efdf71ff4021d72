"""Print what the win-rate estimator saves: samples for an interval of ±1 point, and time and memory for every N.

    python benchmarks/win_rates.py

Samples: a policy of known law (exp:5 at a KL of 0.5 nats) and a base, all prompts alike; how many prompts, and how many
policy and base samples together, make the 95 % interval ±1 point, from the spread over 3,000 prompts. CPU time and
memory: Best-of-N for all
N ≤ M against the obvious NumPy broadcast and a plain Python loop, each in a process of its own; the loop does the first
prompts and one N, the rest is extrapolated. Exits with 1 if 1,000 × 100 × 100 takes more than a second, or M = 16·N
needs no fewer samples than one comparison a prompt or than 16 groups of N.
"""

import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from infalign import BestOfN, Exponential, Samples, law_at_kl, win_rates_of

PROMPTS, POINT = 3000, 0.01
SIZES = (1000, 100), (10_000, 256)
LOOPED = 3  # prompts of the plain loop
BROADCAST_GIB = 4  # a larger array of pairs is not tried


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


def broadcast(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the win rates of every N from an array of all pairs."""
    wins = win(u[:, :, None], v[:, None, :])
    weights = ((BestOfN(n).weights(u), BestOfN(n).weights(v)) for n in range(1, u.shape[1] + 1))
    return np.stack([((wins @ b[:, :, None])[:, :, 0] * a).sum(axis=1) for a, b in weights])


def loop(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the win rates at N = 4 of the first prompts, pair by pair."""
    a_PM, b_PM = (BestOfN(4).weights(side[:LOOPED]).tolist() for side in (u, v))
    rates = []
    for ours, theirs, a, b in zip(u[:LOOPED].tolist(), v[:LOOPED].tolist(), a_PM, b_PM, strict=True):
        total = 0.0
        for y, weight in zip(ours, a, strict=True):
            for z, other in zip(theirs, b, strict=True):
                total += weight * other * (1.0 if y > z else 0.5 if y == z else 0.0)
        rates.append(total)
    return np.array(rates)


def every_n(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return the win rates of every N by the library."""
    return win_rates_of(Samples(u, u), Samples(v, v), [BestOfN(n) for n in range(1, u.shape[1] + 1)])


WAYS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "ours": every_n,
    "broadcast": broadcast,
    "loop": loop,
}


def measure(way: str, prompts: int, samples: int) -> None:
    """Print seconds, the peak of the memory beyond the samples in MiB, and a win rate to compare."""
    u, v = drawn(prompts, samples)
    if way != "loop":  # whose small objects would be slowed down by the counting
        tracemalloc.start()
    started = time.process_time()
    found = WAYS[way](u, v)
    seconds = time.process_time() - started
    rate = found[0] if way == "loop" else found[3, 0]
    print(seconds, tracemalloc.get_traced_memory()[1] / 2**20, rate)


def time_and_memory() -> bool:
    """Print the table of the second part; return whether the smaller size took us at most a second."""
    quick = True
    for prompts, samples in SIZES:
        pairs = prompts * samples**2
        print(f"\n{prompts:,} prompts × {samples} × {samples}, Best-of-N for N = 1..{samples}")
        rates = set()
        for way in WAYS:
            if way == "broadcast" and 8 * pairs > BROADCAST_GIB * 2**30:
                print(f"{way:<10} not run: the pairs alone take {8 * pairs / 2**30:.1f} GiB")
                continue
            command = [sys.executable, __file__, way, str(prompts), str(samples)]
            seconds, mib, rate = map(float, subprocess.check_output(command, text=True).split())
            rates.add(round(rate, 10))
            if way == "loop":
                seconds *= prompts / LOOPED * samples
            print(f"{way:<10} {seconds:>12,.2f} s{'' if way == 'loop' else f'   {mib:>8,.0f} MiB'}")
            quick &= way != "ours" or prompts > 1000 or seconds <= 1.0
        assert len(rates) == 1
    return quick


def main() -> int:
    """Measure, print and judge."""
    if len(sys.argv) > 1:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
        return 0
    return int(not (samples_needed() & time_and_memory()))


if __name__ == "__main__":
    sys.exit(main())
