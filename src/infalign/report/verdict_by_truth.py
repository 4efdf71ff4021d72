"""The recommendation for a run whose reward is a checker and that serves the best of k: by pass@k."""

from typing import Any

from infalign.core.display import Estimate, gain, share

Numbers = dict[str, Any]


def verdict_by_truth(results: Numbers) -> list[str]:
    """Return paragraphs: the policy with the highest pass@k as served, its lead over the others, and its lead by k.

    Leads are paired by prompt. The policies may have spent different KL, so each is named with its own.
    """
    rates, policies, k = results["pass_at_k"], results["policies"], str(results["truth"]["served"])
    best = max(policies, key=lambda name: float(rates[name][k]["mean"]))
    over = rates[best][k]["over"]
    numbers = (
        f"pass@{k} is {_percent(rates[best][k])} for {best} and {_percent(rates['reference'][k])} for the reference"
    )
    if over["reference"]["low"] <= 0:
        return [f"Recommended: keep the reference. No policy is significantly better: {numbers}."]
    leads = [f"{_points(over[name])} over {name}, at {_nats(policies[name])}" for name in policies if name != best]
    ahead = {int(n): found["over"]["reference"] for n, found in rates[best].items()}
    peak, last = max(ahead, key=lambda n: float(ahead[n]["mean"])), max(ahead)
    behind = ", ".join(str(n) for n, lead in ahead.items() if lead["high"] < 0)
    by_k = (
        f"Its lead over the reference is {_points(ahead[1])} at pass@1, {_points(ahead[peak])} at pass@{peak} "
        f"(the largest), and {_points(ahead[last])} at pass@{last}."
    )
    spread = (
        f"The {results['confidence']:.0%} intervals are over test prompts and do not include the spread between "
        "training seeds."
    )
    return [
        f"Recommended: {best}. {numbers}, at a KL of {_nats(policies[best])}.",
        *([f"It leads by {'; '.join(leads)}."] if leads else []),
        f"{by_k} It is significantly lower at k = {behind}." if behind else by_k,
        spread,
    ]


def _nats(policy: Numbers) -> str:
    return f"{policy['kl']['mean']:.2f} nats"


def _percent(estimate: Estimate) -> str:
    return share(estimate).replace(" ", "% ", 1)


def _points(estimate: Estimate) -> str:
    return gain(estimate).replace(" ", " points ", 1)
