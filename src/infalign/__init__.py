"""Align a language model for the way it is served.

Rewards are ranked against the reference policy's own rollouts, the rank is transformed for the
inference-time procedure (Best-of-N, Worst-of-N, …), and any RLHF solver does the rest (InfAlign, ICML 2025).

Axis letters in array names: ``P`` prompts, ``K`` reference rollouts of a prompt, ``M`` policy samples,
``B`` base samples, ``N`` the N of a procedure, ``G`` points of a grid, ``T`` tokens, ``V`` vocabulary.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infalign.calibration import calibrate, win
    from infalign.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN, parse_procedure
    from infalign.reward import CalibratedReward
    from infalign.transforms import Exponential, Identity, Log, parse_transform

__all__ = [
    "BestOfN",
    "CalibratedReward",
    "Exponential",
    "Identity",
    "Log",
    "RewindAndRepeat",
    "Standard",
    "WorstOfN",
    "calibrate",
    "parse_procedure",
    "parse_transform",
    "win",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that ``infalign --help`` waits for neither NumPy nor SciPy."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("infalign")
    if name in __all__:
        for module in ("calibration", "procedures", "reward", "transforms"):
            found = getattr(import_module(f"infalign.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
