"""Methods trained from one run directory, on the same rollouts, at several KL budgets."""

from method_policies import MethodPolicies
from rich.console import Console

from infalign.report.scored_samples import ScoredSamples
from infalign.steps import whole_run
from infalign.steps.evaluate import evaluations

ROUNDS = 2  # of further budgets


def train_methods(policies: MethodPolicies, *, rounds: int = ROUNDS, console: Console) -> MethodPolicies:
    """Train the policies and evaluate them. Return them with those of further budgets.

    In up to ``rounds`` rounds a method that has policies on one side only of the median KL for a budget gets another.
    """
    while True:
        with whole_run.open_run(policies.recipe) as run:
            # Results, report and recorded recipe of the run are not overwritten: they may be for other policies.
            units = [*whole_run.units(run, until="train"), *evaluations(run)]
            whole_run.do_units(run, units, until="evaluate", console=console)
        if not rounds:
            return policies
        evaluated = ScoredSamples(policies.recipe, run.layout)
        wider = policies.bracketed({name: float(evaluated.kl(name).mean()) for name in policies.recipe.policies})
        if wider.recipe.policies.keys() == policies.recipe.policies.keys():
            return policies
        policies, rounds = wider, rounds - 1
