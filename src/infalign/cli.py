"""The command line: parse, call one library function, write one output."""

import io
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from infalign.errors import ConfigError, InfalignError, PartialError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infalign.runs.recipe import Recipe
    from infalign.theory.choose import Ranking
    from infalign.theory.curve import Point

CONTINUES = "the same command continues where this one stopped"
HELP = """\
Align a language model for the way it is served: Best-of-N, Worst-of-N and other inference-time procedures.

Rewards are ranked among the reference policy's own rollouts, the rank is transformed for the procedure, and an \
ordinary RLHF solver does the rest.
"""
EPILOGUE = """\
Examples:
  infalign run recipes/demo.yaml --dry-run    check the data, show the plan
  infalign run recipes/demo.yaml              everything, from data to report
  infalign train recipes/demo.yaml            up to the policies, no evaluation
  infalign status runs/demo                   what is done, and why the rest is not
  infalign run recipes/demo.yaml --set rollout.k=128    more rollouts, none lost
  infalign choose --procedure best-of-32 --kl 0.5 --rollouts 100

The same command continues after a stop and, after a change, redoes what
depends on it. --debug, anywhere, shows where an error came from.

Exit codes: 0 done, 1 failed or run directory in use, 2 wrong usage, recipe or
model, 3 invalid data, 4 partial (run it again; of `status`: not all is done),
130 interrupted by SIGINT, 143 by SIGTERM, 141 by the end of a pipe.
"""
STATUS_EPILOGUE = """\
Examples:
  infalign status runs/demo
  infalign status recipes/demo.yaml --set rollout.k=128
  infalign status runs/demo || infalign run recipes/demo.yaml

done: a record says that it was made with these settings and inputs. stale: it
was made with others, and the reason is shown. partial: it was begun, and the
same command continues. missing: nothing is there. Another version of a
library is shown and undoes nothing.

Exit codes: 0 if all is done, 4 if not. Nothing is written and nobody is held
up; a run in progress may be looked at.
"""
CURVE_EPILOGUE = """\
Examples:
  infalign curve --procedure best-of-4 --transform exp:10 --kl 1
  infalign curve --procedure best-of-4 --transform identity \\
    --transform exp:10 --transform optimal --sweep --plot curves.svg
  infalign curve --procedure worst-of-4 --transform exp:-10 --beta 0.01 --json

The win rate is that of the aligned policy against the base policy, ties
counting one half; KL is in nats. β is the paper's, the weight of KL against
raw Φ (e^{10u} for exp:10); trainers whose Φ is normalised take the other one.
`optimal` is the best policy for the procedure at that KL or β.
--plot draws win rates against KL with --sweep, otherwise density and CDF of
the calibrated reward. --json has all digits and `error`, which bounds them.
"""
CHOOSE_EPILOGUE = """\
Example:
  infalign choose --procedure best-of-32 --kl 0.5 --rollouts 100
prints what to write for a policy of a recipe, `transform` and `beta`, and
writes the transformation to best-of-32-kl-0.5.json, which serves as
`transform: best-of-32-kl-0.5.json`.

Rewards are ranked among K rollouts, so a response can be told from others
only to 1/K: steep transformations lose more of what theory promises them.
Each is simulated on the same prompts (continuous rewards, KL spent on
average). ± is one standard error of the simulation. Of those that cannot be
told from the best, the simplest is recommended.
"""
HACKING_EPILOGUE = """\
Example:
  infalign reproduce hacking recipes/hh-helpful-tiny.yaml --phrase Sure

A phrase is put before the preferred responses of the training pairs, and for
the test before the responses that are not preferred. A reward model that
learned the phrase decides those pairs wrongly. Ranking its rewards among
rollouts can only turn decisions into ties, which count one half; a model that
is trained to predict ranks can do more, or less.
"""
COMPARE_EPILOGUE = """\
Examples:
  infalign compare recipes/demo.yaml
  infalign compare recipes/demo.yaml --methods qrpo,rloo,ipo --kl-budgets 0.5

Data, models, rollouts and calibration are the run's own and done once; a later
comparison trains only what is new. Numbers, tables and figures go to the
folder compare of the run directory; the run's own report does not change.

A method takes its fit from the recipe's first offline policy, or, if it
generates responses while it trains, from the first on-policy one; without one
it has 3 times the epochs and 2.5 times the learning rate of the offline fit.
bon-sft and bonbon have the n whose Best-of-n is nearest to the budget in KL.

Methods; those with a star are compared with the best of the others:
"""
ANALYTIC_EPILOGUE = """\
Example:
  infalign reproduce analytic --output figures

Win rate against KL, both policies served by standard sampling,
best-of-2, best-of-4, worst-of-2 or worst-of-4, for identity, log, four
exponentials and the optimum (the paper's fixed point).
"""
WIN_RATE_EPILOGUE = """\
Examples:
  infalign win-rate --policy p.parquet --base b.parquet --procedure best-of-4
  infalign win-rate --policy p.csv --base b.csv --procedure standard \\
    --procedure best-of-8 --procedure worst-of-8 --json

A row is one sampled response: prompt_id, reward, and optionally judge_reward,
which then decides who wins while reward selects what is served, and length in
tokens, which adds the win rate at equal length. Every sample is used for every
N, ties count one half, and intervals are over prompts. The base samples must
be fresh: not those that the rewards were calibrated with.
"""
STAGES = {
    "data": "Read and split the data, make the tokenizer.",
    "sft": "Fine-tune the policy on demonstrations: the reference.",
    "reward-model": "Fit the reward model and, on other rows, the judge.",
    "rollout": "Draw K responses to every training prompt.",
    "score": "Score the rollouts with the reward.",
    "calibrate": "Give every training prompt its reference_rewards.",
    "train": "Train the policies on calibrated, transformed rewards.",
    "evaluate": "Measure win rates and KL on fresh samples.",
    "report": "Write the report with its figures.",
}

