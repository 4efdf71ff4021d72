"""Whether estimates for Rewind-and-Repeat are those of the exact law, and what one sample quantile makes of them.

``python benchmarks/rewind.py`` prints win rate, the policy's draws and the base's with their standard errors for
policies of known law, from samples of 4000 to 20,000 prompts: exact, with one sample quantile as the threshold, and as
estimated. Then, without sampling, the bias of the estimates: the expectation over the ranks of the thresholds, by
quadrature, less the exact value. A minute.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import beta

from infalign import RewindAndRepeat, Samples, law_at_kl, parse_procedure, parse_transform, rewind_draws, win_rates_of

SETTINGS = (  # procedure, samples a side, transformation, KL, prompts
    (RewindAndRepeat(0.85, 32), 64, "identity", 0.5, 4000),
    (RewindAndRepeat(0.85, 32), 64, "exp:10", 0.5, 4000),
    (RewindAndRepeat(0.85, 8), 24, "identity", 0.5, 20_000),
    (RewindAndRepeat(0.85, 8), 24, "exp:10", 1.5, 20_000),
)
BIASES = (  # procedure, of the base where it is another, references, transformation at 0.5 nats
    ("rewind:0.85:8", None, 12, "identity"),
    ("rewind:0.85:8", None, 16, "exp:10"),
    ("rewind:0.85:8", "best-of-4", 16, "identity"),
    ("rewind:0.85:8", "best-of-4", 32, "identity"),
    ("rewind:0.85:32", None, 32, "identity"),
    ("rewind:0.85:32", "standard", 32, "exp:10"),
    ("rewind:0.95:16:best", None, 32, "exp:10"),
)


def threshold_weights(references: int, procedure: RewindAndRepeat) -> np.ndarray:
    """Return the weight of each of the sorted references as a threshold, by the draws that passing it saves, N − 1."""
    rewards_PM = np.tile(np.arange(references), (references + 1, 2))
    between_PM = np.tile(np.arange(references + 1)[:, None] - 0.5, procedure.n)  # of prompt p all are below reference p
    draws = rewind_draws(Samples(between_PM, between_PM), Samples(rewards_PM, rewards_PM), procedure)
    return -np.diff(draws) / (procedure.n - 1)


def biases(procedure: RewindAndRepeat, base: Any, references: int, law: Any) -> tuple[float, float]:
    """Return the bias of the win rate, and of the policy's draws, if the base compares with the same threshold."""
    x, weight = np.polynomial.legendre.leggauss(400)
    ranks, total = (x + 1.0) / 2.0, np.zeros(2)
    at_rank = [
        (law.win_rate(one, base or one), float(law.draws(one)))
        for one in (replace(procedure, quantile=float(rank)) for rank in ranks)
    ]
    weights = threshold_weights(references, procedure)
    for i in np.flatnonzero(weights):
        total += weights[i] * (weight / 2.0 * beta.pdf(ranks, i + 1, references - i)) @ np.array(at_rank)
    win_rate, draws = total - (law.win_rate(procedure, base), float(law.draws(procedure)))
    return win_rate, draws


def main() -> None:
    """Print three rows for each setting, and the biases."""
    rng = np.random.default_rng(0)
    print("| served | samples | Φ | | win rate | policy's draws | base's draws |")
    print("|---|---|---|---|---|---|---|")
    for procedure, samples, name, kl, prompts in SETTINGS:
        law = law_at_kl(parse_transform(name), kl=kl)
        u = np.interp(rng.random((prompts, samples)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
        v = rng.random((prompts, samples))
        policy, base = Samples(u, u), Samples(v, v)
        first = f"| {procedure.name} | {samples} | {name}, {kl} nats"
        base_draws = float(procedure.expected_draws(procedure.quantile))
        print(f"{first} | exact | {law.win_rate(procedure):.4f} | {law.draws(procedure):.3f} | {base_draws:.3f} |")
        half = samples // 2
        at, rest = np.quantile(v[:, :half], procedure.quantile, axis=1, method="weibull"), v[:, half:]
        a, b = procedure.weights(u, at), procedure.weights(rest, at)
        wins = np.array([a[p] @ (u[p][:, None] > rest[p]) @ b[p] for p in range(prompts)])
        naive = wins, procedure.draws(u, at), procedure.draws(rest, at)
        found = (
            win_rates_of(policy, base, [procedure])[0],
            rewind_draws(policy, base, procedure),
            rewind_draws(base, base, procedure),
        )
        for way, numbers in (("one quantile", naive), ("estimated", found)):
            cells = (
                f"{x.mean():.{d}f} ± {x.std() / np.sqrt(prompts):.{d}f}"
                for x, d in zip(numbers, (4, 3, 3), strict=True)
            )
            print(f"| | | | {way} | {' | '.join(cells)} |")
    print(
        "\n| served | base served | references | Φ at 0.5 nats | bias of the win rate, points | of the policy's draws |"
    )
    print("|---|---|---|---|---|---|")
    for name, other, references, phi in BIASES:
        law, rewind = law_at_kl(parse_transform(phi), kl=0.5), parse_procedure(name)
        win_rate, draws = biases(rewind, parse_procedure(other) if other else None, references, law)
        print(
            f"| {name} | {other or 'alike'} | {references} | {phi} | {100 * win_rate:+.2f} | {draws:+.3f} |", flush=True
        )


if __name__ == "__main__":
    main()
