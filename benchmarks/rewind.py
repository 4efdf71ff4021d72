"""Whether estimates for Rewind-and-Repeat are those of the exact law, and what one sample quantile makes of them.

``python benchmarks/rewind.py`` prints win rate, the policy's draws and the base's with their standard errors for
policies of known law, from samples of 4000 to 20,000 prompts: exact, with one sample quantile as the threshold, and as
estimated. Some twenty seconds.
"""

import numpy as np

from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import prompt_win_rates, rewind_draws
from infalign.method.procedures import RewindAndRepeat
from infalign.method.transforms import parse_transform
from infalign.theory.law import law_at_kl

SETTINGS = (  # procedure, samples a side, transformation, KL, prompts
    (RewindAndRepeat(0.85, 32), 64, "identity", 0.5, 4000),
    (RewindAndRepeat(0.85, 32), 64, "exp:10", 0.5, 4000),
    (RewindAndRepeat(0.85, 8), 24, "identity", 0.5, 20_000),
    (RewindAndRepeat(0.85, 8), 24, "exp:10", 1.5, 20_000),
)


def main() -> None:
    """Print three rows for each setting."""
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
            prompt_win_rates(policy, base, procedure),
            rewind_draws(policy, base, procedure),
            rewind_draws(base, base, procedure),
        )
        for way, numbers in (("one quantile", naive), ("estimated", found)):
            cells = (
                f"{x.mean():.{d}f} ± {x.std() / np.sqrt(prompts):.{d}f}"
                for x, d in zip(numbers, (4, 3, 3), strict=True)
            )
            print(f"| | | | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
