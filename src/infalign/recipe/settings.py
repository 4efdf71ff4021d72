"""Recipes: the settings of a whole run, and the checks across its sections."""

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from infalign.core.errors import DataError
from infalign.core.settings import Name, Settings
from infalign.data.sources import Data
from infalign.evaluation.settings import Evaluate, ProcedureSetting
from infalign.method.procedures import BestOfN, Extreme, RewindAndRepeat, rewinds
from infalign.models.conversion import locate_model
from infalign.models.settings import Compute, Model, PolicyModel
from infalign.rewards.settings import RewardSource
from infalign.sampling.settings import Rollout
from infalign.training.solvers import AnySolver


class Recipe(Settings):
    """A whole run."""

    run_dir: Annotated[str, Field(min_length=1)] = Field(
        description="the folder for everything that the run makes; new or empty"
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(0, description="of splits, models, rollouts and the bootstrap")
    procedure: ProcedureSetting = Field(
        BestOfN(4),
        description="how the policy is served: best-of-4, worst-of-4, mine.py:Mine, standard, …; N ≤ 100,000",
    )
    data: Data
    policy: PolicyModel
    reward: RewardSource
    judge: RewardSource | None = Field(None, description="only evaluates. Without a judge, the reward judges")
    gold: RewardSource | None = Field(None, description="a second judge: the truth, where it is known")
    rollout: Rollout = Rollout()
    policies: Annotated[dict[Name, AnySolver], Field(min_length=1)] = Field(
        description="the policies to train and compare, by name"
    )
    evaluate: Evaluate = Evaluate()
    compute: Compute = Compute()
    allow_worthless: bool = Field(
        False, description=("continue if no prompt's rollouts differ in reward, or a policy equals the reference")
    )
    report_to: list[Literal["tensorboard", "trackio", "wandb", "mlflow"]] = Field(
        ["tensorboard"], description="where training metrics go besides the console and metrics.jsonl"
    )

    @model_validator(mode="after")
    def _fill_in_choices(self) -> "Recipe":
        """Give trainings the usual fit, and evaluation a rewinding procedure, where the recipe has none."""
        pretrained = self.policy.model is not None
        filled: dict[str, Any] = {"evaluate": self.evaluate.with_rewind(self.procedure)}
        for name, section in self.models.items():
            if section.fit is not None:
                begins_new = section.model is None and (not pretrained or section.scratch is not None)
                fit = section.fit.with_learning_rate(pretrained=not begins_new, adapter=section.fit.lora is not None)
                filled[name] = section.model_copy(update={"fit": fit})
        policies = self.policies.items()
        filled["policies"] = {name: policy.with_usual_fit(pretrained=pretrained) for name, policy in policies}
        return self.model_copy(update=filled)

    @property
    def rewind(self) -> RewindAndRepeat:
        """The rewinding procedure that evaluation measures."""
        assert self.evaluate.rewind is not None
        return self.evaluate.rewind

    @property
    def rewards(self) -> dict[str, RewardSource]:
        """The reward sources that evaluation uses: ``reward``, and ``judge`` and ``gold`` if there are any."""
        sources = {"reward": self.reward, "judge": self.judge, "gold": self.gold}
        return {name: source for name, source in sources.items() if source is not None}

    @property
    def judge_learns(self) -> bool:
        """Whether ``judge`` or ``gold`` learns from pairs, which are then kept from the reward and the policies."""
        return any(source is not None and source.trained for source in (self.judge, self.gold))

    @property
    def models(self) -> dict[str, Model]:
        """The models that a recipe may name or train, besides its policies."""
        return {"policy": self.policy, **self.rewards}

    @property
    def named_models(self) -> dict[str, str]:
        """The folder, GGUF or hub id that a section's ``model`` names, by section; a package's folder is found."""
        return {name: locate_model(section.model) for name, section in self.models.items() if section.model}

    def machine_warnings(self) -> list[str]:
        """Return warnings about the machine: torch is loaded only where something is computed in bfloat16."""
        fits = [*(model.fit for model in self.models.values()), *(policy.fit for policy in self.policies.values())]
        mixed = any(fit is not None and fit.bf16 for fit in fits)
        if not (mixed or self.compute.dtype == "bfloat16") or not self.compute.imitates_bfloat16():
            return []
        return [
            "this machine emulates bfloat16, which is slower than float32; set compute.dtype to float32 and "
            "fit.bf16 to false"
        ]

    @model_validator(mode="after")
    def _served_and_evaluated(self) -> "Recipe":
        procedure = self.procedure
        if (self.evaluate.truth or "reward") not in self.rewards:
            raise ValueError(f"evaluate.truth is {self.evaluate.truth}, but the recipe has no {self.evaluate.truth}")
        if isinstance(procedure, Extreme) and procedure.n > self.evaluate.max_n:
            raise ValueError(f"evaluate.max_n ({self.evaluate.max_n}) must be at least the N of {procedure.name}")
        if rewinds(procedure):
            if procedure != self.rewind:
                raise ValueError(f"evaluate.rewind is {self.rewind.name}; it must be the procedure, {procedure.name}")
            self.evaluate.check_rewind()
        else:
            try:
                procedure.weights(np.arange(self.evaluate.samples)[None])
            except DataError as error:
                raise ValueError(f"evaluate.samples: {error}") from error
        return self

    @model_validator(mode="after")
    def _prompts_fit(self) -> "Recipe":
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        for name, model in self.models.items():
            if model.scratch is not None and longest > model.scratch.context:
                raise ValueError(
                    f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}, but {name}.scratch.context is "
                    f"only {model.scratch.context}"
                )
        return self

    @model_validator(mode="after")
    def _solvers_can_work(self) -> "Recipe":
        has_reward_model = self.reward.is_classifier and self.reward.head is None
        for name, policy in self.policies.items():
            try:
                policy.find_teacher(self.policies)
                policy.check(self.procedure, self.rollout.k, has_reward_model=has_reward_model)
            except ValueError as error:
                raise ValueError(f"policies.{name}: {error}") from error
        if taken := {"reference", "reward", "judge", "gold", "sft"} & self.policies.keys():
            raise ValueError(f"a policy cannot be named {', '.join(sorted(taken))}, which the run uses itself")
        return self
