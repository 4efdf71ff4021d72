"""pass@k and its relatives: unbiased for every k up to the samples of a prompt."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError, DataError
from infalign.core.user_code import function_name, is_file
from infalign.method.calibration import Array, as_rewards
from infalign.method.procedures import BestOfN, Procedure, Standard, WorstOfN, parse_procedure
from infalign.method.procedures.majority import MajorityVote

KINDS: dict[str, Callable[[int], Procedure | MajorityVote]] = {
    "pass@": BestOfN,
    "pass^": WorstOfN,
    "avg@": lambda _: Standard(),
    "maj@": MajorityVote,
    "best-of-": BestOfN,
    "worst-of-": WorstOfN,
}


@dataclass(frozen=True, slots=True)
class Metric:
    """How often the response is right that a procedure serves, or its mean reward.

    ``pass@k`` serves the best of k (one of k is right), ``pass^k`` the worst (all k are right), ``avg@k`` any one, and
    ``maj@k`` the answer that most of k give. ``best-of-k``, ``worst-of-k`` and ``avg@k`` take graded rewards too.

    >>> Metric.parse("pass@2").of_prompts([[0, 0, 1, 1], [0, 1, 0, 0]]).round(3)
    array([0.833, 0.5  ])
    """

    name: str
    k: int
    procedure: Procedure | MajorityVote

    @classmethod
    def parse(cls, name: str) -> "Metric":
        """Return the metric that ``name`` spells, or a procedure in a file. Raises ConfigError for another name."""
        if is_file(name):
            return cls(function_name(name), 1, parse_procedure(name))
        match = re.fullmatch(rf"({'|'.join(map(re.escape, KINDS))})([1-9]\d{{0,8}})", name)
        if match is None:
            raise ConfigError(f"unknown metric {name!r}; known: {', '.join(f'{kind}K' for kind in KINDS)}")
        k = int(match[2])
        return cls(name, k, KINDS[match[1]](k))

    def of_prompts(self, correct_PM: ArrayLike, answers_PM: ArrayLike | None = None) -> Array:
        """Return the metric of each prompt, (P,), from M ≥ k responses that are right (1) or not (0).

        It is the mean over all sets of k of the M, so its expectation does not depend on M. ``maj@k`` needs answers,
        as `majority.votes` compares them. Raises DataError for fewer than k responses, and for ``maj@k`` without any.
        """
        correct = np.atleast_2d(as_rewards(correct_PM))
        if correct.shape[1] < self.k:
            raise DataError(f"{self.name} needs {self.k} responses per prompt, found {correct.shape[1]}")
        if not isinstance(self.procedure, MajorityVote):
            weights = self.procedure.weights(correct)
        elif answers_PM is None:
            raise DataError(f"{self.name} needs a column answer that shows which responses agree")
        else:
            weights = self.procedure.weights(answers_PM)
        return np.asarray((weights * correct).sum(axis=1))
