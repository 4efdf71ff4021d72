"""How policies are evaluated."""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from infalign.errors import ConfigError
from infalign.evaluation.win_rates import rewind_samples
from infalign.method.procedures import RewindAndRepeat, parse_procedure
from infalign.settings import Count, Draws, Settings


def _accepted_by(parse: Callable[[str], object]) -> AfterValidator:
    """Return a check that ``parse`` takes the text, so that its error comes with the key of the recipe."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return text

    return AfterValidator(check)


ProcedureName = Annotated[str, _accepted_by(parse_procedure)]


class Evaluate(Settings):
    """Fresh samples of the base and of every policy on the test prompts."""

    prompts: Annotated[int, Field(ge=2)] = 128
    samples: Draws = 64
    max_n: Count = Field(16, description="Best-of-N and Worst-of-N for all N up to this")
    rewind: ProcedureName = "rewind:0.85:32"
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95

    @model_validator(mode="after")
    def _enough_samples(self) -> "Evaluate":
        if self.max_n > self.samples:
            raise ValueError(f"Best-of-{self.max_n} cannot be estimated from {self.samples} samples")
        rewind = parse_procedure(self.rewind)
        if not isinstance(rewind, RewindAndRepeat):
            raise ValueError(f"`rewind` is spelled rewind:QUANTILE:N, found {self.rewind}")
        if rewind.name != self.rewind:
            raise ValueError(f"write {self.rewind} as {rewind.name}")
        if rewind_samples(rewind) > self.samples:
            raise ValueError(f"{self.rewind} needs {rewind_samples(rewind)} samples, found {self.samples}")
        return self
