"""The evaluation's numbers for the trackers of a recipe, beside the metrics of each training."""

from collections.abc import Sequence
from itertools import product

from infalign.recipe.layout import Layout
from infalign.report.results import Results

PROJECT = "infalign"


def track(report_to: Sequence[str], results: Results, layout: Layout) -> None:
    """Send each policy's KL and win rates with their intervals; tensorboard has them in its folder of checkpoints."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # which the trackers ask whether this is the main process
    for kind, name in product(report_to, results["policies"]):
        tracker_class = LOGGER_TYPE_TO_CLASS[kind]
        folder = {"logging_dir": layout.checkpoints(name) / "runs"} if tracker_class.requires_logging_directory else {}
        tracker = tracker_class("evaluation" if folder else PROJECT, **folder)
        tracker.start()
        if not folder:  # the runs of all policies have one name
            tracker.store_init_configuration({"run_dir": str(layout.root), "policy": name})
        tracker.log(measured(results, name), step=0)
        tracker.finish()


def measured(results: Results, name: str) -> dict[str, float]:
    """Return a policy's numbers by name: ``evaluation/kl`` for the mean, ``evaluation/judge/best-of-4/low``, …."""
    policy = results["policies"][name]
    named = {"kl": policy["kl"]} | {
        f"{judge}/{procedure}": e for judge, rates in policy["win_rates"].items() for procedure, e in rates.items()
    }
    parts = {"mean": "", "low": "/low", "high": "/high"}
    return {f"evaluation/{what}{end}": e[part] for what, e in named.items() for part, end in parts.items()}
