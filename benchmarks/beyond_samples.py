"""Print how often the limits hold of pass@k beyond the samples, of clusters, and of what training is worth.

    python benchmarks/beyond_samples.py

From populations of rates, 20 to 500 prompts are drawn many times; "beta fit" is the bias of a beta-binomial on
infinitely many. What training for Best-of-8 is worth is found by bisection for the population. Exits with 1 if an
interval covers less than 93 % by more than three standard errors. An argument gives the number of simulations instead
of 100, whose standard error is 2.2.
"""

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import expit, logit, rel_entr
from scipy.stats import beta, betabinom, binom

from infalign import Measuring, RewardTable, measure, training_worth

POPULATION = 2000
SIMULATIONS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
SIZES, SAMPLES, KLS = (20, 100, 500), (4, 16, 64), (0.1, 0.3)
N = 8
HEAD = f"{'truth':>8}{'bias':>8}{'covers':>9}{'low':>8}{'high':>8}"
Ends = tuple[float | None, float, float]  # mean, low, high


def populations() -> dict[str, np.ndarray]:
    """Return the rates of the prompts of each population."""
    u = (np.arange(POPULATION) + 0.5) / POPULATION

    return {
        "Beta(.4, 1.6)": beta.ppf(u, 0.4, 1.6),
        "Beta(.4, .8)": beta.ppf(u, 0.4, 0.8),
        "a fifth at 0": np.where(np.arange(POPULATION) % 5 == 0, 0.0, beta.ppf(u, 0.8, 1.2)),
        "easy": beta.ppf(u, 30.0, 0.5),
        "three rates": np.select([u < 0.5, u < 0.75], [0.01, 0.1], 0.8),
        "0 or .9": np.where(u < 0.2, 0.0, 0.9),
        "0 or .03": np.where(u < 0.9, 0.0, 0.03),
    }


def beta_fit(rates: np.ndarray, n: int, k: int) -> float:
    """Return pass@k by the beta-binomial that is nearest to the law of the counts."""
    counts = np.arange(n + 1)
    law = binom.pmf(counts[:, None], n, rates).mean(axis=1)
    fit = minimize(
        lambda x: -law @ betabinom.logpmf(counts, n, *np.exp(np.clip(x, -5, 7))), [0.0, 0.0], method="Powell"
    )
    return 1.0 - betabinom.pmf(0, k, *np.exp(np.clip(fit.x, -5, 7)))


class Shown:
    """Prints rows and keeps the lowest coverage."""

    lowest = 1.0

    def row(self, name: str, truth: float, ends: list[Ends], more: str = "", *, judged: bool = True) -> None:
        """Print the truth, bias of the mean, coverage and mean limits of simulations."""
        means = [mean for mean, _, _ in ends if mean is not None]
        low, high = np.array([(low, high) for _, low, high in ends]).T
        covered = np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high))  # a truth of 1 is summed with rounding
        bias = f"{100 * (np.mean(means) - truth):+8.1f}" if means else f"{'–':>8}"
        limits = f"{100 * low.mean():8.1f}{100 * high.mean():8.1f}"
        print(f"{name:<48}{100 * truth:8.1f}{bias}{covered:9.1%}{limits}{more}", flush=True)
        self.lowest = min(self.lowest, covered) if judged else self.lowest


def rewards(right: np.ndarray, samples: np.ndarray) -> list[np.ndarray]:
    """Return the rewards of prompts with so many right responses of so many samples."""
    return [(np.arange(n) < c).astype(float) for c, n in zip(right, np.broadcast_to(samples, right.shape), strict=True)]


def ends(found: Mapping[str, Any]) -> Ends:
    """Return a mean and its limits."""
    return found["mean"], found["low"], found["high"]


def beyond(shown: Shown, rng: np.random.Generator) -> None:
    """Measure pass@2n and pass@8n of n samples."""
    print(f"{'pass@k beyond n samples':<48}{HEAD}{'beta fit':>10}")
    for name, rates in populations().items():
        for n in SAMPLES:
            for prompts in SIZES:
                metrics, found = [f"pass@{2 * n}", f"pass@{8 * n}"], []
                for _ in range(SIMULATIONS):
                    drawn = rng.choice(rates, prompts)
                    found.append(measure(rewards(rng.binomial(n, drawn), n), metrics))
                for i, k in enumerate((2 * n, 8 * n)):
                    truth = (1.0 - (1.0 - rates) ** k).mean()
                    fit = f"{100 * (beta_fit(rates, n, k) - truth):+10.1f}"
                    limits = [ends(one[i]) for one in found]
                    shown.row(f"{name}, n = {n}, {prompts} prompts, k = {k}", truth, limits, fit)


