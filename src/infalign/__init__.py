"""Align a language model for the way it is served.

Rewards are ranked against the reference policy's own rollouts, the rank is transformed for the
inference-time procedure (Best-of-N, Worst-of-N, …), and any RLHF solver does the rest (InfAlign, ICML 2025).

Axis letters in array names: ``P`` prompts, ``K`` reference rollouts of a prompt, ``M`` policy samples,
``B`` base samples, ``N`` the N of a procedure, ``G`` points of a grid, ``T`` tokens, ``V`` vocabulary.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infalign.evaluation.group_signal import groups_with_signal
    from infalign.evaluation.measures import measure, paired_differences, pass_at_k, training_worth
    from infalign.evaluation.reward_tables import RewardTable
    from infalign.evaluation.win_rates import win_rates
    from infalign.integrations.logs import read_rewards
    from infalign.method.calibration import calibrate
    from infalign.method.group_advantages import advantages
    from infalign.method.laws import Law, best_of
    from infalign.method.optimum import optimum
    from infalign.method.procedures import (
        BestOfN,
        Mixture,
        OrderStatistics,
        RankDensity,
        RewindAndRepeat,
        WorstOfN,
        parse_procedure,
    )
    from infalign.method.reward import CalibratedReward
    from infalign.method.transforms import Exponential, Function, Tabulated, parse_transform
    from infalign.policies.evaluate import evaluate
    from infalign.policies.score import calibrate_prompts, score
    from infalign.rewards.classifier import ClassifierReward
    from infalign.sampling.sample import Rollouts, sample
    from infalign.steps.whole_run import run
    from infalign.theory.aims import tilted
    from infalign.theory.choose import choose
    from infalign.theory.law import law_at_kl, training_beta
    from infalign.theory.optimum import optimal
    from infalign.training.fit import fit, fit_online

__all__ = [
    "BestOfN",
    "CalibratedReward",
    "ClassifierReward",
    "Exponential",
    "Function",
    "Law",
    "Mixture",
    "OrderStatistics",
    "RankDensity",
    "RewardTable",
    "RewindAndRepeat",
    "Rollouts",
    "Tabulated",
    "WorstOfN",
    "advantages",
    "best_of",
    "calibrate",
    "calibrate_prompts",
    "choose",
    "evaluate",
    "fit",
    "fit_online",
    "groups_with_signal",
    "law_at_kl",
    "measure",
    "optimal",
    "optimum",
    "paired_differences",
    "parse_procedure",
    "parse_transform",
    "pass_at_k",
    "read_rewards",
    "run",
    "sample",
    "score",
    "tilted",
    "training_beta",
    "training_worth",
    "win_rates",
]

PUBLIC = (  # the modules that these are looked for in, the light ones first
    "method.calibration",
    "method.procedures",
    "evaluation.measures",
    "evaluation.reward_tables",
    "integrations.logs",
    "method.transforms",
    "method.reward",
    "method.laws",
    "method.optimum",
    "method.group_advantages",
    "theory.law",
    "theory.optimum",
    "theory.aims",
    "theory.choose",
    "evaluation.win_rates",
    "evaluation.group_signal",
    "rewards.classifier",
    "sampling.sample",
    "policies.score",
    "policies.evaluate",
    "training.fit",
    "steps.whole_run",
)


def __dir__() -> list[str]:
    """Return the public names, without importing any."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that ``infalign --help`` waits for neither NumPy nor SciPy."""
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("infalign")
    if name in __all__:
        for module in PUBLIC:
            found = getattr(import_module(f"infalign.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
