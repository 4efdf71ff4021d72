"""A fit that tunes itself: the best of the rates tried, the same after an interruption; what is given is obeyed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from enumerable import Enumerable
from jobs import job_in, quiet

from infalign.core.errors import StoppedError
from infalign.core.progress import OnProgress
from infalign.models.pretrained import load_policy
from infalign.models.settings import TRIAL_RATES, Fit, Lora
from infalign.training.common import Fitted
from infalign.training.offline_trainer import RolloutRegression, fit_to_rollouts
from infalign.training.solvers.qrpo import qrpo
from infalign.training.tuning import fit_and_tune, trial_loss

LOSS = RolloutRegression(qrpo())


def start(case: Enumerable) -> Any:
    """Return the reference."""
    return load_policy(case.folder)[0]


def tuned(case: Enumerable, folder: Path, fit: Fit, report: OnProgress = quiet) -> Fitted:
    """Fit the reference to its rollouts."""
    rows, law = case.rollouts(16), case.law(16, "identity", 0.3)
    return fit_and_tune(LOSS, partial(start, case), rows, law, fit, job_in(folder, report))


def stopped(where: Callable[[int, str], bool]) -> OnProgress:
    """Return a report that stops the training."""

    def report(done: int, total: int, note: str) -> None:
        if where(done, note):
            raise StoppedError

    return report


def test_the_rate_with_the_lowest_held_out_loss_is_chosen(case: Enumerable, tmp_path: Path) -> None:
    """Of three, each tried for a quarter of the passes; nothing is left of the trials but their losses."""
    fit = Fit(epochs=8, batch_size=108)
    chosen = tuned(case, tmp_path / "tuned", fit).history[-1]["tuned"]
    losses, law = {}, case.law(16, "identity", 0.3)
    for rate in (1e-3 * factor for factor in TRIAL_RATES):
        torch.manual_seed(0)
        tried = fit.model_copy(update={"epochs": 2.0, "learning_rate": rate})
        job = job_in(tmp_path / str(rate))
        history = fit_to_rollouts(LOSS, start(case), case.rollouts(16), law, tried, job).history
        losses[str(rate)] = [row["eval_loss"] for row in history if "eval_loss" in row][-1]
    assert chosen["trials"] == pytest.approx(losses)
    assert chosen == {"learning_rate": float(min(losses, key=losses.__getitem__)), "passes": 8, "trials": losses}
    assert not (tmp_path / "tuned" / "checkpoints" / "trial").exists()


@pytest.mark.parametrize(
    "where",
    [
        lambda done, note: "learning rate 0.0006" in note and done > 1,
        lambda done, note: "trying" not in note and done == 3,
    ],
)
def test_a_tuning_that_is_stopped_ends_as_an_undisturbed_one(case: Enumerable, tmp_path: Path, where: Any) -> None:
    """In a trial, of which earlier ones are not repeated, or after them, with an adapter drawn from the seed."""
    fit, folder = Fit(epochs=2, batch_size=108, lora=Lora(rank=2)), tmp_path / "stopped"
    whole = tuned(case, tmp_path / "whole", fit)
    with pytest.raises(StoppedError):
        tuned(case, folder, fit, stopped(where))
    torch.rand(3)  # as another process has it
    again = tuned(case, folder, fit, stopped(lambda _, note: "learning rate 6e-05" in note))
    assert again.history[-1]["tuned"] == whole.history[-1]["tuned"]
    torch.testing.assert_close(case.laws(again.model), case.laws(whole.model), atol=1e-6, rtol=0)


def test_a_fit_that_is_given_is_obeyed(case: Enumerable, tmp_path: Path) -> None:
    """No rate is tried beside it; without epochs it sees few rollouts twice, and of many a part."""
    found = tuned(case, tmp_path, Fit(batch_size=108, learning_rate=1e-3))
    assert found.history[-1]["tuned"] == {"learning_rate": 1e-3, "passes": 2.0, "trials": {}}
    assert found.history[-1]["step"] == 2 * 27 * 16 / 108
    assert [Fit().passes_over(rollouts) for rollouts in (1e3, 1e5, 1e6)] == [2.0, 1.0, 0.1]


def test_a_rate_at_which_the_loss_diverges_is_the_worst(case: Enumerable, tmp_path: Path) -> None:
    """The other rates are tried nevertheless."""
    fit = Fit(epochs=1, batch_size=108, learning_rate=1e30)
    rows, law = case.rollouts(16), case.law(16, "identity", 0.3)
    assert trial_loss(LOSS, start(case), rows, law, fit, job_in(tmp_path)) == float("inf")