def clusters(shown: Shown, rng: np.random.Generator) -> None:
    """Measure pass@1 and pass@16 where 1 to 8 prompts have one problem's rate, easy problems more of them."""
    print(f"\n{'clusters of 1 to 8 prompts, n from 4 to 16':<48}{HEAD}")
    rates = rng.beta(0.4, 1.6, 200_000)
    size = rng.integers(1, np.where(rates > 0.3, 9, 4))
    for problems in (20, 100):
        one: dict[str, list[Ends]] = {"pass@1, prompts alone": [], "pass@1": [], "pass@16": []}
        for _ in range(SIMULATIONS):
            some = rng.integers(rates.size, size=problems)
            labels = np.repeat(np.arange(problems), size[some])
            n = rng.choice([4, 8, 16], labels.size)
            right = rewards(rng.binomial(n, rates[some][labels]), n)
            problem_of = [[label] * len(row) for label, row in zip(labels, right, strict=True)]
            table = RewardTable.of(
                right, problem_of
            )  # the column of answers has the problems, which measuring may name
            one["pass@1, prompts alone"].append(ends(measure(table, ["pass@1"])[0]))
            near, far = measure(table, ["pass@1", "pass@16"], Measuring(cluster="answer"))
            one["pass@1"].append(ends(near))
            one["pass@16"].append(ends(far))
        for name, limits in one.items():
            value = 1.0 - (1.0 - rates) ** (16 if name == "pass@16" else 1)
            shown.row(f"{problems} problems, {name}", value @ size / size.sum(), limits, judged="alone" not in name)


def limit(rates: np.ndarray, responses: int, trained: int, kl: float) -> float:
    """Return pass@N at a mean KL of policies that optimize pass@``trained`` by (c + ½)/(K + 1)."""
    counts = np.arange(responses + 1)
    chances = binom.pmf(counts[:, None], responses, rates) / rates.size
    taken = logit((counts + 0.5) / (responses + 1.0))

    def at(log_beta: float) -> tuple[float, float]:
        low, high = taken, taken + trained * np.exp(-log_beta)
        for _ in range(60):  # logit q = taken + n(1 − q)^(n − 1)/β
            middle = (low + high) / 2.0
            more = taken + trained * expit(-middle) ** (trained - 1) * np.exp(-log_beta) > middle
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        q = expit(logit(rates) + (low - taken)[:, None])
        kl = rel_entr(q, rates) + rel_entr(1.0 - q, 1.0 - rates)
        return (chances * (1.0 - (1.0 - q) ** N)).sum(), (chances * kl).sum()

    return at(brentq(lambda x: at(x)[1] - kl, -10.0, 8.0) if at(-10.0)[1] > kl else -10.0)[0]


def trained(shown: Shown, rng: np.random.Generator) -> None:
    """Measure what training is worth for Best-of-8."""
    print(f"\n{'worth of training for best-of-8':<48}{HEAD}")
    for name, rates in list(populations().items())[:4]:
        for responses in (8, 16, 32, 64):
            for prompts in (20, 200):
                found = []
                for _ in range(SIMULATIONS):
                    right = rng.binomial(responses, rng.choice(rates, prompts))
                    found.append(training_worth(rewards(right, responses), N, KLS))
                for i, kl in enumerate(KLS):
                    ordinary, law = (limit(rates, responses, n, kl) for n in (1, N))
                    for what, truth in (("ordinary", ordinary), ("law", law), ("difference", law - ordinary)):
                        limits = [ends(one[i][what]) for one in found]
                        shown.row(f"{name}, K = {responses}, {prompts} prompts, {kl} nats, {what}", truth, limits)


if __name__ == "__main__":
    shown, rng = Shown(), np.random.default_rng(1)
    for simulate in (beyond, clusters, trained):
        simulate(shown, rng)
    sys.exit(int(shown.lowest < 0.93 - 3.0 * np.sqrt(0.93 * 0.07 / SIMULATIONS)))
