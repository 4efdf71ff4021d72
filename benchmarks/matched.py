"""What a comparison at one KL makes of policies that know ranks through noise only (`benchmarks/noise.py`).

``python benchmarks/matched.py`` brings identity to 0.33 nats, Best-of-4, and takes it from exp:10 measured there:
identity measured at 1.25 nats alone, which is refused, and at 0.25 and 1.25. The last column is what a constant share
of theory's gain would have said from 1.25 alone. Some twenty seconds.
"""

import numpy as np
from noise import N, win_rate

from infalign import BestOfN, law_at_kl
from infalign.report.equal_kl import is_comparable, matched  # whose interpolation is measured

KL, SPENT = 0.33, (0.25, 1.25)


def gain(kl: float) -> float:
    """Return theory's gain of the identity."""
    return law_at_kl("identity", kl=kl).win_rate(BestOfN(N)) - 0.5


def main() -> None:
    """Print a row for each correlation."""
    print("| ρ | true difference | from 1.25 nats | from 0.25 and 1.25 nats | constant share |")
    print("|---|---|---|---|---|")
    for rho in (0.9, 0.7, 0.5):
        identity = {kl: win_rate(rho, "identity", kl) for kl in (KL, *SPENT)}
        aware = win_rate(rho, "exp:10", KL)
        budgets = [(np.full(2, kl), np.full(2, identity[kl])) for kl in SPENT]
        assert not is_comparable(SPENT[1:], KL)
        found = matched(budgets, KL, gain)
        ends = sorted(100 * (aware - found.values.mean() - shift) for shift in (0.0, found.shift))
        held = 0.5 + (identity[SPENT[1]] - 0.5) / gain(SPENT[1]) * gain(KL)
        both = f"{100 * (aware - found.values.mean()):+.2f} ({ends[0]:+.2f} to {ends[1]:+.2f})"
        print(f"| {rho} | {100 * (aware - identity[KL]):+.2f} | refused | {both} | {100 * (aware - held):+.1f} |")


if __name__ == "__main__":
    main()
