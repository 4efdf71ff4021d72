"""Recipes: typed settings of a run."""

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from infalign.data.sources import Data
from infalign.errors import ConfigError, DataError
from infalign.evaluation.settings import Evaluate, ProcedureName, _accepted_by
from infalign.method.procedures import BestOfN, Procedure, RewindAndRepeat, WorstOfN, parse_procedure
from infalign.method.shapings import Ranked, parse_shaping
from infalign.models.settings import PolicyModel
from infalign.rewards.settings import RewardSource
from infalign.sampling.settings import Rollout
from infalign.settings import Count, Draws, Name, Positive, Settings
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal
from infalign.training.settings import Fit, RankModel

TransformName = Annotated[str, _accepted_by(parse_shaping)]
TO_BEST_OF_N = ("bon-sft", "bonbon")  # solvers that aim at Best-of-n and have n for their strength
ON_POLICY = ("rloo", "ppo", "grpo", "maxk", "bond")
TAKES_PREDICTED_RANKS = ("rloo", "ppo", "grpo")  # they look at one reward a response, and at no reference rewards
OWN_TRANSFORM = {"bon-sft": "log", "bonbon": "log", "bond": "log", "ipo": "identity", "maxk": "identity"}
TAKEN = {"reference", "reward", "judge", "gold", "rank"}  # names of models that a run has besides its policies


class Policy(Settings):
    """One aligned policy: a solver, a transformation and its strength: a KL budget, the paper's β, or Best-of-n's n.

    ``ipo`` optimises the identity transformation, and τ is its β. ``bon-sft`` and ``bonbon`` aim at Best-of-n, which is
    the transformation log at β = 1/(n − 1), a KL of log n − (n − 1)/n nats. ``maxk`` climbs the win rate of the
    recipe's procedure itself and takes no transformation. ``bond`` has no β: it goes on until it has spent the budget.
    """

    solver: Literal["qrpo", "resample", "ipo", "bon-sft", "bonbon", "rloo", "ppo", "grpo", "maxk", "bond"] = "qrpo"
    transform: TransformName = Field(
        default_factory=lambda settings: OWN_TRANSFORM.get(str(settings.get("solver")), "identity"),
        description="of the rank; or raw, raw-prompt, par, lsc:0.85; default identity, or the solver's own",
    )
    kl_budget: Positive | None = Field(None, description="nats a response; the theory gives β")
    beta: Positive | None = Field(None, description="the paper's β, for the paper's raw Φ")
    n: Draws | None = Field(None, description="the n of Best-of-n (bon-sft, bonbon)")
    length_averaged: bool = Field(False, description="log-ratios a token, as TRL has them (ipo)")
    released_code: bool = Field(False, description="the loss of the authors' code, not of the paper (bonbon)")
    shipped: bool = Field(False, description="TRL's default settings, which replace Φ by another (grpo)")
    stored: bool = Field(False, description="one outer iteration on the K rollouts, which are its groups (grpo)")
    generations: Draws = Field(8, description="completions a prompt and step (on-policy solvers)")
    ranks: Literal["rollouts", "model"] = Field(
        "rollouts", description="model: as `rank_model` predicts them, on all training prompts (rloo, ppo, grpo)"
    )
    fit: Fit = Fit()

    @property
    def method(self) -> str:
        """What it optimises and by which solver: ``exp:10 (qrpo)``; a solver with an objective of its own: ``maxk``."""
        options = ("length_averaged", "released_code", "shipped", "stored")
        said = " ".join([self.solver, *(name.replace("_", "-") for name in options if getattr(self, name))])
        return said if self.solver in OWN_TRANSFORM else f"{self.transform} ({said})"

    @model_validator(mode="after")
    def _one_weight(self) -> "Policy":
        if self.solver in ON_POLICY and not self.stored and self.fit.batch_size % self.generations:
            raise ValueError(f"fit.batch_size {self.fit.batch_size} is no multiple of generations {self.generations}")
        if self.solver in TO_BEST_OF_N:
            if self.n is None or self.kl_budget is not None or self.beta is not None:
                raise ValueError(f"the strength of {self.solver} is n: give n, and neither kl_budget nor beta")
            return self
        if (self.kl_budget is None) == (self.beta is None):
            raise ValueError("give exactly one of kl_budget, beta")
        if self.solver == "bond" and self.beta is not None:
            raise ValueError("bond has no beta: give kl_budget, at which it stops")
        if self.solver == "bond" and self.fit.lora is not None:
            raise ValueError("bond moves a whole model as its anchor, not an adapter: leave fit.lora out")
        shaping = parse_shaping(self.transform)
        if self.kl_budget is not None and isinstance(shaping, Ranked):
            try:
                law_at_kl(shaping.transform, kl=self.kl_budget)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _of_its_solver(self) -> "Policy":
        own = OWN_TRANSFORM.get(self.solver, self.transform)
        if self.transform != own:
            raise ValueError(f"{self.solver} has the transformation {own}, not {self.transform}; leave transform out")
        for option, solvers in (
            ("n", TO_BEST_OF_N),
            ("length_averaged", ("ipo",)),
            ("released_code", ("bonbon",)),
            ("shipped", ("grpo",)),
            ("stored", ("grpo",)),
        ):
            if getattr(self, option) and self.solver not in solvers:
                raise ValueError(f"{option} is for the solver {' or '.join(solvers)}, found {self.solver}")
        return self

    @model_validator(mode="after")
    def _can_predict_ranks(self) -> "Policy":
        if self.ranks == "model":
            if self.solver not in TAKES_PREDICTED_RANKS or self.stored:
                found = "stored rollouts" if self.stored else self.solver
                raise ValueError(
                    f"ranks: model is for {', '.join(TAKES_PREDICTED_RANKS)} on fresh responses, found {found}"
                )
            if not isinstance(parse_shaping(self.transform), Ranked):
                raise ValueError(f"ranks: model needs a transformation of the rank, and {self.transform} is none")
        return self


