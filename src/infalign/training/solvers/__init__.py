"""Solvers: one file each, with its settings and its loss or advantages. `SOLVERS` names the files."""

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from infalign.core.settings import kinds_in, one_of
from infalign.training.solvers.base import Solver

SOLVERS = (
    "qrpo",
    "resample",
    "ipo",
    "bon_sft",
    "bonbon",
    "distil",
    "rloo",
    "ppo",
    "grpo",
    "maxk",
    "bond",
)


KINDS: dict[str, type[Solver]] = kinds_in(__name__, SOLVERS)
if TYPE_CHECKING:
    AnySolver = Solver
else:
    AnySolver = one_of(KINDS, key="solver", default="qrpo")
ADAPTER: TypeAdapter[Solver] = TypeAdapter(AnySolver)


def read_solver(**settings: Any) -> Solver:
    """Return the settings of the solver that ``solver`` names, checked as in a recipe. Raises pydantic's error."""
    return ADAPTER.validate_python(settings)
