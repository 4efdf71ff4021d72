"""The on-policy solvers, each against the exact optimum of its method on the language model of enumerable.py.

``python benchmarks/optima/online_solvers.py [METHOD …]`` calls `fit_online` for all of them, or those that are named,
and prints how far each lands from its optimum, or from where it rests if it has none, and its KL and win rates beside
the optimum's. Some 20 minutes. BOND, whose anchor `fit_online` moves, is in tests/training/test_online.py.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import enumerable
import numpy as np
from enumerable import Enumerable
from transformers import AutoTokenizer

from infalign import BestOfN, Exponential, WorstOfN, fit_online, law_at_kl, tilted

EXP10 = Exponential(10)
BETA10 = law_at_kl(EXP10, kl=1.0).beta
BEST, WORST = BestOfN(4), WorstOfN(4)
K, COPIES = 512, 64  # references of a prompt, and how often each prompt is asked in an epoch


def references(case: Enumerable, k: int) -> list[list[float]]:
    """Return k sorted reference rewards of each prompt, drawn systematically: any rank is right to 1/k."""
    found = []
    for logprobs, rewards in zip(case.log_reference, case.rewards, strict=True):
        order = rewards.argsort()
        cdf = np.exp(logprobs[order]).cumsum()
        found.append(rewards[order][np.searchsorted(cdf / cdf[-1], (np.arange(k) + 0.5) / k)].tolist())
    return found


def rewarded(case: Enumerable) -> Callable[[list[Any], list[str]], list[float]]:
    """Return the reward function of text that the rewards of the harness are."""
    tokenizer = AutoTokenizer.from_pretrained(case.folder)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in case.responses]
    table = {
        (prompt, text): float(reward)
        for prompt, row in zip(enumerable.PROMPTS, case.rewards, strict=True)
        for text, reward in zip(texts, row, strict=True)
    }
    return lambda prompts, responses: [
        table[prompt[-1]["content"], text] for prompt, text in zip(prompts, responses, strict=True)
    ]


@dataclass(frozen=True)
class Method:
    """A solver, how long it is trained, shaping and β of its law, what it should learn and how nearly.

    An epoch has six steps of 256 responses. ``optimum`` is the population optimum or, for GRPO, where it rests;
    ``within`` is in nats.
    """

    solver: str
    epochs: float
    shaping: str
    beta: float  # the trainer's
    optimum: Callable[[Enumerable], np.ndarray]
    procedure: BestOfN | WorstOfN = BEST
    within: float = 0.01


def steep(case: Enumerable) -> np.ndarray:
    """Return the optimum of exp:10."""
    return enumerable.tilted(case, EXP10, BETA10)


def maxk(procedure: BestOfN | WorstOfN) -> Method:
    """Return maxk at a KL weight of 0.2, which goes with the win rate itself."""
    return Method("maxk", 160, "raw", 0.2, lambda case: enumerable.optimum(case, procedure, 0.2), procedure)


BETA = BETA10 / EXP10.scale
METHODS = {
    "rloo exp:10": Method("rloo", 80, "exp:10", BETA, steep),
    "ppo exp:10": Method("ppo", 240, "exp:10", BETA, steep),
    "maxk best-of-4": maxk(BEST),
    "maxk worst-of-4": maxk(WORST),
    "grpo, Φ kept": Method(
        "grpo",
        80,
        "exp:10",
        BETA,
        # the group's mean has the response itself in it, which takes an eighth of the reward's gradient
        lambda case: enumerable.token_tilted(case, enumerable.transformed(case, EXP10), BETA * 8 / 7),
    ),
}


def trained(case: Enumerable, method: Method, **settings: Any) -> np.ndarray:
    """Return the exact law of what `fit_online` makes of the reference."""
    law = tilted(references(case, K) * COPIES, method.shaping, beta=method.beta)
    fit = {"epochs": method.epochs, "batch_size": 256, "learning_rate": 3e-3, "max_new_tokens": 2} | settings
    how = {"solver": method.solver, "procedure": method.procedure.name} | fit
    return case.laws(fit_online(str(case.folder), [*enumerable.PROMPTS] * COPIES, rewarded(case), law, **how).model)


def main() -> None:
    """Train every method, or those that are named, and print the table."""
    enumerable.print_table(METHODS, trained, sys.argv[1:])


if __name__ == "__main__":
    main()
