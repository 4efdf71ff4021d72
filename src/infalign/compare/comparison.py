"""Methods trained from one run directory, on the same rollouts; their policies have a report of their own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from infalign.compare.methods import extreme_procedure
from infalign.compare.policies import MethodPolicies, check_budgets, possible_methods
from infalign.core.display import say
from infalign.pipeline.ownership import claim
from infalign.pipeline.units import Unit
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report import page
from infalign.report.results import write_results
from infalign.report.scored_samples import ScoredSamples
from infalign.steps import whole_run
from infalign.steps.evaluate import evaluations
from infalign.steps.run import Run

ROUNDS = 2  # of further budgets


def compare_methods(
    recipe: Recipe, *, methods: Sequence[str] | None = None, budgets: Sequence[float] | None = None, console: Console
) -> Path:
    """Train each of the methods (`read_method`) at each KL budget in the recipe's run directory, and report on them.

    By default ``methods`` are all for which the recipe's own policies give the settings. Offline methods take fit and
    guide of the recipe's first offline policy, methods that generate the fit of its first on-policy policy; without
    one, three times the epochs and 2.5 times the learning rate of a policy without a guide. Finished work is not
    repeated; the run's results, report and recipe do not change.

    Without ``budgets`` they are `policies.BUDGETS`, and a method all of whose policies spend more, or less, than half
    of the methods do for a budget gets a further budget of its own on the other side, in up to `ROUNDS` rounds.

    Return the folder ``compare`` of the run directory, with results.json, report.html and figures as a run has them,
    of these policies. Raises ConfigError for an unknown method, a budget that is not positive, a procedure other than
    best-of-N or worst-of-N, and settings that a method cannot have.
    """
    policies = choose_policies(recipe, methods, budgets, console)
    compared = train_methods(policies, rounds=ROUNDS if budgets is None else 0, console=console).recipe
    layout = Layout(Path(recipe.run_dir), "compare")
    write_results(ScoredSamples.of(compared, layout), compared.policies, on_progress=lambda *_: None)
    page.write(compared, layout, [unit.name for unit in comparison_units(Run.of(compared))])
    return layout.reported


def choose_policies(
    recipe: Recipe, methods: Sequence[str] | None, budgets: Sequence[float] | None, console: Console
) -> MethodPolicies:
    """Return the policies of a comparison, and print which methods are left out. Raises as `compare_methods`."""
    extreme_procedure(recipe)
    budgets = check_budgets(budgets)
    left_out: Mapping[str, str] = {}
    if methods is None:
        methods, left_out = possible_methods(recipe, budgets)
    for name, reason in left_out.items():
        say(console, f"left out: {name}: {reason}")
    return MethodPolicies(recipe, list(dict.fromkeys(methods)), budgets)


def comparison_units(run: Run) -> list[Unit]:
    """Return the units of a comparison: all up to the policies, and their evaluation."""
    return [*whole_run.units(run, until="train"), *evaluations(run)]


def train_methods(policies: MethodPolicies, *, rounds: int = ROUNDS, console: Console) -> MethodPolicies:
    """Train the policies and evaluate them. Return them with those of further budgets.

    In up to ``rounds`` rounds a method that has policies on one side only of the median KL for a budget gets another.
    """
    while True:
        with whole_run.open_run(policies.recipe) as run:
            claim(Layout(run.layout.root, "compare").reported, ("results.json", "report.html"))
            # The results, report and recorded recipe of the run are not overwritten: they may be for other policies.
            whole_run.do_units(run, comparison_units(run), until="evaluate", console=console)
        if not rounds:
            return policies
        evaluated = ScoredSamples.of(policies.recipe, run.layout)
        wider = policies.bracketed({name: float(evaluated.kl(name).mean()) for name in policies.recipe.policies})
        if wider.recipe.policies.keys() == policies.recipe.policies.keys():
            return policies
        policies, rounds = wider, rounds - 1
