"""The command `compare`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from infalign.cli.options import DryRun, KLBudgets, Overrides, RecipePath, read_budgets, read_recipe
from infalign.cli.output import open_console

COMPARE_EPILOGUE = """\
Examples:
  infalign compare demo --dry-run
  infalign compare demo
  infalign compare demo --methods qrpo,rloo,ipo --kl-budgets 0.5

All methods share the run's data, models, rollouts and calibration; a later
comparison trains only new methods. Numbers and report go to the folder compare
of the run directory.

Offline methods take fit and guide from the recipe's first offline policy.
On-policy methods take fit from the first on-policy policy; without one, they
use 3 times the epochs and 2.5 times the learning rate.
The first method is compared with the others at the largest KL that all reach,
interpolated between two policies of each.
Without --kl-budgets, a method whose policies all lie on one side of that KL is
trained at a further budget; with it, the method is marked.
bon-sft and bonbon use the n whose Best-of-n has the KL nearest to the budget.
qrpo-for-32 is qrpo with the transformation for N = 32; other methods likewise.

Methods (a star: they optimize what is served):
"""


def compare(
    recipe: RecipePath,
    /,
    *,
    methods: Annotated[
        str | None, Parameter(help="qrpo,rloo,...; default: all methods that the recipe has settings for.")
    ] = None,
    kl_budgets: KLBudgets = None,
    set_: Overrides = None,
    dry_run: DryRun = False,
) -> None:
    """Train several methods on the same rollouts, compare them at one KL."""
    budgets = read_budgets(kl_budgets)
    from infalign.compare.comparison import choose_policies, compare_methods, comparison_units
    from infalign.pipeline.lock import held
    from infalign.report.tables import print_table

    settings, console = read_recipe(recipe, set_), open_console()
    chosen = methods.split(",") if methods is not None else None
    if dry_run:
        from infalign.steps.dry_run import print_plan

        print_plan(choose_policies(settings, chosen, budgets, console).recipe, console, comparison_units)
        return
    with held(Path(settings.run_dir)):
        folder = compare_methods(settings, methods=chosen, budgets=budgets, console=console)
    print_table(folder, console)


def list_methods() -> str:
    """Return the methods that can be compared, a line each."""
    from infalign.compare.methods import METHODS

    return "\n".join(f"  {name:<16}{'*' if m.ours else ' '} {m.about}" for name, m in METHODS.items())
