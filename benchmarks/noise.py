"""What theory promises to a policy that knows ranks through noise only (`rank_correlation`).

``python benchmarks/noise.py`` prints the Best-of-4 win rate of identity and exp:10 at a KL, and the share of theory's
gap between identity and optimum that exp:10 then captures (0: the identity's that knows all, 1: the optimum). A few
seconds.
"""

from rank_correlation import law_at_rank_correlation

from infalign import BestOfN, law_at_kl, parse_transform, rank_optimum

N = 4


def main() -> None:
    """Print a row for each correlation and KL."""
    print("| ρ | KL, nats | identity, % | exp:10, % | difference, points | share of the gap |")
    print("|---|---|---|---|---|---|")
    for rho in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        for kl in (0.25, 0.5, 1.0):
            plain, aware = (win_rate(rho, name, kl) for name in ("identity", "exp:10"))
            zero, one = law_at_kl("identity", kl=kl).win_rate(BestOfN(N)), rank_optimum(BestOfN(N), kl=kl).win_rate
            share = (aware - zero) / (one - zero)
            print(
                f"| {rho} | {kl} | {100 * plain:.1f} | {100 * aware:.1f} | {100 * (aware - plain):+.1f} | {share:.2f} |"
            )


def win_rate(rho: float, transform: str, kl: float) -> float:
    """Return the Best-of-N win rate of the policy that knows ranks with correlation ``rho`` and spends ``kl`` nats."""
    return law_at_rank_correlation(parse_transform(transform), rho=rho, kl=kl).law.win_rate(BestOfN(N))


if __name__ == "__main__":
    main()
