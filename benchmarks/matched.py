"""What a comparison at one KL makes of policies that know ranks through noise only (`benchmarks/noise.py`).

``python benchmarks/matched.py`` brings identity, measured at 0.25 and 1.25 nats, to 0.33, Best-of-4, and takes it from
exp:10 measured there. The last column is what a constant share of theory's gain would have said from 1.25 alone, which
a comparison refuses. Some twenty seconds.
"""

import numpy as np
from noise import N, win_rate
from seeds import matched

from infalign import BestOfN, law_at_kl

KL, SPENT = 0.33, (0.25, 1.25)


def gain(kl: float) -> float:
    """Return theory's gain of the identity."""
    return law_at_kl("identity", kl=kl).win_rate(BestOfN(N)) - 0.5


def main() -> None:
    """Print a row for each correlation."""
    print("| ρ | true difference | from 0.25 and 1.25 nats | constant share |")
    print("|---|---|---|---|")
    for rho in (0.9, 0.7, 0.5):
        identity = {kl: win_rate(rho, "identity", kl) for kl in (KL, *SPENT)}
        aware = win_rate(rho, "exp:10", KL)
        budgets = [(np.full(2, kl), np.full(2, identity[kl])) for kl in SPENT]
        found = matched(budgets, KL, gain)
        ends = sorted(100 * (aware - found.values.mean() - shift) for shift in (0.0, found.shift))
        held = 0.5 + (identity[SPENT[1]] - 0.5) / gain(SPENT[1]) * gain(KL)
        both = f"{100 * (aware - found.values.mean()):+.2f} ({ends[0]:+.2f} to {ends[1]:+.2f})"
        print(f"| {rho} | {100 * (aware - identity[KL]):+.2f} | {both} | {100 * (aware - held):+.1f} |")


if __name__ == "__main__":
    main()
