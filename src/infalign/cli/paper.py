"""Commands that repeat experiments of the paper."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from infalign.cli.options import Overrides, RecipePath, read_recipe
from infalign.cli.output import open_console
from infalign.display import say
from infalign.errors import ConfigError

ANALYTIC_EPILOGUE = """\
Example:
  infalign reproduce analytic --output figures

Win rate against KL, both policies served by standard sampling,
best-of-2, best-of-4, worst-of-2 or worst-of-4, for identity, log, four
exponentials and the optimum (the paper's fixed point).
"""
HACKING_EPILOGUE = """\
Example:
  infalign reproduce hacking hh-helpful-tiny --phrase Sure

A phrase is put before the preferred responses of the training pairs, and for
the test before the responses that are not preferred. A reward model that
learned the phrase decides those pairs wrongly. Ranking its rewards among
rollouts can only turn decisions into ties, which count one half; a model that
is trained to predict ranks can do more, or less.
"""

reproduce = App(
    name="reproduce",
    help="Experiments of the paper again, with the numbers behind them.",
    help_format="plaintext",
    help_epilogue="",
    group=Group("The paper", sort_key=8),
    group_commands=Group("What to reproduce"),
)


@reproduce.command(help_epilogue=ANALYTIC_EPILOGUE)
def analytic(*, output: Annotated[str, Parameter(help="The folder for SVG, PNG and CSV.")] = "analytic") -> None:
    """Draw the paper's figures 2 and 11: win rate against KL as theory gives it."""
    from infalign.theory.figures import write_analytic

    folder = Path(output)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; --output names a folder")
    points = write_analytic(folder)
    say(open_console(), f"{len(points)} points: {folder / 'analytic'}.csv, .svg, .png")


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
    from infalign.experiments.hacking_figure import plot_hacking, print_hacking
    from infalign.runs.lock import held

    settings = read_recipe(recipe, set_)
    console = open_console()
    with held(Path(settings.run_dir)):
        results = poisoned(settings, phrases=phrase or PHRASES, share=share, console=console)
    print_hacking(results, console)
    figure = Path(settings.run_dir) / "hacking" / results["key"] / "hacking.svg"
    plot_hacking(results, figure)
    say(console, f"\nFigure: {figure}")
