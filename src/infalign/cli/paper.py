"""Commands that repeat experiments of the paper."""

import re
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from infalign.cli.options import KLBudgets, Overrides, RecipePath, read_budgets, read_recipe
from infalign.cli.output import open_console
from infalign.core.display import say
from infalign.core.errors import ConfigError

HACKING_EPILOGUE = """\
Example:
  infalign reproduce hacking hh-helpful-tiny --phrase Sure

A phrase is put before the preferred responses of the training pairs, and for
the test before the responses that are not preferred. A reward model that
learned the phrase decides those pairs wrongly. Ranking its rewards among
rollouts can only turn decisions into ties, which count one half; a model that
is trained to predict ranks can do more, or less.
"""

REPRODUCE_EPILOGUE = """\
Examples:
  infalign reproduce all hh-helpful-tiny --dry-run
  infalign reproduce all hh-helpful-tiny
  infalign reproduce 4,10 hh-helpful --output figures
  infalign reproduce 2

Figures by their numbers in the paper, in the order of captions: 2 and 11
theory; 3 calibration; 4 win rates against KL; 5 N = 2; 6 GRPO and Best-of-N;
7 reward hacking; 8 N = 32; 9 raw reward; 10 GRPO at Best-of-N; 12
Rewind-and-Repeat. OUTPUT/page/index.html has every figure and claim:
confirmed, refuted or undecided, by an interval over seeds and prompts.

Every seed is a run directory of its own, OUTPUT/seed-0 and so on, of which
only what the figures need is done. The same command continues, and does
nothing twice; with a larger recipe it is the paper's size. Without
--kl-budgets, methods that miss the common KL get further ones, as in compare.
"""

reproduce = App(
    name="reproduce",
    help="The paper's figures and claims again, with the numbers behind them.",
    help_format="plaintext",
    help_epilogue=REPRODUCE_EPILOGUE,
    group=Group("The paper", sort_key=8),
    group_commands=Group("A figure with settings of its own"),
)


@reproduce.default
def figures(
    numbers: Annotated[str, Parameter(name="FIGURES", help="all, or numbers of figures: 4,12.")],
    recipe: Annotated[str | None, Parameter(help="A recipe; theory needs none.", show_default=False)] = None,
    /,
    *,
    output: Annotated[
        Path | None, Parameter(help="The folder for page and runs; default: RUN_DIR-paper.", show_default=False)
    ] = None,
    seeds: Annotated[str, Parameter(help="Of the trainings, two or more.")] = "0,1,2",
    kl_budgets: KLBudgets = None,
    dry_run: Annotated[
        bool, Parameter(help="Print what would be trained and how long it takes.", negative=(), show_default=False)
    ] = False,
    set_: Overrides = None,
) -> None:
    """Repeat figures of the paper from several seeds, and say which of its claims hold."""
    from infalign.experiments.reproduction import (
        FOLDER,
        PAGE,
        Reproduction,
        print_plan,
        print_verdicts,
        read_figures,
    )
    from infalign.experiments.reproduction import reproduce as repeat

    settings = None if recipe is None else read_recipe(recipe, set_)
    folder = output or Path("paper" if settings is None else f"{settings.run_dir}-paper")
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", seeds):
        raise ConfigError(f"--seeds takes whole numbers such as 0,1,2, found {seeds!r}")
    own = [int(seed) for seed in seeds.split(",")]
    asked = Reproduction(read_figures(numbers), folder, settings, own, read_budgets(kl_budgets))
    console = open_console()
    if dry_run:
        print_plan(asked, console)
        return
    print_verdicts(repeat(asked, console), console)
    say(console, f"\nPage: {folder / FOLDER / PAGE}")


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
    from infalign.pipeline.lock import held

    settings = read_recipe(recipe, set_)
    console = open_console()
    with held(Path(settings.run_dir)):
        results = poisoned(settings, phrases=phrase or PHRASES, share=share, console=console)
    print_hacking(results, console)
    figure = Path(settings.run_dir) / "hacking" / results["key"] / "hacking.svg"
    plot_hacking(results, figure)
    say(console, f"\nFigure: {figure}")
