"""The evaluation of a run: the scored samples of its models, and the estimates made from them."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from infalign.core.errors import ConfigError, DataError
from infalign.core.storage import read_table
from infalign.evaluation.intervals import Confidence
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates_of
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Procedure, RankProcedure, Standard, WorstOfN
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.recipe.stored_laws import reference_rewards
from infalign.report.equal_kl import SMALLEST
from infalign.theory.aims import Aim
from infalign.theory.law import RankLaw
from infalign.training.solvers.base import KL_TOLERANCE, Solver


@dataclass(frozen=True, slots=True)
class StoredLaw:
    """The rates of right responses (P,) of a law on stored rewards of 0 and 1, and of the reference."""

    rate_P: Array
    reference_P: Array

    def win_rate(self, procedure: RankProcedure) -> float:
        """Return ½ and by how much more often what is served is right than the reference's."""
        ours, theirs = (1.0 - procedure.distortion(1.0 - rate_P) for rate_P in (self.rate_P, self.reference_P))
        return 0.5 + float(np.mean(ours - theirs))


class ScoredSamples:
    """The samples of a run's models and their scores, as far as they exist, to prompts that no source leaves out."""

    def __init__(self, recipe: Recipe, layout: Layout) -> None:
        evaluate = recipe.evaluate
        self.layout, self.samples = layout, evaluate.samples  # per prompt and model
        self.sources = tuple(recipe.rewards)  # the first one selects the served response, and each of them judges
        self.intervals = Confidence(seed=recipe.seed)
        self.procedure, self.rewind, self.max_n = recipe.procedure, recipe.rewind, evaluate.max_n
        self.truth = evaluate.truth or "reward"  # the source whose rewards say which responses are right
        self.threshold = evaluate.threshold
        self._stored_laws = dict[Aim, StoredLaw | None]()

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """Which test prompts have rewards by all sources, as the reference's samples show. DataError if none has."""
        rewards_SPM = np.array([self._every_row("reference", source) for source in self.sources])
        kept: NDArray[np.bool_] = ~np.isnan(rewards_SPM).any(axis=(0, 2))
        if not kept.any():
            raise DataError(f"{' or '.join(self.sources)} returned None for every test prompt; return numbers")
        return kept

    def column(self, model: str, column: str) -> Array:
        """Return a column of a model's evaluation scores as an array of shape (P, M).

        Raises DataError if a source leaves a prompt out for this model and not for the reference.
        """
        values = self._every_row(model, column)[self.kept]
        if column in self.sources and (lost := int(np.isnan(values).any(axis=1).sum())):
            raise DataError(
                f"{column} returned None for {lost} of {len(values)} test prompts with the responses of {model}, "
                "but not with the reference's; whether a prompt is left out must not depend on the response"
            )
        return values

    def _every_row(self, model: str, column: str) -> Array:
        table = read_table(self.layout.evaluation(model) / "scores.parquet", columns=[column])
        return np.asarray(table[column].to_numpy(), float).reshape(-1, self.samples)

    def correct(self, model: str) -> Array | None:
        """Return which samples of a model are right, 1 or 0, (P, M); None if rewards are graded without a threshold."""
        rewards_PM = self.column(model, self.truth)
        if self.threshold is not None:
            return (rewards_PM >= self.threshold).astype(float)
        return rewards_PM if np.isin(rewards_PM, (0.0, 1.0)).all() else None

    @property
    def pass_at(self) -> int | None:
        """The k of the pass@k that the procedure serves, if it is Best-of-k with at most as many samples."""
        n = self.procedure.n if isinstance(self.procedure, BestOfN) else None
        return n if n and n <= self.samples else None

    def law_at(self, policy: Solver, kl: float) -> RankLaw | None:
        """Return theory's law of a policy at this KL; None where it has none, or rewards are right or wrong.

        Laws are of continuous ranks; 0/1 rewards tie, and pass@k is exact.
        """
        aim = None if self.right_or_wrong else policy.aim(self.procedure)
        return None if aim is None else aim.rank_law(max(kl, SMALLEST))

    def curve_at(self, policy: Solver, kl: float) -> RankLaw | StoredLaw | None:
        """Return what shows how a policy's gain grows with its KL: `law_at`, for 0/1 rewards the law on stored ones."""
        if not self.right_or_wrong:
            return self.law_at(policy, kl)
        with suppress(ConfigError), warnings.catch_warnings(action="ignore"):  # of a budget that they cannot spend
            if (aim := policy.aim(self.procedure)) is not None:
                return self._stored_law(aim.at(self.procedure, max(kl, SMALLEST), None))
        return None

    def _stored_law(self, aim: Aim) -> StoredLaw | None:
        if aim not in self._stored_laws:
            law = aim.law(self._stored_rewards)
            weights_PK = np.exp(law.log_ratios_PK)
            rate_P = (weights_PK * law.rewards_PK).sum(axis=1) / weights_PK.sum(axis=1)
            spends = abs(law.kl - (aim.kl or 0.0)) <= KL_TOLERANCE * law.kl  # Best-of-n spends what it spends
            self._stored_laws[aim] = StoredLaw(rate_P, law.rewards_PK.mean(axis=1)) if spends else None
        return self._stored_laws[aim]

    @cached_property
    def _stored_rewards(self) -> Array:
        return reference_rewards(self.layout)

    @cached_property
    def right_or_wrong(self) -> bool:
        """Whether rewards are 0 or 1."""
        return bool(np.isin(self.column("reference", "reward"), (0.0, 1.0)).all())

    def kl(self, model: str) -> Array:
        """Return a model's KL to the reference on each prompt, (P,): the mean over those samples that have one."""
        return np.asarray(np.nanmean(self.column(model, "kl"), axis=1))

    def judged_by(self, source: str, model: str) -> Samples:
        """Return a model's samples on test prompts: selected by ``reward``, judged by ``source``, with lengths."""
        return Samples(*(self.column(model, column) for column in ("reward", source, "length")))

    def wins(self, model: str, served: Sequence[Procedure]) -> dict[str, dict[str, Array]]:
        """Return win rates against the reference under the same procedure: by judge and procedure's name, (P,) each."""
        by_judge: dict[str, dict[str, Array]] = {}
        for judge in self.sources:
            rates = win_rates_of(self.judged_by(judge, model), self.judged_by(judge, "reference"), served)
            by_judge[judge] = dict(zip((procedure.name for procedure in served), rates, strict=True))
        return by_judge

    def procedures(self) -> list[Procedure]:
        """Return the evaluated procedures: standard, Best- and Worst-of-N up to max_n, rewind, the recipe's own."""
        many = range(2, self.max_n + 1)
        served: list[Procedure] = [Standard(), *map(BestOfN, many), *map(WorstOfN, many), self.rewind, self.procedure]
        return list({procedure.name: procedure for procedure in served}.values())
