"""What theory says of a recipe's policies: their β, their law, and what coarse ranks cost them."""

from pathlib import Path

import numpy as np

from infalign.errors import ConfigError
from infalign.method.procedures import RewindAndRepeat, Served, parse_procedure
from infalign.method.shapings import Ranked, budget_beta, parse_shaping
from infalign.runs.recipe import OWN_TRANSFORM, Policy, Recipe
from infalign.runs.stages.calibrate import reference_rewards
from infalign.theory.finite_rollouts import finite_rollouts
from infalign.theory.law import Law, aligned_law, law_at_kl
from infalign.theory.optimum import optimal

MOST_LOST = 0.02  # of a win rate, to ranks among K rollouts, before a run says so
BOND_REGULARISER = 1.0  # γ of J-BOND, the weight of the KL to its moving anchor


def coarse_ranks(recipe: Recipe) -> list[str]:
    """Return a warning for each policy that loses much because its rewards are ranked among K rollouts only.

    That is theory's answer, for a policy with a KL budget that is trained on ranks, under the recipe's procedure; it
    has none under Rewind-and-Repeat.
    """
    procedure, k = parse_procedure(recipe.procedure), recipe.rollout.k
    if isinstance(procedure, RewindAndRepeat):
        return []
    warnings = []
    for name, policy in recipe.policies.items():
        shaping, kl = parse_shaping(policy.transform), policy.kl_budget
        if policy.solver in OWN_TRANSFORM or policy.ranks == "model" or not isinstance(shaping, Ranked) or kl is None:
            continue
        try:
            found = finite_rollouts(shaping.transform, procedure, rollouts=k, kl=kl, seed=recipe.seed)
        except ConfigError as error:  # K rollouts cannot spend so much
            warnings.append(f"policies.{name}: {error}; or raise rollout.k")
            continue
        if found.lost > MOST_LOST:
            warnings.append(
                f"policies.{name}: with {k} rollouts a prompt {policy.transform} wins {100 * found.lost:.1f} ± "
                f"{100 * found.standard_error:.1f} points less of {procedure.name} at {kl:g} nats than with exact "
                "ranks; raise rollout.k"
            )
    return warnings


def policy_beta(recipe: Recipe, root: Path, name: str) -> float:
    """Return the paper's β of a policy: given, or whose optimum spends the KL budget or is Best-of-n.

    For rewards that are no ranks that depends on their law: β spends the budget on the stored rollouts.
    """
    policy = recipe.policies[name]
    law = policy_law(policy, parse_procedure(recipe.procedure))
    if law is not None:
        return law.beta
    if policy.beta is not None:
        return policy.beta
    if policy.solver == "bond":
        return BOND_REGULARISER
    assert policy.kl_budget is not None
    shaping = parse_shaping(policy.transform)
    references_PK = reference_rewards(root)
    shaped_PK = np.stack([shaping(references_K, references_K) for references_K in references_PK])
    return budget_beta(shaped_PK, policy.kl_budget)


def policy_betas(recipe: Recipe, root: Path, name: str) -> tuple[float, float]:
    """Return a policy's β for the paper's raw Φ and for the normalised Φ that it is trained on."""
    beta = policy_beta(recipe, root, name)
    return beta, beta / parse_shaping(recipe.policies[name].transform).scale


def policy_law(policy: Policy, procedure: Served) -> Law | None:
    """Return the law that theory gives for a policy that is free for every prompt; None where there is none.

    There is none for rewards that are no ranks, and for bond, which has no objective but its next step.
    """
    if policy.kl_budget is not None:
        return method_law(policy.solver, policy.transform, procedure, policy.kl_budget)
    shaping = parse_shaping(policy.transform)
    if not isinstance(shaping, Ranked):
        return None
    if policy.solver == "maxk":
        return optimal(procedure, beta=policy.beta).law
    beta = policy.beta if policy.n is None else 1.0 / (policy.n - 1)  # Best-of-n itself
    assert beta is not None
    return aligned_law(shaping.transform, beta=beta)


def method_law(solver: str, transform: str, procedure: Served, kl: float) -> Law | None:
    """Return the law that theory gives for a solver with a transformation at a KL; None where there is none."""
    shaping = parse_shaping(transform)
    if solver == "bond" or not isinstance(shaping, Ranked):
        return None
    return optimal(procedure, kl=kl).law if solver == "maxk" else law_at_kl(shaping.transform, kl=kl)
