"""The outcome of a run in a few sentences: the recommendation, the gain over other methods, what next."""

from collections.abc import Iterator, Mapping, Sequence

from infalign.core.display import Interval, amount, gain_in_points, in_percent
from infalign.report.results import OfPolicy, Results, unseen
from infalign.training.solvers.base import KL_TOLERANCE

SPOKEN = {"reward": "the reward itself", "judge": "the judge", "gold": "the gold reward"}
ROUNDING = 1e-9  # nats, of a policy that is the reference
SHORT = 0.2  # of theory's gain over the reference: what is missing when training is what to improve


def verdict(results: Results) -> list[str]:
    """Return paragraphs: the recommendation, the gain over other methods, what to do next.

    They are by judges that trained none of the policies, if there are any.
    """
    spread = (
        f"The {results['confidence']:.0%} intervals are over test prompts and do not include the spread between "
        "training seeds. To train another seed: infalign run RECIPE --set seed=1 --set run_dir=…"
    )
    if "truth" in results and results["truth"]["served"]:
        return [*_by_truth(results), spread]
    judges, policies, served = unseen(results), results["policies"], results["procedure"]
    wins = {name: policies[name]["win_rates"][judges[0]][served] for name in _moved(policies) or policies}
    better = [name for name in wins if wins[name]["low"] > 0.5]
    best = max(better or wins, key=lambda name: float(wins[name]["mean"]))
    against_others = " ".join(_against_others(results, judges))
    said = _recommendation(results, best, judges), against_others, f"{_what_next(results, best, judges)} {spread}"
    return [paragraph for paragraph in said if paragraph]


def _moved(policies: Mapping[str, OfPolicy]) -> list[str]:
    """Return the policies that are not the reference; samples of the others lead it by chance alone."""
    return [name for name, policy in policies.items() if policy["kl"]["mean"] >= ROUNDING]


def _recommendation(results: Results, best: str, judges: Sequence[str]) -> str:
    procedure, policy = results["procedure"], results["policies"][best]
    first, *others = ((judge, policy["win_rates"][judge][procedure]) for judge in judges)
    more = "".join(f"; by {SPOKEN[judge]} {in_percent(wins)}" for judge, wins in others)
    judge, wins = first
    if wins["low"] <= 0.5 or best not in _moved(results["policies"]):
        return (
            f"Recommended: keep the reference. By {SPOKEN[judge]}, no policy is significantly better: {best} has a "
            f"{procedure} win rate of {in_percent(wins)}{more}."
        )
    spent = _spent(policy)
    of_budget = "" if spent is None else f" ({spent:.0%} of its budget)"
    means = [policy["win_rates"][judge][procedure]["mean"] for policy in results["policies"].values()]
    rank = f", the highest of {len(means)} policies" if len(means) > 1 and wins["mean"] == max(means) else ""
    return (
        f"Recommended: {best}. Its {procedure} win rate against the reference is {in_percent(wins)} by "
        f"{SPOKEN[judge]}{rank}, at a KL of {amount(policy['kl'])} nats{of_budget}{more}."
    )


def _spent(policy: OfPolicy) -> float | None:
    budget = policy["kl_budget"]
    return None if budget is None else policy["kl"]["mean"] / budget


def _against_others(results: Results, judges: Sequence[str]) -> Iterator[str]:
    """Yield what the first method gains, at one KL, over those that train on another transformation."""
    matched = results["matched"]
    if not matched:
        return
    first = matched["first"]
    trained = {policy["method"]: policy for policy in results["policies"].values()}
    others = [m for m in trained if trained[m]["transform"] != trained[first]["transform"]]
    alike = all(m == first.replace(trained[first]["transform"], trained[m]["transform"], 1) for m in others)
    called = {m: trained[m]["transform"] if alike else m for m in (first, *others)}
    at, subject = f"At the same KL of {matched['kl']:.2f} nats, by", f"training on {called[first]}"
    for judge in judges:
        gains = matched["judges"][judge]["gain_over"]
        over = {called[m]: gains[m] for m in others if m in gains}
        unclear = [f"{name}, {gain_in_points(e)}" for name, e in over.items() if e["low"] <= 0 <= e["high"]]
        ways = {
            "beats": [f"{name} by {gain_in_points(e)}" for name, e in over.items() if e["low"] > 0],
            "loses to": [f"{name} by {gain_in_points(e)}" for name, e in over.items() if e["high"] < 0],
            "is not significantly different from": unclear,
        }
        if said := [f"{way} {_listed(methods)}" for way, methods in ways.items() if methods]:
            yield f"{at} {SPOKEN[judge]}, {subject} {_listed(said)}."
            at, subject = "By", "it"
    compared = matched["judges"]["reward"]["win_rates"]
    for method, most in matched["left_out"].items():
        yield (f"{method} is left out: it spent at most {most:.2g} nats; train it longer or at a higher learning rate.")
    for method, least in matched["not_bracketed"].items():
        if method not in compared:
            yield (f"{method} is not compared because its smallest KL is {least:.2f} nats; give it a smaller budget.")