class Compute(Settings):
    """The machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    processes: Count = Field(1, description="worker processes for rollouts and models trained side by side (CPU)")
    threads: Count | None = Field(None, description="torch threads a process; default: torch decides")


class Recipe(Settings):
    """A whole run."""

    run_dir: Annotated[str, Field(min_length=1)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    procedure: ProcedureName = Field("best-of-4", description="how the policy will be served")
    data: Data
    policy: PolicyModel
    reward: RewardSource
    judge: RewardSource = Field(description="only evaluates; never seen in training")
    gold: RewardSource | None = Field(None, description="a second judge: the truth, where it is known")
    rank_model: RankModel | None = Field(None, description="learns Ĉ from the rollouts, for policies with ranks: model")
    rollout: Rollout = Rollout()
    policies: Annotated[dict[Name, Policy], Field(min_length=1)]
    evaluate: Evaluate = Evaluate()
    compute: Compute = Compute()
    report_to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(
        ["tensorboard"], description="where training metrics go besides the console"
    )

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        procedure = parse_procedure(self.procedure)
        if self.procedure != procedure.name or self.procedure in ("best-of-1", "worst-of-1"):
            known = "standard" if self.procedure.endswith("-of-1") else procedure.name
            raise ValueError(f"write the procedure {self.procedure} as {known}")
        if isinstance(procedure, (BestOfN, WorstOfN)) and procedure.n > self.evaluate.max_n:
            raise ValueError(f"evaluate.max_n is {self.evaluate.max_n}, below the N of {self.procedure}")
        if isinstance(procedure, RewindAndRepeat):
            if self.procedure != self.evaluate.rewind:
                raise ValueError(
                    f"evaluate.rewind is {self.evaluate.rewind}; it must be the procedure, {self.procedure}"
                )
        else:
            try:
                procedure.weights(np.arange(self.evaluate.samples)[None])
            except DataError as error:
                raise ValueError(f"evaluate.samples: {error}") from error
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if self.policy.scratch is not None and longest > self.policy.scratch.context:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}, and policy.scratch.context only "
                f"{self.policy.scratch.context}"
            )
        for name, policy in self.policies.items():
            if policy.n is not None and policy.n > self.rollout.k:
                raise ValueError(f"policies.{name}: the best of {policy.n} needs a rollout.k of at least {policy.n}")
            if policy.stored and policy.fit.batch_size % self.rollout.k:
                raise ValueError(
                    f"policies.{name}: fit.batch_size {policy.fit.batch_size} is no multiple of rollout.k "
                    f"{self.rollout.k}, its group"
                )
            if policy.ranks == "model" and self.rank_model is None:
                raise ValueError(f"policies.{name}: ranks: model needs the recipe's `rank_model`; add it, with `fit`")
            if policy.solver == "maxk":
                self._can_climb(name, policy, procedure)
        if taken := TAKEN & self.policies.keys():
            raise ValueError(f"a policy cannot be called {', '.join(sorted(taken))}, as another model of the run is")
        return self

    def _can_climb(self, name: str, policy: Policy, procedure: Procedure) -> None:
        """Raise ValueError unless maxk can estimate the gradient of ``procedure``."""
        if not isinstance(procedure, (BestOfN, WorstOfN)):
            raise ValueError(
                f"policies.{name}: maxk climbs best-of-N and worst-of-N, and the procedure is {procedure.name}"
            )
        if min(policy.generations, self.rollout.k) < procedure.n:
            raise ValueError(
                f"policies.{name}: {procedure.name} needs generations and rollout.k of at least {procedure.n}, found "
                f"{policy.generations} and {self.rollout.k}"
            )
        if policy.kl_budget is not None:
            try:
                optimal(procedure, kl=policy.kl_budget)
            except ConfigError as error:
                raise ValueError(f"policies.{name}: {error}") from error
