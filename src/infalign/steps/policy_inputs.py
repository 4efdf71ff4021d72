"""What the policies of a run are trained from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from infalign.core.sequences import Lazy
from infalign.core.storage import read_table
from infalign.data.messages import from_cell
from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.models.tokenizers import load_tokenizer
from infalign.recipe.stored_laws import read_law
from infalign.rewards.sources import Scorer
from infalign.steps.run import Run
from infalign.steps.samples import StoredRollouts
from infalign.training.solvers.base import Inputs, Solver


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What the policies of a run are trained from."""

    reference: str
    reward: Scorer
    stored: StoredRollouts
    procedure: Served
    max_new_tokens: int
    drawn_as_trained: bool  # whether the engine's log-probabilities equal those that training in float32 computes

    @classmethod
    def of(cls, run: Run) -> Self:
        """Return that of a run."""
        recipe, rollout, reward = run.recipe, run.recipe.rollout, run.scorer("reward")
        drawn_as_trained = rollout.engine.is_local and recipe.compute.dtype == "float32"
        return cls(run.reference, reward, run.stored, recipe.procedure, rollout.max_new_tokens, drawn_as_trained)

    def law(self, name: str, policy: Solver) -> Law | None:
        """Return the law of a policy, or that of its teacher, with the prompts in the order of `rows`."""
        if (aim := policy.aim(self.procedure)) is None:
            return None
        prompt_ids, law = read_law(self.stored.layout.law(policy.data_needs.teacher or name), aim)
        place = {prompt_id: i for i, prompt_id in enumerate(prompt_ids)}
        drawn = (prompt_id for part in self.stored.parts for prompt_id in part.table.read().prompt_ids)
        order = [place[prompt_id] for prompt_id in drawn if prompt_id in place]
        return replace(law, log_ratios_PK=law.log_ratios_PK[order], rewards_PK=law.rewards_PK[order])

    @property
    def of_solver(self) -> Inputs:
        """The part that a solver gets."""
        trunks = {"reference": self.reference, "reward": self.reward.model}
        layout = self.stored.layout
        return Inputs(self.reference, layout.tokenizer, self.procedure, trunks, self.rows, self.problem, layout.model)

    def problem(self) -> Any:
        """Return the calibrated prompts and the reward, for on-policy training."""
        from infalign.training.on_policy_trainer import Problem

        layout = self.stored.layout
        prompts = read_table(layout.calibrated, columns=["prompt", "reference_rewards", "columns"])
        return Problem(
            self.reference,
            load_tokenizer(layout.tokenizer, padding_side="left"),
            [row | {"prompt": from_cell(row["prompt"])} for row in prompts.to_pylist()],
            self.reward.load().function,
            self.max_new_tokens,
        )

    def rows(self, policy: Solver) -> Sequence[dict[str, Any]]:
        """Return the rollouts, with the reference's states that the policy or its teacher reads.

        Prompts that the reward leaves out have none. The reference's log-probabilities have the training's precision.
        """
        rows, needs = self.stored.rows(), policy.data_needs
        for name, which in (("states", needs.states), ("teacher_states", needs.teacher_states)):
            if which is not None:
                rows = _add_column(rows, name, self.stored.states(which))
        if (computed := self.logprobs(policy)) is not None:
            logprobs = read_table(self.stored.layout.logprobs(computed), ["logprob"])["logprob"]
            rows = _add_column(rows, "reference_logprob", logprobs.to_pylist())
        rewarded = np.flatnonzero(~np.isnan(self.stored.all_rewards()))
        return Lazy(len(rewarded), lambda i: rows[int(rewarded[i])])

    def logprobs(self, policy: Solver) -> str | None:
        """Return which log-probabilities a policy's training needs instead of the engine's, None for these."""
        if not policy.has_objective or (self.drawn_as_trained and not policy.fit.bf16):
            return None
        of = str(policy.data_needs.states or "tokens")  # what they are computed from
        return f"{of}-bf16" if policy.fit.bf16 else of


def _add_column(rows: Sequence[dict[str, Any]], name: str, values: Sequence[Any]) -> Sequence[dict[str, Any]]:
    return Lazy(len(rows), lambda i: rows[i] | {name: values[i]})
