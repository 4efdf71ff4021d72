"""The calls that train a policy towards a law: on stored rollouts, or on responses that it draws itself."""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.core.progress import progress_line
from infalign.core.sequences import Lazy
from infalign.core.settings import explained
from infalign.core.storage import column_values
from infalign.data.messages import from_cell
from infalign.method.laws import Law
from infalign.method.procedures import Served, as_procedure
from infalign.models.conversion import convert
from infalign.models.policy import AnyModel, Policy
from infalign.models.pretrained import load_policy, loading, saving
from infalign.models.settings import Compute, Fit
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.sources import AnyReward, load_reward
from infalign.sampling.prompts import repeated
from infalign.sampling.sample import AnyPrompts, Rollouts, check_folder, read_prompts
from infalign.sampling.settings import Rollout
from infalign.training.output_folder import Job, Target
from infalign.training.solvers import KINDS, read_solver
from infalign.training.solvers.base import PLAIN, History, Inputs, Solver

MOST_APART = 0.5  # nats, on average, between an engine's log-probabilities and ours


def fit(
    model: AnyModel,
    rollouts: Rollouts,
    law: Law,
    *,
    solver: str = "qrpo",
    folder: str | Path | None = None,
    **settings: Any,
) -> Policy:
    """Fit a policy to stored rollouts of ``model``, its reference, so that it follows ``law``; nothing is generated.

    ``solver`` and ``settings`` are those of a recipe's policies, such as ``loss`` or ``guide={}``, and of its
    ``fit``, such as ``epochs``, ``learning_rate`` or ``lora={"rank": 8}``, with the same defaults; ``seed`` is 0. The
    policy is in memory, and with a ``folder``, new or empty, saved there. Prompts whose rewards are NaN are left out. A
    tenth of the prompts is held out: on these the strength is chosen that gains most when the law's procedure serves
    it, up to the KL of the law. Where none gains significantly the policy is the reference, with a UserWarning.

    Raises ConfigError for a solver that does not read rollouts, DataError for a law of other rollouts, rollouts of
    another model, rewards that do not differ within any prompt, and fewer than three prompts with rewards.

    >>> rollouts = sample(MODEL, [f"What is {n} + {n}?" for n in range(40)], k=16, max_new_tokens=1)
    >>> law = tilted(score(lambda responses: [text[:1] < "N" for text in responses], rollouts), "raw", kl=0.1)
    >>> fit(MODEL, rollouts, law, epochs=4, learning_rate=1e-2)
    Policy(LlamaForCausalLM, 8,144 parameters)
    """
    seed, chosen = settings.pop("seed", 0), _read(solver, settings, law)
    if not chosen.has_objective or chosen.data_needs.states is not None:
        raise ConfigError(
            f"fit cannot train {chosen.label}: it reads more than rollouts (on-policy solvers: fit_online; distil, "
            "guide.side, guide.top_tokens and lora.layers: a recipe)"
        )
    own, kept = _rewarded(law, (rollouts.asked.num_rows, rollouts.k))
    some = Rollouts(rollouts.asked.filter(kept), rollouts.drawn.filter(np.repeat(kept, rollouts.k)))

    def train(reference: str, job: Job) -> History:
        rows = partial(_rows, reference, some)
        return chosen.train(Inputs(reference, reference, law.procedure, {"reference": reference}, rows), own, job)

    return _train(model, folder, seed, train)


def fit_online(
    model: AnyModel,
    prompts: AnyPrompts,
    reward: AnyReward,
    law: Law,
    *,
    solver: str = "rloo",
    folder: str | Path | None = None,
    **settings: Any,
) -> Policy:
    """Train a policy on its own fresh responses, ranked among the rewards of the law, that of rollouts of ``prompts``.

    As `fit`, with the solvers that draw: their settings too, such as ``generations``, and ``max_new_tokens``. maxk
    trains for ``procedure``, by default the law's, at the law's β, which for its default objective is that of
    ``optimum(…, objective="win-rate")``. Prompts are as in `sample`, in the order of the law's rows; the
    reward is as in `score`.

    >>> prompts = [f"What is {n} + {n}?" for n in range(8)]
    >>> def distinct(responses):
    ...     return [len(set(text)) for text in responses]
    >>> law = tilted(score(distinct, sample(MODEL, prompts, k=8, max_new_tokens=4)), "exp:10", kl=0.1)
    >>> fit_online(MODEL, prompts, distinct, law, generations=4, epochs=1, max_new_tokens=4)
    Policy(LlamaForCausalLM, 8,144 parameters)
    """
    longest = settings.pop("max_new_tokens", Rollout().max_new_tokens)
    served = as_procedure(settings.pop("procedure", law.procedure))
    seed, chosen = settings.pop("seed", 0), _read(solver, settings, law, served)
    if not chosen.draws_per_response:
        raise ConfigError(f"{solver} draws no responses; use fit on stored rollouts")
    asked = read_prompts(prompts)
    own, kept = _rewarded(law, (asked.num_rows, np.size(law.rewards_PK[0])))
    rows = [
        {"prompt": from_cell(row["prompt"]), "columns": row["columns"], "reference_rewards": sorted(rewards_K)}
        for row, rewards_K in zip(asked.filter(kept).to_pylist(), own.rewards_PK.tolist(), strict=True)
    ]
    scored = load_reward(reward)

    def train(reference: str, job: Job) -> History:
        from infalign.training.on_policy_trainer import Problem

        problem = Problem(reference, load_tokenizer(reference, padding_side="left"), rows, scored, longest)
        return chosen.train(Inputs(reference, reference, served, {}, problem=lambda: problem), own, job)

    return _train(model, folder, seed, train)


