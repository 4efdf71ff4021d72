"""The evaluation of a run: the scored samples of its models, and the estimates made from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from infalign.core.storage import read_table
from infalign.evaluation.samples import Samples
from infalign.evaluation.settings import Confidence
from infalign.evaluation.win_rates import win_rates_of
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Procedure, RewindAndRepeat, Served, Standard, WorstOfN
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """The samples of a run's models and their scores, as far as they exist."""

    layout: Layout
    sources: tuple[str, ...]  # reward sources: the first one selects the served response, and each of them judges
    samples: int  # per prompt and model
    intervals: Confidence
    procedure: Served  # the procedure that policies are trained for
    rewind: RewindAndRepeat
    max_n: int
    held_out_likelihood: bool

    @classmethod
    def of(cls, recipe: Recipe, layout: Layout) -> "ScoredSamples":
        """Return the evaluation of a recipe's run."""
        evaluate = recipe.evaluate
        return cls(
            layout,
            tuple(recipe.rewards),
            evaluate.samples,
            Confidence(evaluate.confidence, recipe.seed),
            recipe.procedure,
            recipe.rewind,
            evaluate.max_n,
            evaluate.held_out_likelihood,
        )

    def column(self, model: str, column: str) -> Array:
        """Return a column of a model's evaluation scores as an array of shape (P, M)."""
        table = read_table(self.layout.evaluation(model) / "scores.parquet", columns=[column])
        values: Array = table[column].to_numpy().astype(float, copy=False).reshape(-1, self.samples)
        return values

    def kl(self, model: str) -> Array:
        """Return a model's KL to the reference on each prompt, (P,): the mean over those samples that have one."""
        return np.asarray(np.nanmean(self.column(model, "kl"), axis=1))

    def judged_by(self, source: str, model: str) -> Samples:
        """Return a model's samples on test prompts: selected by ``reward``, judged by ``source``, with lengths."""
        return Samples(*(self.column(model, column) for column in ("reward", source, "length")))

    def wins(self, model: str, served: Sequence[Procedure]) -> dict[str, dict[str, Array]]:
        """Return win rates against the reference under the same procedure: by judge and procedure's name, (P,) each."""
        found: dict[str, dict[str, Array]] = {}
        for judge in self.sources:
            rates = win_rates_of(self.judged_by(judge, model), self.judged_by(judge, "reference"), served)
            found[judge] = dict(zip((procedure.name for procedure in served), rates, strict=True))
        return found

    def procedures(self) -> list[Procedure]:
        """Return the evaluated procedures: standard, Best- and Worst-of-N up to max_n, rewind, the recipe's own."""
        many = range(2, self.max_n + 1)
        found: list[Procedure] = [Standard(), *map(BestOfN, many), *map(WorstOfN, many), self.rewind, self.procedure]
        return list({procedure.name: procedure for procedure in found}.values())

    def drawn_procedures(self) -> list[Served]:
        """Return the procedures whose win rates are plotted against KL: the recipe's, standard, rewind."""
        found: list[Served] = [self.procedure, Standard(), self.rewind]
        return list({procedure.name: procedure for procedure in found}.values())
