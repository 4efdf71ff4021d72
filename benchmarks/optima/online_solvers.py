"""The on-policy solvers, each against the exact optimum of its method on the language model of enumerable.py.

``python benchmarks/optima/online_solvers.py [METHOD …]`` trains all of them, or those that are named, and prints how
far each lands from its optimum, or from where it rests if it has none, and its KL and win rates beside the optimum's.
Some 20 minutes.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import enumerable
import numpy as np
from enumerable import Enumerable
from transformers import AutoModelForCausalLM, AutoTokenizer

from infalign import BestOfN, Exponential, Law, WorstOfN, law_at_kl, tilted
from infalign.training.on_policy_trainer import (
    Problem,
    fit_on_policy,
)  # with BOND's anchor held, which `fit_online` moves
from infalign.training.solvers import bond, read_solver  # whose advantages are proved

EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
BEST, WORST = BestOfN(4), WorstOfN(4)
K = 512  # references a prompt


def references(case: Enumerable, k: int) -> list[list[float]]:
    """Return k sorted reference rewards of each prompt, drawn systematically: any rank is right to 1/k."""
    found = []
    for logprobs, rewards in zip(case.log_reference, case.rewards, strict=True):
        order = rewards.argsort()
        cdf = np.exp(logprobs[order]).cumsum()
        found.append(rewards[order][np.searchsorted(cdf / cdf[-1], (np.arange(k) + 0.5) / k)].tolist())
    return found


def rewarded(case: Enumerable) -> Callable[[list[str], list[str]], list[float]]:
    """Return the reward function of text that the rewards of the harness are."""
    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in case.responses]
    table = {
        (prompt, text): float(reward)
        for prompt, row in zip(enumerable.PROMPTS, case.rewards, strict=True)
        for text, reward in zip(texts, row, strict=True)
    }
    return lambda prompts, responses: [table[pair] for pair in zip(prompts, responses, strict=True)]


@dataclass(frozen=True)
class Method:
    """A solver as it is trained, the shaping and β of its law, what it should learn and how nearly.

    ``optimum`` is the population optimum or, for GRPO, where it rests; ``within`` is in nats.
    """

    solver: Any  # its settings, as a recipe has them
    law: Law | None
    optimum: Callable[[Enumerable], np.ndarray]
    procedure: BestOfN | WorstOfN = BEST
    within: float = 0.01

    @property
    def ascent(self) -> Any:
        """How it climbs."""
        return self.solver.ascent(self.law, self.procedure)


def problem(case: Enumerable) -> Problem:
    """Return what training starts from."""
    return Problem(str(case.folder), left_padding(case), rows(case), rewarded(case), max_new_tokens=2)


class Bond(bond.Settings):
    """bond with an anchor that follows as fast as one likes; at 0 it takes the first step for ever."""

    anchor_rate: float = 0.0

    def ascent(self, law: Law | None, procedure: Any) -> Any:
        """Return that of bond, with this anchor."""
        ascent = super().ascent(law, procedure)
        return replace(ascent, trl_options={**ascent.trl_options, "ref_model_mixup_alpha": self.anchor_rate})


def fit(epochs: float) -> Any:
    """Return how these models are trained; an epoch has six steps of 256 responses."""
    return read_solver(beta=1.0, fit={"epochs": epochs, "batch_size": 256, "learning_rate": 3e-3}).fit


def law(shaping: str, beta: float) -> Law:
    """Return a law of two rollouts, at which on-policy solvers do not look, but at its shaping and β."""
    return tilted([[0.0, 1.0]], shaping, beta=beta)


def solver(name: str, epochs: float) -> Any:
    """Return a solver on exp:10; its own β is not looked at, but the method's."""
    return read_solver(solver=name, transform="exp:10", beta=1.0, fit=fit(epochs))


def steep(case: Enumerable) -> np.ndarray:
    """Return its optimum."""
    return enumerable.tilted(case, EXP10, BETA10)


def maxk(procedure: BestOfN | WorstOfN) -> Method:
    """Return maxk at a KL weight of 0.2, which goes with the win rate itself."""
    climber = read_solver(solver="maxk", beta=1.0, fit=fit(160))
    return Method(climber, law("raw", 0.2), lambda case: enumerable.optimum(case, procedure, 0.2), procedure)


STEEP = law("exp:10", BETA10 / EXP10.scale)
METHODS = {
    "rloo exp:10": Method(solver("rloo", 80), STEEP, steep),
    "ppo exp:10": Method(solver("ppo", 240), STEEP, steep),
    "maxk best-of-4": maxk(BEST),
    "maxk worst-of-4": maxk(WORST),
    "bond, one step": Method(
        Bond(solver="bond", kl_budget=1.0, fit=fit(80)),
        None,
        lambda case: enumerable.bond_step(case, case.log_reference, 1.0),
    ),
    "grpo, Φ kept": Method(
        solver("grpo", 80),
        STEEP,
        # the group's mean has the response itself in it, which takes an eighth of the reward's gradient
        lambda case: enumerable.token_tilted(case, enumerable.transformed(case, EXP10), BETA10 / EXP10.scale * 8 / 7),
    ),
}


def trained(case: Enumerable, method: Method, folder: Path) -> np.ndarray:
    """Train from the reference and return the exact law of the policy that is saved."""
    fit_on_policy(problem(case), method.ascent, method.solver.fit, enumerable.job_in(folder))
    return case.laws(AutoModelForCausalLM.from_pretrained(folder / "policy"))


def left_padding(case: Enumerable) -> Any:
    """Return the tokenizer, set for generation."""
    return AutoTokenizer.from_pretrained(case.folder, padding_side="left")


def rows(case: Enumerable) -> list[dict[str, Any]]:
    """Return the prompts with their references, 64 times over."""
    pairs = zip(enumerable.PROMPTS, references(case, K), strict=True)
    return [{"prompt": prompt, "reference_rewards": rewards} for prompt, rewards in pairs] * 64


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
