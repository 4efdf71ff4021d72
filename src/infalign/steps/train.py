"""The stage train: each policy by its solver, from the stored rollouts or on-policy."""

import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from infalign.core.distributed import is_first
from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.core.storage import read_table
from infalign.data.messages import from_cell
from infalign.method.procedures import rewinds
from infalign.method.shapings import rank_transform
from infalign.models.pretrained import TRANSFORMATION, load_policy
from infalign.models.settings import TRIAL_RATES, TRIAL_SHARE
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.units import Summary, Unit
from infalign.recipe.data_dependent import policy_betas, reference_rewards, resolved_policy
from infalign.recipe.settings import Recipe
from infalign.steps import reference_passes
from infalign.steps.policy_inputs import PolicyInputs
from infalign.steps.run import DRAWN, READ, TRAINED, Pass, Run
from infalign.theory.finite_rollouts import finite_rollouts, simulated_gaps
from infalign.training.output_folder import Target
from infalign.training.solvers.base import Shaped, Solver
from infalign.training.solvers.distil import Settings as Distil
from infalign.training.solvers.offline import Offline
from infalign.training.solvers.on_policy import OnPolicy

History = list[dict[str, Any]]
LAST = (
    "strength",
    "strength_kl",
    "gain",
    "seen_gain",
    "learning_rate_of_fit",
    "passes",
    "trials",
    "resumed",
)  # of the last row of a log, in a record
MAX_LOST_WIN_RATE = 0.02  # win rate lost to ranking among K rollouts; a larger loss gives a warning


def units(run: Run) -> Iterator[Unit]:
    """Yield the training of each policy, after what they read of the reference."""
    yield from reference_passes.units(run)
    inputs, policies = PolicyInputs.of(run), run.recipe.policies
    for name in _teachers_first(policies):
        policy, target = policies[name], run.target(name)
        yield Unit(
            "train",
            "train",
            name,
            inputs=(
                run.layout.calibrated,
                *([run.layout.model(teacher)] if (teacher := policy.data_needs.teacher) else []),
                *reference_passes.read_by(run, policy),
            ),
            settings=run.key(*policy.recipe_dependencies) | {"policies": {name: run.contents["policies"][name]}},
            output=target.model,
            work=partial(train_policy, name, policies, inputs, target),
            workspace=target.checkpoints,
            together=True,
            so_far=target.so_far,
            passes=_passes(run, name),
        )


def _teachers_first(policies: Mapping[str, Solver]) -> list[str]:
    """Return the names of policies, each student after its teacher."""
    place = {name: number for number, name in enumerate(policies)}

    def key(name: str) -> tuple[int, bool]:
        teacher = policies[name].data_needs.teacher
        return max(place[name], place.get(teacher or name, 0)), teacher is not None

    return sorted(policies, key=key)


def _passes(run: Run, name: str) -> list[Pass]:
    """Return the passes of a policy's training: over the stored rollouts, or over responses that it draws itself."""
    policy, prompts, k = run.recipe.policies[name], run.rollout_prompts, run.recipe.rollout.k
    reference, *trunk = run.networks(name)
    if isinstance(policy, OnPolicy):
        fit, reward = policy.fit, [run.architecture("reward")] * run.recipe.reward.is_classifier
        return [
            Pass.over((TRAINED + 2 * READ) * fit.passes, [reference], prompts, policy.generations),
            Pass.over(DRAWN, [reference], prompts, policy.responses_per_prompt),
            Pass.over(READ, reward, prompts, policy.responses_per_prompt),
        ]
    reads_reference = bool(trunk) and policy.data_needs.states is None
    frozen = run.networks(policy.teacher) if isinstance(policy, Distil) else [reference] * reads_reference
    offline = isinstance(policy, Offline)
    passes = policy.fit.passes_over(prompts.first * k) if offline else policy.fit.passes
    tried = 1 + len(TRIAL_RATES) * TRIAL_SHARE * (offline and policy.fit.learning_rate is None)
    return [
        Pass.over(TRAINED * passes * tried, trunk or [reference], prompts, k),
        Pass.over(READ * passes * tried, frozen, prompts, k),
    ]


