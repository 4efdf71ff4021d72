"""The sentences and table rows of a report, and its short form for the terminal."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from infalign.display import amount, gain, heading, in_points, plain_table, say, share
from infalign.runs.results import read_results

Numbers = dict[str, Any]
SPOKEN = {"reward": "the reward itself", "judge": "the judge", "gold": "the gold"}


def print_table(root: Path, console: Console) -> None:
    """Print the numbers of a finished run: each policy by each judge, the comparison at one KL, the report's path."""
    results = read_results(root)
    procedure = results["procedure"]
    spent = f"{results['prompts']} test prompts × {results['samples']} samples, {results['confidence']:.0%} intervals"
    table = plain_table("policy", "judged by", "KL, nats", "standard, %")
    if procedure != "standard":
        table.add_column(f"{procedure}, %", no_wrap=True)
    for name, policy in results["policies"].items():
        for judge, wins in policy["win_rates"].items():
            first = judge == results["judges"][0]
            served = [wins["standard"], wins[procedure]][: 1 + (procedure != "standard")]
            table.add_row(name if first else "", judge, amount(policy["kl"]) if first else "", *map(share, served))
        table.add_section()
    heading(console, "Win rate against the reference, both served alike", spent)
    console.print(table)
    if rows := comparison_rows(results):
        matched = results["matched"]
        table = plain_table("judged by", "trained on", f"{procedure}, %", "theory", "gain, points")
        for row in rows:
            judge = row["judge"] if row["first"] else ""
            method = f"{row['method']}{' *' if row['outside'] else ''}"
            table.add_row(judge, escape(method), row["wins"], row["theory"], row["gain"])
            if row["last"]:
                table.add_section()
        title = f"Gain of {matched['first']} over the others at the same KL, {matched['kl']:.2f} nats"
        heading(console, escape(title))
        console.print(table)
        if outside := matched["not_bracketed"].values():
            least = f"{min(outside):.2f} nats"
            say(console, f"* not bracketed: it spent more, at least {least}; brought down to this KL")
    say(console, f"\nReport: {root / 'report.html'}", markup=False)


def verdict(results: Numbers) -> list[str]:
    """Return the outcome in sentences: each policy against the reference, methods at one KL, what stays uncertain."""
    procedure, matched, unseen = results["procedure"], results["matched"], results["judges"][1:]
    sentences = [f"Policy and reference are both served as {procedure}."]
    ways = ("finds {} better than the reference", "finds {} worse than the reference")
    unclear = "sees {} differ from the reference, but the interval includes 50%"
    for judge in unseen:
        wins = {name: policy["win_rates"][judge][procedure] for name, policy in results["policies"].items()}
        said = {f"{name} with {share(e).replace(' ', '% ', 1)}": e for name, e in wins.items()}
        sentences += _sorted_by_outcome(judge, said, 0.5, (*ways, unclear))
    if matched:
        first, theory = matched["first"], matched["theory"]
        gains = {judge: found["gain_over"] for judge, found in matched["judges"].items()}
        sentences.append(f"At the same KL of {matched['kl']:.2f} nats, {first} is compared with the others.")
        compared = matched["judges"]["reward"]["win_rates"]
        sentences += [
            f"{method} is left out: it spent {most:.2g} nats at most; train it for longer or at a higher learning rate."
            for method, most in matched["left_out"].items()
        ]
        sentences += [
            f"{method} is not compared: its smallest KL is {least:.2f} nats; give it a smaller budget."
            for method, least in matched["not_bracketed"].items()
            if method not in compared
        ]
        ways = ("finds it better than {}", "finds it worse than {}")
        unclear = "sees it differ from {}, but the interval includes zero"
        for judge in unseen:
            said = {f"{other} by {_gain_in_points(e)}": e for other, e in gains[judge].items()}
            sentences += _sorted_by_outcome(judge, said, 0.0, (*ways, unclear))
        for other, e in gains["reward"].items():
            known = first in theory and other in theory
            promised = f"; theory gives {in_points(theory[first] - theory[other])}" if known else ""
            sentences.append(
                f"By the reward that both were trained on, it gains {_gain_in_points(e)} over {other}{promised}."
            )
    sentences.append(
        f"The {results['confidence']:.0%} intervals are over test prompts; "
        "training from another seed would add a spread that one run cannot show."
    )
    return sentences


def _sorted_by_outcome(
    judge: str, said: Mapping[str, Mapping[str, float]], level: float, ways: tuple[str, str, str]
) -> list[str]:
    """Return one sentence each for the intervals above ``level``, below it, and around it."""
    groups: tuple[list[str], list[str], list[str]] = ([], [], [])
    for words, e in said.items():
        groups[0 if e["low"] > level else 1 if e["high"] < level else 2].append(words)
    subject = SPOKEN[judge].capitalize()
    return [f"{subject} {way.format(_listed(group))}." for way, group in zip(ways, groups, strict=True) if group]


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _gain_in_points(e: Mapping[str, float]) -> str:
    return gain(e).replace(" ", " points ", 1)


def comparison_rows(results: Numbers) -> list[Numbers]:
    """Return the rows of the comparison at one KL, judge by judge; none for a single method.

    Theory's win rates are for the reward itself as judge, so only the rows of that judge have them. A method that spent
    more than this KL with every policy says so.
    """
    if results["matched"] is None:
        return []
    matched, rows = results["matched"], []
    first, outside = matched["first"], matched["not_bracketed"]
    for judge, found in matched["judges"].items():
        methods = list(dict.fromkeys([*found["win_rates"], *outside]))
        for i, method in enumerate(methods):
            theory = matched["theory"].get(method) if judge == "reward" else None
            first_theory, over = matched["theory"].get(first), found["gain_over"].get(method)
            rows.append(
                {
                    "judge": judge,
                    "first": i == 0,
                    "last": i == len(methods) - 1,
                    "method": method,
                    "outside": f"not bracketed: at least {outside[method]:.2f} nats" if method in outside else "",
                    "wins": share(found["win_rates"][method]) if method in found["win_rates"] else "–",
                    "theory": "" if theory is None else f"{100 * theory:.1f}",
                    "gain": "" if over is None else gain(over),
                    "theory_gain": ""
                    if over is None or None in (theory, first_theory)
                    else in_points(first_theory - theory),
                }
            )
    return rows
