"""Align a language model for the way it is served.

Rewards are ranked against the reference policy's own rollouts, the rank is transformed for the
inference-time procedure (Best-of-N, Worst-of-N, …), and any RLHF solver does the rest (InfAlign, ICML 2025).

Axis letters in array names: ``P`` prompts, ``K`` reference rollouts of a prompt, ``M`` policy samples,
``B`` base samples, ``N`` the N of a procedure, ``G`` points of a grid, ``T`` tokens, ``V`` vocabulary.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infalign.calibration import calibrate, win
    from infalign.finite import FiniteModel, finite_rollouts
    from infalign.optimum import optimal
    from infalign.procedures import (
        BestOfN,
        BestOfPoisson,
        Mixture,
        OrderStatistics,
        RankDensity,
        RewindAndRepeat,
        Standard,
        WorstOfN,
        kth_best,
        parse_procedure,
        top_k,
    )
    from infalign.reward import CalibratedReward
    from infalign.theory import aligned_law, law_at_kl
    from infalign.transforms import Exponential, Function, Identity, Log, Power, Tabulated, parse_transform

__all__ = [
    "BestOfN",
    "BestOfPoisson",
    "CalibratedReward",
    "Exponential",
    "FiniteModel",
    "Function",
    "Identity",
    "Log",
    "Mixture",
    "OrderStatistics",
    "Power",
    "RankDensity",
    "RewindAndRepeat",
    "Standard",
    "Tabulated",
    "WorstOfN",
    "aligned_law",
    "calibrate",
    "finite_rollouts",
    "kth_best",
    "law_at_kl",
    "optimal",
    "parse_procedure",
    "parse_transform",
    "top_k",
    "win",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that ``infalign --help`` waits for neither NumPy nor SciPy."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("infalign")
    if name in __all__:
        for module in ("calibration", "procedures", "transforms", "theory", "reward", "optimum", "finite"):
            found = getattr(import_module(f"infalign.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
