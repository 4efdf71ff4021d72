"""Commands that say what theory expects: curves, and the choice of a transformation."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from infalign.cli.options import WHOLE, AsJson, BaseName, new_file, open_console, print_json
from infalign.core.display import heading, percent, plain_table, printable, say
from infalign.core.errors import ConfigError, InfalignError

if TYPE_CHECKING:
    from infalign.theory.choose import Ranking
    from infalign.theory.curve import Point

CURVE_EPILOGUE = """\
Examples:
  infalign curve --procedure best-of-4 --transform exp:10 --kl 1
  infalign curve --procedure best-of-4 --transform identity \\
    --transform exp:10 --transform optimal --sweep
  infalign curve --procedure worst-of-4 --transform exp:-10 --beta 0.01 --json

Win rates are against the base policy, ties count half, and KL is in nats. β is
the paper's, for unnormalized Φ (e^{10u} for exp:10); trainers with normalized Φ
take the other one. `optimal` is the best policy for the procedure at that KL or
β: the paper's bon_fp for best-of-N, won_fp for worst-of-N.
--json has all digits and `error`, their bound.
"""
CHOOSE_EPILOGUE = """\
Example:
  infalign choose --procedure best-of-32 --kl 0.5 --rollouts 100
prints `transform` and `kl_budget` for a policy of a recipe. --output FILE.json
writes the transformation for `transform: FILE.json`, which one without a name
(an optimum) needs.

With K rollouts, ranks have a resolution of 1/K. What that costs lies between two
limits: a policy that memorizes the ranks of each prompt learns their noise
(simulated, ± one standard error); a network that generalizes learns their mean,
a smoother transformation (exact). Behind: the distance to the best under the
worse limit. The recommendation is the simplest transformation whose distance
exceeds the smallest by at most two standard errors, or by 0.1 % of 1 − W.
"""
ProcedureName = Annotated[
    str, Parameter(help="How both policies are served: best-of-4, worst-of-4, 2nd-best-of-8, rewind:0.85:32, ...")
]


def curve(
    *,
    procedure: ProcedureName,
    transform: Annotated[list[str], Parameter(help="identity, log, exp:10, power:7, FILE.json, optimal. Repeatable.")],
    kl: Annotated[list[float] | None, Parameter(help="KL budget in nats. Repeatable.")] = None,
    beta: Annotated[list[float] | None, Parameter(help="The paper's β, instead of --kl. Repeatable.")] = None,
    sweep: Annotated[bool, Parameter(help="25 budgets from 0.01 to 5 nats, instead of --kl.")] = False,
    base: BaseName = None,
    as_json: AsJson = False,
) -> None:
    """Show the win rate, KL and β of transformations."""
    from infalign.method.procedures import parse_procedure
    from infalign.theory import curve as theory

    if (kl is not None) + (beta is not None) + sweep != 1:
        raise ConfigError("give --kl, --beta or --sweep")
    served, theirs = parse_procedure(procedure), parse_procedure(base) if base else None
    points: list[Point] = []
    notes: list[InfalignError | str] = []
    budgets = [{name: one} for name, values in (("kl", kl), ("beta", beta)) for one in dict.fromkeys(values or [])]
    for aim in [theory.parse_transform_or_optimum(name) for name in dict.fromkeys(transform)]:
        try:
            if sweep:
                swept, ended = theory.sweep(served, aim, base=theirs)
                points += swept
                notes += [f"{swept[-1].transform} ends at {swept[-1].kl:.3g} nats: {ended}"] if ended else []
            for budget in budgets:
                points.append(theory.curve_point(served, aim, **budget, base=theirs))
        except InfalignError as error:  # the other transformations are shown first
            notes.append(error)
    failure = next((note for note in reversed(notes) if isinstance(note, InfalignError)), None)
    for note in notes:
        if note is not failure:
            print(f"infalign: {printable(str(note))}", file=sys.stderr)
    if failure and not points:
        raise failure
    if as_json:
        records = [point.as_dict() for point in points]
        print_json(records if sweep or len(records) > 1 else records[0])
    else:
        _print_points(points, open_console())
    if failure:
        raise failure


def choose(
    *,
    procedure: ProcedureName,
    kl: Annotated[float, Parameter(help="KL budget in nats.")],
    rollouts: Annotated[int, WHOLE, Parameter(help="K, the number of reference rollouts per prompt.")],
    base: BaseName = None,
    output: Annotated[Path | None, Parameter(help="Write the recommended transformation to FILE.json.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rank transformations by what they achieve with K rollouts per prompt."""
    from infalign.core.storage import write_text
    from infalign.method.procedures import parse_procedure
    from infalign.method.transforms import Tabulated
    from infalign.theory.choose import choose as choose_transform

    file = new_file(output, ".json") if output else None
    served, theirs = parse_procedure(procedure), parse_procedure(base) if base else None
    ranking = choose_transform(served, kl=kl, rollouts=rollouts, base=theirs)
    if file:
        best = ranking.recommended.transform
        write_text(file, best.to_json() if isinstance(best, Tabulated) else json.dumps({"name": best.name}) + "\n")
    if as_json:
        print_json(ranking.as_dict())
    else:
        _print_ranking(ranking, file, open_console())