def _rows(reference: str, rollouts: Rollouts, policy: Solver) -> Sequence[dict[str, Any]]:
    """Return the rollouts, with the reference's log-probabilities as training computes them."""
    from infalign.models.packed import response_logprobs

    k, prompts = rollouts.k, rollouts.prompts
    prompt_ids, asked = repeated(prompts.prompt_ids, k), repeated(prompts.token_ids, k)
    said = column_values(rollouts.drawn, "token_ids")
    model, _ = load_policy(reference, device=Compute().torch_device())
    if max(map(max, said)) >= model.config.get_text_config().vocab_size:
        raise DataError(f"the rollouts are of another model: {reference} has fewer tokens; give the one they are of")
    with progress_line("reference") as report:
        logprobs_R = response_logprobs(model, asked, said, bf16=policy.fit.bf16, on_progress=report)
    apart = np.abs(np.subtract(logprobs_R, rollouts.drawn["logprob"].to_numpy()))
    if np.nanmean(apart) > MOST_APART:
        raise DataError(
            f"the rollouts are of another model: their log-probabilities differ by {np.nanmean(apart):.2g} nats from "
            f"those of {reference}; give the model that they were drawn from"
        )
    names = ("prompt_id", "prompt_ids", "completion_ids", "reference_logprob")
    return Lazy(len(said), lambda i: dict(zip(names, (prompt_ids[i], asked[i], said[i], logprobs_R[i]), strict=True)))


def _read(solver: str, settings: dict[str, Any], law: Law, procedure: Served = PLAIN) -> Solver:
    """Return a solver with its settings and those of its fit. Raises ConfigError as a recipe does."""
    of_fit = {name: settings.pop(name) for name in list(settings) if name in Fit.model_fields}
    given = {"fit": of_fit} if of_fit else {}
    has_beta = solver not in KINDS or "beta" in KINDS[solver].model_fields
    strength = {"beta": law.paper_beta} if has_beta else {}
    if of_law := sorted(settings.keys() & {"transform", *(("beta", "kl_budget") if has_beta else ())}):
        raise ConfigError(f"{' and '.join(of_law)}: set by the law; leave it out, or give another law")
    with explained(solver):
        chosen = read_solver(solver=solver, **given, **strength, **settings)
        chosen.check(procedure, np.size(law.rewards_PK[0]), has_reward_model=False)
    return chosen.with_usual_fit(pretrained=True)


def _rewarded(law: Law, shape: tuple[int, int]) -> tuple[Law, Any]:
    """Return the law of the prompts that have rewards, and which these are, (P,). Raises DataError as `fit`."""
    if law.rewards_PK.shape != shape:
        raise DataError(
            f"the law is of {law.rewards_PK.shape} rewards, prompts × rollouts, but those given are {shape}; make it "
            "from their rewards"
        )
    kept = ~np.isnan(law.rewards_PK).any(axis=1)
    own = replace(law, rewards_PK=law.rewards_PK[kept], log_ratios_PK=law.log_ratios_PK[kept])
    if not (np.ptp(own.rewards_PK, axis=1) > 0).any():
        raise DataError("no prompt has two different rewards, so there is nothing to learn; use other prompts or more")
    return own, kept


@contextmanager
def _callers_randomness() -> Iterator[None]:
    """Give Python's, NumPy's and PyTorch's generators back the states that they have: a training seeds them."""
    import torch

    states = random.getstate(), np.random.get_state()  # noqa: NPY002  transformers seeds the old one
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _train(model: AnyModel, folder: str | Path | None, seed: int, train: Callable[[str, Job], History]) -> Policy:
    """Return the policy that ``train`` makes of the reference, a folder or hub id; a loaded one is written first."""
    own = None if folder is None else Path(folder).absolute()
    if own is not None:
        check_folder(own)
        own.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=own and own.parent) as temporary, progress_line("fit") as report, _callers_randomness():
        place = Path(temporary)
        if isinstance(model, str | Path):
            reference = convert(str(model))
        else:
            reference = str(place / "reference")
            for part in Policy.of(model):
                with loading("cannot train the loaded model, which cannot be saved"), saving(place):
                    part.save_pretrained(reference)
        target = Target(place / "training", own or place / "policy", seed, Compute(), ())
        with target.job(report) as job:
            log = train(reference, job)
        policy = Policy.of(target.model)
    if log[-1].get("strength") == 0:
        warnings.warn(
            "what was learned gains nothing significant on held-out prompts, so the policy is the reference; use more "
            "prompts, or another learning_rate",
            stacklevel=3,
        )
    return policy