app = App(
    name="infalign",
    help=HELP,
    help_format="plaintext",
    help_epilogue=EPILOGUE,
    version_flags=["--version"],
    group_commands=Group("The whole run", sort_key=0),
    suppress_keyboard_interrupt=False,
)

RecipePath = Annotated[str, Parameter(help="A recipe (YAML).")]
Overrides = Annotated[
    list[str] | None,
    Parameter(
        name="--set", help="Change a setting, e.g. --set rollout.k=16. Repeatable.", negative=(), show_default=False
    ),
]
SkipInvalid = Annotated[
    bool,
    Parameter(help="Leave out invalid rows, count and list them.", negative=(), show_default=False),
]
AsJson = Annotated[bool, Parameter(name="--json", help="Print JSON and nothing else.", negative=(), show_default=False)]


@app.command
def run(
    recipe: RecipePath,
    /,
    *,
    set_: Overrides = None,
    skip_invalid: SkipInvalid = False,
    dry_run: Annotated[
        bool,
        Parameter(help="Check recipe and data, print the plan, load no model.", negative=(), show_default=False),
    ] = False,
) -> None:
    """Run a recipe from data to report; done work is not repeated."""
    if dry_run:
        from infalign.runs.plan import print_plan

        print_plan(_recipe(recipe, set_, skip_invalid), _console())
        return
    root = _run_until("report", recipe, set_, skip_invalid)
    from infalign.runs.report.words import print_table

    print_table(root, _console())