def _print_points(points: "list[Point]", console: Console) -> None:
    """Print a row for each point; draws of Rewind-and-Repeat, and errors above 1e-9, have columns of their own."""
    first, rough = points[0], any(point.error > 1e-9 for point in points)
    columns = ["transform", "KL,\nnats", "β of\nraw Φ", "β of nor-\nmalized Φ", "win\nrate, %", "standard\nwin rate, %"]
    table = plain_table(*columns, *["draws"] * (first.draws is not None), *["error"] * rough, breaking=[0])
    for point in points:
        cells = [f"{point.kl:.4g}", f"{point.beta:.5g}", f"{point.normalized_beta:.5g}"]
        cells += [percent(point.win_rate), percent(point.standard_win_rate)]
        cells += [] if point.draws is None else [f"{point.draws:.2f}"]
        table.add_row(point.transform, *cells, *[f"{point.error:.0e}"] * rough)
    served = "alike" if first.base == first.procedure else f"as {first.base}"
    heading(console, f"{first.procedure} against the base policy served {served}")
    console.print(table)
    if first.base_draws is not None:
        say(console, f"The base policy needs {first.base_draws:.2f} samples.", wrap=True)
    if rough:
        say(console, "error: numerical error bound of KL and win rates (as fractions); usually 1e-12", wrap=True)


def _print_ranking(ranking: "Ranking", file: Path | None, console: Console) -> None:
    """Print a row for each candidate, and what to write into a recipe."""
    against = "" if ranking.base == ranking.procedure else f" against {ranking.base}"
    setting = f"{ranking.procedure}{against} at a KL of {ranking.kl:g} nats, {ranking.rollouts} rollouts per prompt"
    heading(console, f"{setting}: win rate, %")
    columns = ["transform", *["memorizes"] * bool(ranking.prompts), "generalizes", "exact ranks", "behind,\npoints"]
    table = plain_table(*columns, breaking=[0])
    for one in ranking.candidates:
        cells = [f"{percent(one.memorizing)} ± {100 * one.standard_error:.2g}"] if one.memorizing is not None else []
        error = f" ± {100 * one.behind_error:.1g}" if one.behind_error else ""
        cells += [percent(one.generalizing), percent(one.limit), f"{100 * one.behind:.2g}{error}"]
        table.add_row(one.transform.name, *cells)
    console.print(table)
    simulated = f"± one standard error over {ranking.prompts} simulated prompts, the same for all candidates"
    unknown = "For this procedure, the win rate of a policy that memorizes ranks is not known."
    say(console, simulated if ranking.prompts else unknown, wrap=True)
    for name, reason in ranking.left_out.items():
        say(console, f"left out: {name}: {reason}")
    best, ties = ranking.recommended, sum(one.ties for one in ranking.candidates)
    named = not best.transform.name.startswith("optimal:")
    said = f", the simplest of {ties} equally good" if ties > 1 else ""
    say(console, f"\nRecommended: {best.transform.name}{said}")
    say(console, f"  transform: {best.transform.name if named else file or 'FILE.json'}")
    say(console, f"  kl_budget: {ranking.kl:g}")
    if file and named:
        say(console, f"{file} holds the same transformation; a recipe accepts either.")
    elif not (file or named):
        say(console, "This transformation has no name: write it to a file with --output FILE.json.")
