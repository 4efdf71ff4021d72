"""The table rows of a report, and its short form for the terminal."""

from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from infalign.core.display import amount, gain, heading, in_points, plain_table, say, share
from infalign.report.results import Results, read_results
from infalign.report.verdict_text import ROUNDING, verdict


def print_table(root: Path, console: Console) -> None:
    """Print a finished run: each policy by each judge, the comparison at one KL, verdict, ranks, report's path."""
    results = read_results(root)
    if "pass_at_k" in results:
        spent = ", ".join(f"{name} {amount(policy['kl'], 3)}" for name, policy in results["policies"].items())
        print_pass_at_k(results, console, evaluated(results), f"KL, nats: {spent}")
    if not checker_only(results):
        print_win_rates(results, console)
    for sentence in ("", *verdict(results)):
        say(console, sentence, wrap=True)
    say(console, f"\nReport: {root / 'report.html'}")


def checker_only(results: Results) -> bool:
    """Return whether a checker is the only judge: pass@k then says what win rates would, and more."""
    return "pass_at_k" in results and results["judges"] == ["reward"] and results["truth"]["threshold"] is None


def evaluated(results: Results) -> str:
    """Return on what a run was evaluated."""
    return f"{results['prompts']} test prompts × {results['samples']} samples, {results['confidence']:.0%} intervals"


def print_win_rates(results: Results, console: Console) -> None:
    """Print each policy's win rates by each judge, and the comparison at one KL."""
    procedure = results["procedure"]
    ways = dict.fromkeys((procedure, "standard"))
    table = plain_table("policy", "judged by", "KL, nats", *(f"{way}, %" for way in ways))
    for name, policy in results["policies"].items():
        for judge, wins in policy["win_rates"].items():
            first = judge == results["judges"][0]
            served = (share(wins[way]) for way in ways)
            table.add_row(name if first else "", judge, amount(policy["kl"]) if first else "", *served)
        table.add_section()
    heading(console, "Win rate against the reference, both served the same way", evaluated(results))
    console.print(table)
    if (rows := comparison_rows(results)) and (matched := results["matched"]):
        theory = ["theory"] if matched["theory"] else []
        table = plain_table("judged by", "trained on", f"{procedure}, %", *theory, "gain, points")
        for row in rows:
            judge = row["judge"] if row["first"] else ""
            method = f"{row['method']}{' *' if row['down'] else ''}"
            table.add_row(judge, method, row["wins"], *(row[column] for column in theory), row["gain"])
            if row["last"]:
                table.add_section()
        heading(console, f"Gain of {matched['first']} over the others at the same KL, {matched['kl']:.2f} nats")
        console.print(table)
        if any(row["down"] for row in rows):
            say(console, "* not bracketed: all its policies spent more; extrapolated down to this KL")


def print_pass_at_k(results: Results, console: Console, *about: str) -> None:
    """Print pass@k of each policy and of the reference, below lines ``about`` them."""
    rates, ks = results["pass_at_k"], shown_ks(results)
    table = plain_table("policy", *(f"pass@{k}, %" for k in ks))
    for name, by_k in rates.items():
        table.add_row(name, *(share(by_k[k]) for k in ks))
    table.add_section()
    for pair, leads in differences(results).items():
        table.add_row(pair, *(leads[k] for k in ks))
    title = f"The probability that at least one of k responses is right, by the {results['truth']['by']}"
    heading(console, title, *about)
    console.print(table)


def shown_ks(results: Results) -> list[str]:
    """Return the k of pass@k in short tables: 1, what is served, and the largest; none if no pass@k is known."""
    every = list(results.get("pass_at_k", {}).get("reference", ()))
    return [k for k in dict.fromkeys(("1", results["procedure"].split("-")[-1], *every[-1:])) if k in every]


def differences(results: Results) -> dict[str, dict[str, str]]:
    """Return by how many points pass@k differs between every two policies at one KL, by pair and k.

    The pair says at which KL, or what the two spend where they are not comparable.
    """
    rows: dict[str, dict[str, str]] = {}
    for first, other in combinations(results["policies"] if "pass_at_k" in results else (), 2):
        leads = {k: rate["over"][other] for k, rate in results["pass_at_k"][first].items()}
        lead, spent = leads["1"], [results["policies"][name]["kl"]["mean"] for name in (first, other)]
        at = f"not comparable: {spent[0]:.2g} and {spent[1]:.2g} nats" if lead is None else f"at {lead['kl']:.2g} nats"
        at = at if max(spent) >= ROUNDING else "both are the reference"
        rows[f"{first} − {other}, {at}"] = {k: "–" if e is None else gain(e) for k, e in leads.items()}
    return rows


def comparison_rows(results: Results) -> list[dict[str, Any]]:
    """Return the rows of the comparison at one KL, judge by judge; none for a single method.

    Theory's win rates are for the reward itself as judge, so only the rows of that judge have them. A method that spent
    more than this KL with every policy says so, and whether it is brought ``down`` to this KL or not compared.
    """
    if results["matched"] is None:
        return []
    matched, rows = results["matched"], []
    first, outside = matched["first"], matched["not_bracketed"]
    for judge, comparison in matched["judges"].items():
        methods = list(dict.fromkeys([*comparison["win_rates"], *outside]))
        for i, method in enumerate(methods):
            compared = method in comparison["win_rates"]
            said = "extrapolated from" if compared else "not compared: at least"
            theory = matched["theory"].get(method) if judge == "reward" else None
            first_theory, over = matched["theory"].get(first), comparison["gain_over"].get(method)
            rows.append(
                {
                    "judge": judge,
                    "first": i == 0,
                    "last": i == len(methods) - 1,
                    "method": method,
                    "outside": f"{said} {outside[method]:.2f} nats" if method in outside else "",
                    "down": method in outside and compared,
                    "wins": share(comparison["win_rates"][method]) if compared else "–",
                    "theory": "" if theory is None else f"{100 * theory:.1f}",
                    "gain": "" if over is None else gain(over),
                    "theory_gain": ""
                    if over is None or theory is None or first_theory is None
                    else in_points(first_theory - theory),
                }
            )
    return rows
