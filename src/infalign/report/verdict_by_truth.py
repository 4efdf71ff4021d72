"""The verdict on a run whose reward is a checker's and serves the best of k: pass@k."""

from typing import Any

from infalign.core.display import Estimate, gain, share

Numbers = dict[str, Any]


def verdict_by_truth(results: Numbers) -> list[str]:
    """Return in a few paragraphs which policy answers best as it is served, its lead over the others, and at which k.

    Leads are paired by prompt. The policies may have spent different KL, so each is named with its own.
    """
    rates, policies, k = results["pass_at_k"], results["policies"], str(results["truth"]["served"])
    best = max(policies, key=lambda name: float(rates[name][k]["mean"]))
    over = rates[best][k]["over"]
    numbers = (
        f"pass@{k} is {_percent(rates[best][k])} for {best} and {_percent(rates['reference'][k])} for the reference"
    )
    if over["reference"]["low"] <= 0:
        return [f"Keep the reference: no policy is sure to beat it. {numbers}."]
    leads = [
        f"{_points(over[name])} over {name}, which spent {_nats(policies[name])}" for name in policies if name != best
    ]
    ahead = {int(n): found["over"]["reference"] for n, found in rates[best].items()}
    peak, last = max(ahead, key=lambda n: float(ahead[n]["mean"])), max(ahead)
    behind = ", ".join(str(n) for n, lead in ahead.items() if lead["high"] < 0)
    by_k = (
        f"It leads the reference by {_points(ahead[1])} at pass@1, most at pass@{peak}, by {_points(ahead[peak])}, "
        f"and by {_points(ahead[last])} at pass@{last}."
    )
    spread = (
        f"The {results['confidence']:.0%} intervals are over test prompts; training from another seed would add a "
        "spread that one run cannot show."
    )
    return [
        f"Use {best}: {numbers}. It spent {_nats(policies[best])}.",
        *([f"It leads by {'; '.join(leads)}."] if leads else []),
        f"{by_k} It is behind at k = {behind}." if behind else by_k,
        spread,
    ]


def _nats(policy: Numbers) -> str:
    return f"{policy['kl']['mean']:.2f} nats"


def _percent(estimate: Estimate) -> str:
    return share(estimate).replace(" ", "% ", 1)


def _points(estimate: Estimate) -> str:
    return gain(estimate).replace(" ", " points ", 1)
