"""Solvers, by the names that recipes give them; most are a file each, with settings and loss or advantages."""

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from infalign.core.settings import one_of
from infalign.training.solvers import bond, distil, maxk, on_policy, pairs, ppo, qrpo, resample, snips
from infalign.training.solvers.base import Solver

KINDS: dict[str, type[Solver]] = {
    "qrpo": qrpo.Settings,
    "snips": snips.Settings,
    "resample": resample.Resample,
    "ipo": pairs.Ipo,
    "bon-sft": resample.BonSft,
    "bonbon": pairs.Bonbon,
    "distil": distil.Settings,
    "rloo": on_policy.Rloo,
    "ppo": ppo.Settings,
    "grpo": on_policy.Grpo,
    "maxk": maxk.Settings,
    "bond": bond.Settings,
}
if TYPE_CHECKING:
    AnySolver = Solver
else:
    AnySolver = one_of(KINDS, key="solver", default="qrpo", what="solver")


def read_solver(**settings: Any) -> Solver:
    """Return the settings of the solver that ``solver`` names, checked as in a recipe. Raises pydantic's error."""
    return TypeAdapter(AnySolver).validate_python(settings)
