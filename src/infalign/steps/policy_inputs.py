"""What the policies of a run are trained from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from infalign.core.sequences import Lazy
from infalign.core.storage import read_table
from infalign.method.procedures import Served
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.models.settings import Compute
from infalign.recipe.layout import Layout
from infalign.steps.run import Provenance, Run
from infalign.steps.samples import StoredRollouts
from infalign.training.solvers.base import Solver, States
from infalign.training.solvers.offline import TRUNKS, Guide, Offline


class Logprobs(NamedTuple):
    """The reference's log-probabilities of the rollouts as a training computes them: from which states, how precise."""

    states: States | None
    bf16: bool

    def __str__(self) -> str:
        of = "tokens" if self.states is None else str(self.states)
        return f"{of}-bf16" if self.bf16 else of


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What the policies of a run are trained from."""

    reference: str
    provenance: Provenance
    stored: StoredRollouts
    procedure: Served
    max_new_tokens: int
    drawn_as_trained: bool  # whether the engine's log-probabilities equal those that training in float32 computes

    @classmethod
    def of(cls, run: Run) -> PolicyInputs:
        """Return that of a run."""
        recipe, rollout = run.recipe, run.recipe.rollout
        drawn_as_trained = rollout.engine.is_local and recipe.compute.dtype == "float32"
        return cls(
            run.reference, run.provenance, run.stored, recipe.procedure, rollout.max_new_tokens, drawn_as_trained
        )

    @property
    def layout(self) -> Layout:
        """The run directory."""
        return self.stored.layout

    def start(self, policy: Offline, tokenizer: Any, compute: Compute) -> Any:
        """Return what a policy's training starts from: the reference, with an untrained guide if it is to have one."""
        model, _ = load_policy(self.reference, device=compute.torch_device())
        return model if policy.guide is None else self._guided(policy.guide, model, tokenizer)

    def rows(self, policy: Solver) -> Sequence[dict[str, Any]]:
        """Return the rollouts, with the reference's states that the policy or its teacher reads.

        Prompts that the reward leaves out have none. The reference's log-probabilities are those of the training's
        precision.
        """
        rows, needs = self.stored.rows(), policy.data_needs
        for name, which in (("states", needs.states), ("teacher_states", needs.teacher_states)):
            if which is not None:
                rows = _add_column(rows, name, self.stored.states(which))
        computed = self.logprobs(policy)
        if computed is not None:
            found = read_table(self.layout.logprobs(str(computed)), ["logprob"])["logprob"]
            rows = _add_column(rows, "reference_logprob", found.to_pylist())
        rewarded = np.flatnonzero(~np.isnan(self.stored.all_rewards()))
        return Lazy(len(rewarded), lambda i: rows[int(rewarded[i])])

    def logprobs(self, policy: Solver) -> Logprobs | None:
        """Return which log-probabilities a policy's training needs instead of the engine's, None for these."""
        if not isinstance(policy, Offline) or (self.drawn_as_trained and not policy.fit.bf16):
            return None
        return Logprobs(policy.data_needs.states, policy.fit.bf16)

    def _guided(self, guide: Guide, reference: Any, tokenizer: Any) -> Any:
        from infalign.models.guided import GuidedForCausalLM

        if guide.lora is not None:
            return GuidedForCausalLM.with_lora(reference, **guide.lora.model_dump())
        if guide.side is not None:
            side = guide.side.model_dump()
            return GuidedForCausalLM.with_side_network(reference, **side, top_tokens=guide.top_tokens or 0)
        of_run = dict(zip(TRUNKS, (self.reference, self.provenance.reward.model), strict=True))
        trunk = of_run.get(guide.trunk, guide.trunk)
        return add_network_guide(trunk, reference, tokenizer, top_tokens=guide.top_tokens or 0)


def _add_column(rows: Sequence[dict[str, Any]], name: str, values: Sequence[Any]) -> Sequence[dict[str, Any]]:
    return Lazy(len(rows), lambda i: rows[i] | {name: values[i]})
