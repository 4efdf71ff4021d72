"""The stage train: each policy by its solver, from the stored rollouts or on-policy."""

import shutil
from collections.abc import Iterator, Mapping
from functools import partial

from infalign.core.distributed import is_first
from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.method.procedures import rewinds
from infalign.models.pretrained import TRANSFORMATION
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.settings import Recipe
from infalign.steps import reference_passes
from infalign.steps.policy_inputs import PolicyInputs
from infalign.steps.run import DRAWN, READ, TRAINED, Pass, Run
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps
from infalign.training.output_folder import Target
from infalign.training.solvers.base import Solver

LAST = ("strength", "strength_kl", "gain", "seen_gain", "tuned", "resumed")  # of the last row of a log, in a record
MAX_LOST_WIN_RATE = 0.02  # win rate lost to ranking among K rollouts; a larger loss gives a warning


def units(run: Run) -> Iterator[Unit]:
    """Yield the training of each policy, after what they read of the reference."""
    yield from reference_passes.units(run)
    inputs, policies = PolicyInputs.of(run), run.recipe.policies
    for name in _teachers_first(policies):
        policy, target, teacher = policies[name], run.target(name), policies[name].data_needs.teacher
        yield Unit(
            "train",
            "train",
            name,
            inputs=(
                run.layout.calibrated,
                *([] if policy.aim(run.recipe.procedure) is None else [run.layout.law(teacher or name)]),
                *([run.layout.model(teacher)] if teacher else []),
                *reference_passes.read_by(run, policy),
            ),
            settings=run.key(*policy.recipe_dependencies) | {"policies": {name: run.contents["policies"][name]}},
            output=target.model,
            work=partial(train_policy, name, policy, inputs, target),
            workspace=target.checkpoints,
            together=True,
            so_far=target.so_far,
            passes=_passes(run, name),
        )


def _teachers_first(policies: Mapping[str, Solver]) -> list[str]:
    """Return the names of policies, each student after its teacher."""
    place = {name: number for number, name in enumerate(policies)}
    teachers = {name: policy.data_needs.teacher or name for name, policy in policies.items()}
    return sorted(policies, key=lambda name: (max(place[name], place[teachers[name]]), teachers[name] != name))


def _passes(run: Run, name: str) -> list[Pass]:
    """Return the passes of a policy's training: over the stored rollouts, or over responses that it draws itself."""
    policy, prompts = run.recipe.policies[name], run.rollout_prompts
    reference, *trunk = run.networks(name)
    passes, each, by_reference, draws = policy.workload(prompts.first, run.recipe.rollout.k)
    teacher, reward = policy.data_needs.teacher, [run.architecture("reward")] * run.recipe.reward.is_classifier
    frozen = [reference] * by_reference if teacher is None else run.networks(teacher)
    return [
        Pass.over(TRAINED * passes, trunk or [reference], prompts, each),
        Pass.over(READ * passes, frozen, prompts, each),
        Pass.over(DRAWN, [reference] if draws else [], prompts, draws),
        Pass.over(READ, reward if draws else [], prompts, draws),
    ]


def coarse_ranks(recipe: Recipe, name: str) -> list[str]:
    """Return a warning if a policy loses much because its rewards are ranked among K rollouts only.

    Theory has the loss for ranks under a KL budget and the recipe's procedure, but no result for Rewind-and-Repeat.
    """
    policy, procedure, k = recipe.policies[name], recipe.procedure, recipe.rollout.k
    aim, kl = policy.aim(procedure), policy.budget
    transform = None if aim is None or policy.data_needs.teacher else aim.transform
    if rewinds(procedure) or transform is None or kl is None:
        return []
    try:
        finite = finite_rollouts(transform, procedure, simulated_gaps(k, seed=recipe.seed), kl=kl)
    except ConfigError as error:  # K rollouts cannot spend this budget
        return [f"policies.{name}: {error}; or raise rollout.k"]
    if finite.lost <= MAX_LOST_WIN_RATE:
        return []
    return [
        f"policies.{name}: with {k} rollouts per prompt, {transform.name} at {kl:g} nats gains "
        f"{100 * finite.lost:.1f} ± {100 * finite.standard_error:.1f} points less of {procedure.name} than with exact "
        "ranks; raise rollout.k"
    ]


def train_policy(
    name: str, policy: Solver, inputs: PolicyInputs, target: Target, *, on_progress: OnProgress
) -> Summary:
    """Train a policy by its solver, towards its law."""
    law = inputs.law(name, policy)
    with target.job(on_progress) as job:
        history = policy.train(inputs.of_solver, law, job)
        if (table := policy.transformation).endswith(".json") and is_first():
            shutil.copyfile(table, job.model_dir / TRANSFORMATION)  # the model folder keeps what it was trained on
    held_out = [row["eval_loss"] for row in history if "eval_loss" in row]
    losses = {"held_out_loss_start": held_out[0], "held_out_loss_end": held_out[-1]} if held_out else {}
    last: Summary = {key: history[-1][key] for key in LAST if key in history[-1]}
    betas = {} if law is None else {"beta": law.paper_beta, "trainer_beta": law.beta}
    return {**losses, **last, **betas, "history": history}