def coarse_ranks(recipe: Recipe, name: str) -> list[str]:
    """Return a warning if a policy loses much because its rewards are ranked among K rollouts only.

    Theory gives the loss for a policy with a KL budget that is trained on ranks, under the recipe's procedure; it has
    no result for Rewind-and-Repeat.
    """
    policy, procedure, k = recipe.policies[name], recipe.procedure, recipe.rollout.k
    transform, kl = rank_transform(policy.shaping), policy.theory.kl_budget
    if rewinds(procedure) or not isinstance(policy, Shaped) or transform is None or kl is None:
        return []
    try:
        found = finite_rollouts(transform, procedure, simulated_gaps(k, seed=recipe.seed), kl=kl)
    except ConfigError as error:  # K rollouts cannot spend this budget
        return [f"policies.{name}: {error}; or raise rollout.k"]
    if found.lost <= MAX_LOST_WIN_RATE:
        return []
    return [
        f"policies.{name}: with {k} rollouts per prompt, {policy.shaping.name} at {kl:g} nats gains "
        f"{100 * found.lost:.1f} ± {100 * found.standard_error:.1f} points less of {procedure.name} than with exact "
        "ranks; raise rollout.k"
    ]


def train_policy(
    name: str, policies: Mapping[str, Solver], inputs: PolicyInputs, target: Target, *, on_progress: OnProgress
) -> Summary:
    """Train one of the policies by its solver, with the β that its KL budget or its n requires.

    Raises DataError if the calibrated rewards come from another reward or reference policy than the recipe's.
    """
    inputs.provenance.check(inputs.layout)
    policy = resolved_policy(name, policies, inputs.procedure, inputs.layout)
    beta, trainer_beta = policy_betas(policy, inputs.procedure, inputs.layout)
    with target.job(on_progress) as job:
        if isinstance(policy, OnPolicy):
            history = _train_on_policy(policy, trainer_beta, inputs, target, job)
        elif isinstance(policy, Distil):
            history = _distil(policy, beta, inputs, target, job)
        else:
            assert isinstance(policy, Offline)
            history = _train_offline(policy, beta, inputs, target, job)
        if (table := policy.shaping.name).endswith(".json") and is_first():
            shutil.copyfile(table, job.model_dir / TRANSFORMATION)  # the model folder keeps what it was trained on
    held_out = [row["eval_loss"] for row in history if "eval_loss" in row]
    losses = {"held_out_loss_start": held_out[0], "held_out_loss_best": min(held_out[1:])} if held_out else {}
    last: Summary = {key: history[-1][key] for key in LAST if key in history[-1]}
    return {"beta": beta, "trainer_beta": trainer_beta, **last, **losses, "history": history}


def _train_offline(policy: Offline, beta: float, inputs: PolicyInputs, target: Target, job: Any) -> History:
    """Train a policy on the stored rollouts, with ``beta`` for the paper's raw Φ, and return the log."""
    from infalign.training.offline_trainer import RolloutRegression
    from infalign.training.strength import choose_strength
    from infalign.training.tuning import fit_and_tune

    tokenizer = load_tokenizer(inputs.layout.tokenizer)  # it has the chat template
    rows, kl = inputs.rows(policy), policy.theory.kl(inputs.procedure, partial(reference_rewards, inputs.layout))
    start = partial(inputs.start, policy, tokenizer, target.compute)
    fitted = fit_and_tune(RolloutRegression(policy.objective(beta)), start, rows, policy.fit, job)
    if is_first():
        reference, _ = load_policy(inputs.reference, device=target.compute.torch_device())
        fitted.history[-1] |= choose_strength(fitted, reference, rows, inputs.procedure, kl).summary()
    return fitted.save(tokenizer)


def _distil(policy: Distil, beta: float, inputs: PolicyInputs, target: Target, job: Any) -> History:
    """Train a policy to follow another one on the rollouts that this was trained on, and return the log."""
    from infalign.training.offline_trainer import Distillation, fit_to_rollouts

    device = target.compute.torch_device()
    teacher, _ = load_policy(inputs.layout.model(policy.teacher), device=device)
    model, _ = load_policy(inputs.reference, device=device)
    tokenizer = load_tokenizer(inputs.layout.tokenizer)
    loss = Distillation(teacher, policy.teacher_settings.objective(beta))
    return fit_to_rollouts(loss, model, inputs.rows(policy), policy.fit, job).save(tokenizer)


def _train_on_policy(policy: OnPolicy, beta: float, inputs: PolicyInputs, target: Target, job: Any) -> History:
    """Train a policy on-policy, with ``beta`` for the normalized values, and return the log."""
    from infalign.training.on_policy_trainer import Problem, fit_on_policy

    layout = inputs.layout
    prompts = read_table(layout.calibrated, columns=["prompt", "reference_rewards", "columns"])
    problem = Problem(
        inputs.reference,
        load_tokenizer(layout.tokenizer, padding_side="left"),
        [row | {"prompt": from_cell(row["prompt"])} for row in prompts.to_pylist()],
        inputs.provenance.reward.load(),
        beta,
        inputs.procedure,
        inputs.max_new_tokens,
    )
    return fit_on_policy(problem, policy, job)
