"""The recommendation for a run whose reward is a checker and that serves the best of k: by pass@k."""

from typing import Any

from infalign.core.display import gain_in_points, in_percent

Numbers = dict[str, Any]


def verdict_by_truth(results: Numbers) -> list[str]:
    """Return paragraphs: the policy with the highest pass@k as served, its lead over the others, and its lead by k.

    Leads are paired by prompt. The policies may have spent different KL, so each is named with its own.
    """
    rates, policies, k = results["pass_at_k"], results["policies"], str(results["truth"]["served"])
    best = max(policies, key=lambda name: float(rates[name][k]["mean"]))
    over = rates[best][k]["over"]
    numbers = (
        f"pass@{k} is {in_percent(rates[best][k])} for {best} and {in_percent(rates['reference'][k])} for the reference"
    )
    if over["reference"]["low"] <= 0:
        return [f"Recommended: keep the reference. No policy is significantly better: {numbers}."]
    others = (name for name in policies if name != best)
    leads = [f"{gain_in_points(over[name])} over {name}, at {_nats(policies[name])}" for name in others]
    ahead = {int(n): found["over"]["reference"] for n, found in rates[best].items()}
    peak = max(ahead, key=lambda n: float(ahead[n]["mean"]))
    shown = (f"{gain_in_points(ahead[n])} at pass@{n}" for n in sorted({1, peak, max(ahead)}))
    by_k = f"Its lead over the reference is {', '.join(shown)}; it is largest at pass@{peak}."
    behind = ", ".join(str(n) for n, lead in ahead.items() if lead["high"] < 0)
    return [
        f"Recommended: {best}. {numbers}, at a KL of {_nats(policies[best])}.",
        *([f"It leads by {'; '.join(leads)}."] if leads else []),
        f"{by_k} It is significantly lower at k = {behind}." if behind else by_k,
    ]


def _nats(policy: Numbers) -> str:
    return f"{policy['kl']['mean']:.2f} nats"
