"""What theory promises to a policy that knows ranks through noise only.

``python benchmarks/noise.py`` prints the Best-of-4 win rate of identity and exp:10 at a KL, and the share of theory's
gap between identity and optimum that exp:10 then captures (`infalign compare`; 0: the identity's that knows all, 1: the
optimum). The policy sees s = ρz + √(1 − ρ²)ε with z the normal score of the rank u and ε standard normal, and is
∝ exp(E[Φ(u) | s]/β), what regression on Φ gives with infinite data. ρ = 1 is the theory itself. A few seconds.
"""

import numpy as np
from scipy.optimize import brentq
from scipy.special import softmax
from scipy.stats import norm

from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN
from infalign.method.transforms import Identity, parse_transform
from infalign.theory.finite_model import FiniteModel
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal

CELLS = 2000  # of equal chance, for s and for z
N = 4
RANKS = (np.arange(CELLS) + 0.5) / CELLS
MODEL = FiniteModel(np.full(CELLS, 1 / CELLS), RANKS)


def main() -> None:
    """Print a row for each correlation and KL."""
    print("| ρ | KL, nats | identity, % | exp:10, % | difference, points | share of the gap |")
    print("|---|---|---|---|---|---|")
    for rho in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        ranks_given_signal = seen(rho)
        for kl in (0.25, 0.5, 1.0):
            plain, aware = (win_rate(ranks_given_signal, name, kl) for name in ("identity", "exp:10"))
            zero, one = law_at_kl(Identity(), kl=kl).win_rate(BestOfN(N)), optimal(BestOfN(N), kl=kl).win_rate
            share = (aware - zero) / (one - zero)
            print(
                f"| {rho} | {kl} | {100 * plain:.1f} | {100 * aware:.1f} | {100 * (aware - plain):+.1f} | {share:.2f} |"
            )


def seen(rho: float) -> Array:
    """Return the chance of each cell of z given each cell of s, shape (CELLS, CELLS)."""
    if rho == 1.0:
        return np.eye(CELLS)
    score = norm.ppf(RANKS)
    return softmax(norm.logpdf(score, rho * score[:, None], np.sqrt(1 - rho**2)) - norm.logpdf(score), axis=1)


def win_rate(ranks_given_signal: Array, transform: str, kl: float) -> float:
    """Return the Best-of-N win rate of the policy that spends ``kl`` nats."""
    phi = parse_transform(transform)(RANKS)
    expected = ranks_given_signal @ (phi / np.ptp(phi))

    def policy(log_beta: float) -> Array:
        return softmax(expected / np.exp(log_beta))

    log_beta = brentq(lambda log_beta: MODEL.kl(policy(log_beta)) - kl, -8.0, 8.0)
    return MODEL.win_rate(policy(log_beta) @ ranks_given_signal, BestOfN(N))


if __name__ == "__main__":
    main()
