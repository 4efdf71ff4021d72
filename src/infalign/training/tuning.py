"""A fit that tunes itself: the learning rate that a recipe leaves open, found on held-out rollouts."""

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedModel, set_seed

from infalign.core.distributed import is_first
from infalign.core.memory import free_memory
from infalign.core.storage import read_record, remove, write_record
from infalign.method.laws import Law
from infalign.models.settings import ADAPTER_RATE, NEW_WEIGHTS_RATE, PRETRAINED_RATE, TRIAL_RATES, TRIAL_SHARE, Fit
from infalign.training.callbacks import DivergedError
from infalign.training.common import Fitted
from infalign.training.offline_trainer import RolloutRegression, Rows, fit_to_rollouts
from infalign.training.output_folder import Job

SMALL = 20_000_000  # trained weights: so few are a model from nothing, or a small one beside the reference
TRIALS = "trials.json"  # in the folder of a training: held-out losses by learning rate


def fit_and_tune(
    loss: RolloutRegression, start: Callable[[], PreTrainedModel], rollouts: Rows, law: Law, fit: Fit, job: Job
) -> Fitted:
    """Fit a policy that begins as ``start()``, at its learning rate or the best of three.

    Each of the three is tried for a quarter of the passes, and the training begins anew with the one whose held-out
    loss is then lowest. A trial made before an interruption is not repeated; every training begins from the seed.
    """

    def begin() -> PreTrainedModel:
        set_seed(job.seed)
        return start()

    fit, known = fit.model_copy(update={"epochs": fit.passes_over(len(rollouts))}), job.folder / TRIALS
    losses: dict[str, float] = read_record(known) if known.is_file() else {}
    if fit.learning_rate is None:
        usual = usual_rate(begin(), fit)
        for rate in (usual * factor for factor in TRIAL_RATES):
            if str(rate) not in losses:
                tried = fit.model_copy(update={"epochs": TRIAL_SHARE * fit.passes, "learning_rate": rate})
                losses[str(rate)] = trial_loss(loss, begin(), rollouts, law, tried, job)
                if is_first():
                    write_record(known, losses)
        fit = fit.model_copy(update={"learning_rate": float(min(losses, key=losses.__getitem__))})
    fitted = fit_to_rollouts(loss, begin(), rollouts, law, fit, job)
    fitted.history[-1]["tuned"] = {"learning_rate": fit.learning_rate, "passes": fit.passes, "trials": losses}
    return fitted


def usual_rate(model: PreTrainedModel, fit: Fit) -> float:
    """Return the learning rate from which others are tried: an adapter's, or by the number of trained weights."""
    if fit.lora is not None:
        return ADAPTER_RATE
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return NEW_WEIGHTS_RATE if trained <= SMALL else PRETRAINED_RATE


def trial_loss(loss: RolloutRegression, model: PreTrainedModel, rollouts: Rows, law: Law, fit: Fit, job: Job) -> float:
    """Return the held-out loss after a short training, whose model is thrown away; inf if it diverges."""
    folder, named = job.folder / "trial", f"trying learning rate {fit.learning_rate:.2g}"

    def report(done: int, total: int, note: str) -> None:
        job.on_progress(done, total, f"{named}  {note}")

    remove(folder)
    trial = replace(job, folder=folder, report_to=[], on_progress=report)
    try:
        history = fit_to_rollouts(loss, model, rollouts, law, fit, trial).history
    except DivergedError:
        return float("inf")
    finally:
        free_memory()
        remove(folder)
    *_, last = (row["eval_loss"] for row in history if "eval_loss" in row)
    return float(last)