def _what_next(results: Results, best: str, judges: Sequence[str]) -> str:
    """Return what most limits the policy: the reward, what the training kept of theory, or the budget."""
    policy, procedure = results["policies"][best], results["procedure"]
    wins = policy["win_rates"]["reward"][procedure]
    learned = wins["low"] > 0.5  # else no reward model is to blame
    for judge in judges if learned else []:
        if judge != "reward" and policy["win_rates"][judge][procedure]["low"] <= 0.5:
            known = results["base"]["agreement"].get(judge)
            agrees = f"; the ranks of this one agree with {SPOKEN[judge]} at {amount(known)}" if known else ""
            return f"To improve: lower kl_budget, or use a better reward model{agrees}."
    more, spent = f"To improve: raise rollout.prompts. The win rate by the reward is {in_percent(wins)}", _spent(policy)
    larger = "To improve: raise kl_budget, with the same rollouts"
    if spent is not None and spent < 1 - KL_TOLERANCE:
        larger = f"To improve: spend the other {1 - spent:.0%} of kl_budget by training longer or at a higher rate"
    if policy["theory"] is None:
        return f"{larger}." if learned else f"{more}."
    promised = policy["theory"][procedure]
    if promised - wins["high"] > SHORT * (promised - 0.5):
        return f"{more}; theory allows {100 * promised:.1f}% at this KL."
    return f"{larger}. The policy is close to the theoretical optimum at this KL."


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _by_truth(results: Results) -> list[str]:
    """Return paragraphs where a checker says what is right: the policy with the highest pass@k, and its leads.

    A policy that another one leads at the same KL comes after it, also where it has spent more and so has more.
    """
    rates, policies, k = results["pass_at_k"], results["policies"], str(results["truth"]["served"])
    better = [name for name in _moved(policies) if rates[name][k]["over"]["reference"]["low"] > 0]

    def place(name: str) -> tuple[int, float]:
        return sum(bool(e and e["mean"] < 0) for e in rates[name][k]["over"].values()), -float(rates[name][k]["mean"])

    best = min(better or policies, key=place)
    numbers = (
        f"pass@{k} is {in_percent(rates[best][k])} for {best} at {_nats(policies[best])}, "
        f"{in_percent(rates['reference'][k])} for the reference"
    )
    if not better:
        return [f"Recommended: keep the reference. No policy is significantly better: {numbers}."]
    leads = {other: lead for other, lead in rates[best][k]["over"].items() if other != "reference"}
    apart = [f"{other} at {_nats(policies[other])}" for other, lead in leads.items() if lead is None]
    compared = [
        f"{best} − {other} at the same KL, {lead['kl']:.2g} nats: "
        + ", ".join(f"pass@{n} {_points(rates[best][n]['over'][other])}" for n in dict.fromkeys((k, "1")))
        + "."
        for other, lead in leads.items()
        if lead is not None
    ]
    behind = ", ".join(n for n, rate in rates[best].items() if rate["over"]["reference"]["high"] < 0)
    first = [f"{'Recommended' if compared or not leads else f'Highest pass@{k}'}: {best}. {numbers}."]
    first += [f"Not comparable with {_listed(apart)}."] if apart else []
    below = [f"{best} is significantly below the reference at k = {behind}."] if behind else []
    return [" ".join(first + compared), *below]


def _points(lead: Interval) -> str:
    return f"{gain_in_points(lead)}{', not significant' if lead['low'] <= 0 <= lead['high'] else ''}"


def _nats(policy: OfPolicy) -> str:
    return f"{policy['kl']['mean']:.2g} nats"
