"""Solvers: one file each, with its settings and its loss or advantages. `SOLVERS` names the files."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from infalign.settings import one_of
from infalign.training.solvers.base import Solver

SOLVERS = (
    "qrpo",
    "resample",
    "ipo",
    "bon_sft",
    "bonbon",
    "rloo",
    "ppo",
    "grpo",
    "maxk",
    "bond",
)


def _settings(module: str) -> type[Solver]:
    found: type[Solver] = import_module(f"{__name__}.{module}").Settings
    return found


KINDS = {module.replace("_", "-"): _settings(module) for module in SOLVERS}
if TYPE_CHECKING:
    AnySolver = Solver
else:
    AnySolver = one_of(KINDS, key="solver", default="qrpo")


def read_solver(**settings: Any) -> Solver:
    """Return the settings of the solver that ``solver`` names, checked as in a recipe. Raises pydantic's error."""
    return TypeAdapter(AnySolver).validate_python(settings)