@app.command(help_epilogue=STATUS_EPILOGUE)
def status(
    run: Annotated[str, Parameter(help="A run directory, or a recipe (YAML).")],
    /,
    *,
    set_: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Show what is done, what is not and why; exit code 4 if work is left."""
    from infalign.runs.status import print_status, recorded_recipe
    from infalign.runs.status import status as status_of

    found = status_of(recorded_recipe(Path(run), set_) if Path(run).is_dir() else _recipe(run, set_))
    if as_json:
        _print_json(found.as_dict())
    else:
        print_status(found, _console())
    if not found.done:
        sys.exit(PartialError.exit_code)


def _add_stage(stage: str, text: str, group: Group) -> None:
    def command(recipe: RecipePath, /, *, set_: Overrides = None, skip_invalid: SkipInvalid = False) -> None:
        _run_until(stage, recipe, set_, skip_invalid)

    command.__doc__ = f"{text}\n\nStages before it that are not done yet are done first."
    app.command(command, name=stage, group=group, sort_key=list(STAGES).index(stage))


_group = Group("Up to one stage, in this order", sort_key=1)
for _stage, _text in STAGES.items():
    _add_stage(_stage, _text, _group)


@app.command(group=Group("Several methods", sort_key=2), help_epilogue=COMPARE_EPILOGUE)
def compare(
    recipe: RecipePath,
    /,
    *,
    methods: Annotated[
        str | None,
        Parameter(help="qrpo,rloo,...; default: all that the recipe has settings for.", show_default=False),
    ] = None,
    kl_budgets: Annotated[str, Parameter(help="In nats, separated by commas.")] = "0.5,1",
    set_: Overrides = None,
) -> None:
    """Train several methods on the same rollouts, compare them at one KL."""
    try:
        budgets = [float(budget) for budget in kl_budgets.split(",")]
    except ValueError as error:
        raise ConfigError(f"--kl-budgets takes numbers such as 0.5,1, found {kl_budgets!r}") from error
    from infalign.experiments.compare import compare_methods
    from infalign.experiments.comparison_tables import print_methods
    from infalign.runs.lock import held

    settings, console = _recipe(recipe, set_), _console()
    chosen = methods.split(",") if methods is not None else None
    with held(Path(settings.run_dir)):
        results = compare_methods(settings, methods=chosen, budgets=budgets, console=console)
    print_methods(results, console)
    console.print(f"\nComparison: {Path(settings.run_dir) / 'compare'}", highlight=False, soft_wrap=True)


_theory = Group("Before a run: what theory says, in seconds and without data", sort_key=3)

ProcedureName = Annotated[
    str,
    Parameter(help="How policy and base are served: best-of-4, worst-of-4, 2nd-best-of-8, rewind:0.85:32, ..."),
]
BaseName = Annotated[str | None, Parameter(help="How the base is served, if otherwise.", show_default=False)]


@app.command(group=_theory, sort_key=0, help_epilogue=CURVE_EPILOGUE)
def curve(
    *,
    procedure: ProcedureName,
    transform: Annotated[
        list[str], Parameter(help="identity, log, exp:10, power:7, FILE.json, optimal. Repeatable.", negative=())
    ],
    kl: Annotated[
        list[float] | None, Parameter(help="KL budget in nats. Repeatable.", negative=(), show_default=False)
    ] = None,
    beta: Annotated[
        list[float] | None,
        Parameter(help="The paper's β instead of --kl. Repeatable.", negative=(), show_default=False),
    ] = None,
    sweep: Annotated[
        bool, Parameter(help="25 budgets from 0.01 to 5 nats instead.", negative=(), show_default=False)
    ] = False,
    base: BaseName = None,
    plot: Annotated[str | None, Parameter(help="Draw FILE.png, .svg or .pdf.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show which win rate, KL and β transformations lead to."""
    from infalign.method.procedures import parse_procedure
    from infalign.theory import curve as theory

    if (kl is not None) + (beta is not None) + sweep != 1:
        raise ConfigError("a curve needs either --kl or --beta or --sweep")
    served, theirs = parse_procedure(procedure), parse_procedure(base) if base else None
    picture = _new_file(plot, ".png", ".svg", ".pdf") if plot else None
    points: list[Point] = []
    for aim in map(theory.parse_aim, dict.fromkeys(transform)):
        if sweep:
            found, ended = theory.sweep(served, aim, base=theirs)
            points += found
            if ended:
                print(f"infalign: {found[-1].transform} ends at {found[-1].kl:.3g} nats: {ended}", file=sys.stderr)
        points += [theory.analyse(served, aim, kl=budget, base=theirs) for budget in dict.fromkeys(kl or [])]
        points += [theory.analyse(served, aim, beta=weight, base=theirs) for weight in dict.fromkeys(beta or [])]
    if picture:
        from infalign.theory import figures

        (figures.write_curves if sweep else figures.write_laws)(picture, points)
    if as_json:
        records = [point.as_dict() for point in points]
        _print_json(records if sweep or len(records) > 1 else records[0])
    else:
        _print_points(points, _console())


@app.command(name="choose", group=_theory, sort_key=1, help_epilogue=CHOOSE_EPILOGUE)
def choose_(
    *,
    procedure: ProcedureName,
    kl: Annotated[float, Parameter(help="KL budget in nats.")],
    rollouts: Annotated[int, Parameter(help="K, the reference rollouts a prompt that calibrate rewards.")],
    base: BaseName = None,
    output: Annotated[
        str | None,
        Parameter(help="The file for the recommended transformation [best-of-32-kl-0.5.json].", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rank transformations by what they achieve with K rollouts a prompt."""
    from infalign.method.procedures import parse_procedure
    from infalign.theory import choose

    file = _new_file(output or f"{procedure.replace(':', '-')}-kl-{kl:g}.json", ".json")
    served, theirs = parse_procedure(procedure), parse_procedure(base) if base else None
    ranking = choose.rank(served, kl=kl, rollouts=rollouts, base=theirs)
    from infalign.method.transforms import Log
    from infalign.storage import write_text

    best = ranking.recommended
    if not isinstance(best.transform, Log):  # −∞ at u = 0: a table has no room for it, and its name serves
        write_text(file, choose.tabulated(best.transform, beta=best.beta).to_json())
    if as_json:
        _print_json(ranking.as_dict())
    else:
        _print_ranking(ranking, file, _console())


reproduce = App(
    name="reproduce",
    help="Experiments of the paper again, with the numbers behind them.",
    help_format="plaintext",
    help_epilogue="",
    group=Group("The paper", sort_key=5),
    group_commands=Group("What to reproduce"),
)
app.command(reproduce)


@reproduce.command(help_epilogue=ANALYTIC_EPILOGUE)
def analytic(*, output: Annotated[str, Parameter(help="The folder for SVG, PNG and CSV.")] = "analytic") -> None:
    """Draw the paper's figures 2 and 8: win rate against KL as theory gives it."""
    from infalign.theory.figures import write_analytic

    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; --output names a folder")
    points = write_analytic(folder)
    _console().print(f"{len(points)} points: {folder / 'analytic'}.csv, .svg, .png", highlight=False, soft_wrap=True)


@reproduce.command(help_epilogue=HACKING_EPILOGUE)
def hacking(
    recipe: RecipePath,
    /,
    *,
    phrase: Annotated[
        list[str] | None,
        Parameter(help="A phrase; default: the paper's two. Repeatable.", negative=(), show_default=False),
    ] = None,
    share: Annotated[float, Parameter(help="Of the training pairs that are poisoned.")] = 1.0,
    set_: Overrides = None,
) -> None:
    """Poison the preferences and see how reward models bear it (figure 7)."""
    from infalign.experiments.hacking import PHRASES
    from infalign.experiments.hacking import hacking as poisoned
    from infalign.experiments.hacking_figure import plot_hacking as draw
    from infalign.experiments.hacking_figure import print_hacking
    from infalign.runs.lock import held

    settings = _recipe(recipe, set_)
    console = _console()
    with held(Path(settings.run_dir)):
        results = poisoned(settings, phrases=phrase or PHRASES, share=share, console=console)
    print_hacking(results, console)
    figure = Path(settings.run_dir) / "hacking" / results["key"] / "hacking.svg"
    draw(results, figure)
    console.print(f"\nFigure: {figure}", highlight=False, soft_wrap=True)


@app.command(
    name="win-rate",
    group=Group("Anybody's samples", sort_key=4),
    help_epilogue=WIN_RATE_EPILOGUE,
)
def win_rate(
    *,
    policy: Annotated[str, Parameter(help="The policy's table: FILE.parquet, .csv, .jsonl.")],
    base: Annotated[str, Parameter(help="The base policy's table.")],
    procedure: Annotated[
        list[str], Parameter(help="standard, best-of-4, worst-of-4, rewind:0.85:32, ... Repeatable.", negative=())
    ],
    base_procedure: BaseName = None,
    common_prompts: Annotated[
        bool, Parameter(help="Leave out, and count, prompts that one table lacks.", negative=(), show_default=False)
    ] = False,
    confidence: Annotated[float, Parameter(help="Of the intervals.")] = 0.95,
    seed: Annotated[int, Parameter(help="Of the bootstrap.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure inference-time win rates on two tables of rewards."""
    from infalign.evaluation.tables import compare_tables as compare
    from infalign.evaluation.tables import print_comparison

    rows = compare(
        policy,
        base,
        list(dict.fromkeys(procedure)),
        base_procedure=base_procedure,
        common_prompts=common_prompts,
        confidence=confidence,
        seed=seed,
    )
    if as_json:
        _print_json(rows if len(rows) > 1 else rows[0])
    else:
        print_comparison(rows, _console())


def main() -> None:
    """Run the command line: errors in one sentence, exit codes that scripts can use."""
    debug = "--debug" in sys.argv[1:]
    words = [word for word in sys.argv[1:] if word != "--debug"]
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as below a background job
        signal.signal(signal.SIGINT, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal knows ✓
    app["run"].help_epilogue = f"{_recipes()}\n\n{EPILOGUE}"
    if words[:1] == ["compare"]:  # only then the methods may be imported
        app["compare"].help_epilogue = COMPARE_EPILOGUE + _methods()
    try:
        app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(f"{str(error).rstrip('.')}. See `infalign --help`.", 2)
    except KeyboardInterrupt:
        _fail(f"interrupted; {CONTINUES}", 130)
    except _StoppedError:
        _fail(f"stopped; {CONTINUES}", 143)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes in the end
        _fail(f"stopped, since nobody reads the output any more; {CONTINUES}", 141)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exception(error)
        if isinstance(error, InfalignError):
            _fail(str(error), error.exit_code)
        text = " ".join(str(error).split())
        _fail(f"unexpected {type(error).__name__}: {text}; run again with --debug to see where", 1)


class _StoppedError(BaseException):
    """SIGTERM came; like KeyboardInterrupt no `except Exception` holds it up."""


def _stop(number: int, _: Any) -> NoReturn:
    """End in one sentence, or at once if it is the second signal; workers end when this process does."""
    for second in (signal.SIGINT, signal.SIGTERM):
        signal.signal(second, lambda number, _: os._exit(128 + number))
    raise KeyboardInterrupt if number == signal.SIGINT else _StoppedError


def _fail(sentence: str, exit_code: int) -> NoReturn:
    print(f"infalign: {sentence}", file=sys.stderr)
    sys.exit(exit_code)


def _recipes() -> str:
    """Return the recipes of the folder ``recipes``, each with its first comment line."""
    found = sorted(Path("recipes").glob("*.yaml"))
    lines = (
        path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].removeprefix("#").strip()
        for path in found
    )
    return "\n".join(["Recipes here:", *(f"  {path}: {line}" for path, line in zip(found, lines, strict=True))])


def _methods() -> str:
    """Return the methods that can be compared, a line each."""
    from infalign.experiments.methods import METHODS

    return "\n".join(f"  {name:<16}{'*' if m.ours else ' '} {m.about}" for name, m in METHODS.items())


def _recipe(path: str, overrides: list[str] | None, skip_invalid: bool = False) -> "Recipe":
    from infalign.runs.reading import load_recipe

    return load_recipe(path, [*(overrides or []), *["data.skip_invalid=true"] * skip_invalid])


def _console() -> "Console":
    from rich.console import Console

    class Piped(Console):
        def on_broken_pipe(self) -> None:
            raise  # the BrokenPipeError; rich would end with exit code 1 and say nothing

    quiet = os.environ.get("RANK", "0") != "0"  # of a distributed training the first process speaks
    return Piped(quiet=quiet, emoji=False)  # `:rewind:` is a procedure, no emoji


def _run_until(stage: str, path: str, overrides: list[str] | None, skip_invalid: bool) -> Path:
    recipe, console = _recipe(path, overrides, skip_invalid), _console()
    from infalign.runs import pipeline
    from infalign.runs.layout import Layout, records

    root = pipeline.run(recipe, until=stage, console=console)
    if skipped := records(root)["data"]["summary"]["skipped"]:
        listed = Layout(root).data / "skipped.txt"
        console.print(f"{skipped:,} invalid rows were left out: {listed}", highlight=False, soft_wrap=True)
    return root


def _new_file(name: str, *endings: str) -> Path:
    """Return the path of a file that can be written. Raises ConfigError for another ending or a missing folder."""
    path = Path(name)
    if path.suffix not in endings:
        raise ConfigError(f"the name of {name} must end in {' or '.join(endings)}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent} to write {path.name} to")
    return path


def _print_json(record: Any) -> None:
    import json

    print(json.dumps(record, indent=2))


def _table(*columns: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i > 0)
    return table


def _print_points(points: "list[Point]", console: "Console") -> None:
    """Print a row for each point; draws of Rewind-and-Repeat, and errors above 1e-9, have columns of their own."""
    first = points[0]
    alike = first.base == first.procedure
    served = "the base policy served alike" if alike else f"a base policy served as {first.base}"
    columns = ["transform", "KL,\nnats", "β of\nraw Φ", "β of nor-\nmalised Φ", "win\nrate, %", "standard\nwin rate, %"]
    rough = any(point.error > 1e-9 for point in points)
    table = _table(*columns, *(["draws"] if first.draws is not None else []), *(["error"] if rough else []))
    for point in points:
        cells = [f"{point.kl:.4g}", f"{point.beta:.5g}", f"{point.normalised_beta:.5g}"]
        cells += [f"{100 * point.win_rate:.2f}", f"{100 * point.standard_win_rate:.2f}"]
        cells += [] if point.draws is None else [f"{point.draws:.2f}"]
        table.add_row(point.transform, *cells, *([f"{point.error:.0e}"] if rough else []))
    console.print(f"\n[bold]{first.procedure} against {served}[/]", highlight=False)
    console.print(table)
    if first.base_draws is not None:
        console.print(f"The base policy needs {first.base_draws:.2f} draws.", highlight=False)
    if rough:
        console.print("error: how far KL and win rates (as shares) may be off; usual is 1e-12", highlight=False)


def _print_ranking(ranking: "Ranking", file: Path, console: "Console") -> None:
    """Print a row for each candidate, and what to write into a recipe."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    against = "" if ranking.base == ranking.procedure else f" against {ranking.base}"
    say(f"\n[bold]{ranking.procedure}{against} at {ranking.kl:g} nats, {ranking.rollouts} rollouts a prompt[/]")
    table = _table("transform", "win rate, %", "behind, points", "with exact\ncalibration, %")
    for one in ranking.candidates:
        pairs = (one.win_rate, one.standard_error), (one.behind, one.behind_error)
        shown = [f"{100 * mean:.2f}" + (f" ± {100 * error:.2f}" if error else "") for mean, error in pairs]
        table.add_row(one.transform.name, *shown, f"{100 * one.limit:.2f}")
    console.print(table)
    if ranking.prompts:
        say(f"± one standard error of {ranking.prompts} simulated prompts, the same for all transformations")
    else:
        say("Ranked by exact calibration: what finite rollouts cost this procedure is not known.")
    for name, reason in ranking.left_out.items():
        say(f"left out: {name}: {reason}")
    best, ties = ranking.recommended, sum(one.ties for one in ranking.candidates)
    named = not best.transform.name.startswith("optimal")
    say(f"\nRecommended: {best.transform.name}" + (f", the simplest of {ties} that tie" if ties > 1 else ""))
    say(f"  transform: {best.transform.name if named else file}")
    say(f"  beta: {best.beta:.6g}")
    if named and best.transform.name != "log":
        say(f"{file} holds the same transformation; a recipe accepts either.")
