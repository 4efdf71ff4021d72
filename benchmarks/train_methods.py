"""Methods trained from one run directory, on the same rollouts, at several KL budgets."""

from method_policies import MethodPolicies
from run_files import Evaluated, finish

ROUNDS = 2  # of further budgets


def train_methods(policies: MethodPolicies, *, rounds: int = ROUNDS) -> MethodPolicies:
    """Train the policies and evaluate them. Return them with those of further budgets.

    In up to ``rounds`` rounds a method that has policies on one side only of the median KL for a budget gets another.
    """
    while True:
        finish(policies.recipe, "evaluate")
        if not rounds:
            return policies
        evaluated = Evaluated(policies.recipe)
        wider = policies.bracketed({name: float(evaluated.kl(name).mean()) for name in policies.recipe.policies})
        if wider.recipe.policies.keys() == policies.recipe.policies.keys():
            return policies
        policies, rounds = wider, rounds - 1
