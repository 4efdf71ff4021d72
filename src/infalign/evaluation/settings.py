"""How policies are served and evaluated."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from infalign.core.errors import ConfigError
from infalign.core.settings import MAX_DRAWS, Count, Settings, spelled
from infalign.evaluation.win_rates import rewind_samples
from infalign.method.procedures import Extreme, own_spellings, parse_procedure
from infalign.method.procedures.rewind import RewindAndRepeat, Served, distortion, rewinds


def read_procedure(name: str) -> Served:
    """Return the procedure that a recipe spells. Raises ConfigError for another spelling than its name."""
    procedure = parse_procedure(name)
    distortion(procedure)  # a policy is trained for a law
    known = "standard" if isinstance(procedure, Extreme) and procedure.n == 1 else procedure.name
    if name != known and not own_spellings(procedure):
        raise ConfigError(f"write the procedure {name} as {known}")
    return replace(procedure, spelled="") if isinstance(procedure, Extreme) else procedure  # pass@8 is best-of-8


def read_rewind(name: str) -> RewindAndRepeat:
    """Return the procedure that ``rewind`` spells. Raises ConfigError for another family or spelling."""
    procedure = parse_procedure(name)
    if not rewinds(procedure):
        raise ConfigError(f"write `rewind` as rewind:QUANTILE:N; found {name}")
    if procedure.name != name:
        raise ConfigError(f"write {name} as {procedure.name}")
    return procedure


ProcedureSetting = Annotated[Served, *spelled(read_procedure)]
RewindSetting = Annotated[RewindAndRepeat, *spelled(read_rewind)]


class Evaluate(Settings):
    """Fresh samples of the base and of every policy on the test prompts."""

    prompts: Annotated[int, Field(ge=2)] = Field(128, description="maximum number of test prompts")
    samples: Annotated[int, Field(ge=4, le=MAX_DRAWS)] = Field(
        64, description="responses per model and prompt; half of the base policy's calibrate the other half"
    )
    max_n: Count = Field(16, description="evaluate Best-of-N and Worst-of-N for all N up to this")
    rewind: RewindSetting | None = Field(
        None, description="default: the procedure if it rewinds, else what the samples allow"
    )
    truth: Literal["reward", "judge", "gold"] | None = Field(
        None, description="the reward that says what is right, for pass@k; none: the reward, if it is 0 or 1"
    )
    threshold: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, description="for graded rewards: a response is right if `truth` is at least this"
    )

    def with_rewind(self, procedure: Served) -> "Evaluate":
        """Return this with a rewinding procedure: its own, or ``procedure`` if it rewinds, or what samples allow."""
        if self.rewind is not None:
            return self
        half = self.samples // 2
        allowed = RewindAndRepeat(0.85 if half >= 6 else 0.5, min(32, half))
        return self.model_copy(update={"rewind": procedure if rewinds(procedure) else allowed})

    @model_validator(mode="after")
    def _enough_samples(self) -> "Evaluate":
        if self.max_n > self.samples:
            raise ValueError(f"Best-of-{self.max_n} cannot be estimated from {self.samples} samples")
        self.check_rewind()
        return self

    def check_rewind(self) -> None:
        """Raise ValueError if the samples are not enough for the rewinding procedure."""
        if self.rewind is not None and (needed := rewind_samples(self.rewind)) > self.samples:
            raise ValueError(f"{self.rewind.name} needs {needed} samples, found {self.samples}")
