"""Intervals over seeds and prompts against closed forms and simulation."""

import numpy as np
import pytest
from scipy.stats import binom, t
from seeds import Trained, estimated, over_seeds

from infalign.core.errors import DataError
from infalign.evaluation.intervals import estimate

IDS = [f"prompt {i}" for i in range(40)]


def test_values_of_seeds_alone_have_students_interval() -> None:
    """Where a seed gives one number, the interval is the textbook's."""
    found = over_seeds([Trained((), np.array([value])) for value in (1.0, 2.0, 4.0)])
    half = t.ppf(0.975, 2) * np.std([1, 2, 4], ddof=1) / np.sqrt(3)
    assert (found.mean, found.low, found.high) == pytest.approx((7 / 3, 7 / 3 - half, 7 / 3 + half))


def test_equal_seeds_have_the_interval_over_prompts() -> None:
    """Where seeds agree on every prompt, what is left is the bootstrap over prompts."""
    values = np.random.default_rng(0).random(40)
    found, alone = over_seeds([Trained(IDS, values)] * 3), estimate(values)
    assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high))


def test_one_seed_has_the_interval_over_prompts_and_its_shifts() -> None:
    """In points too, which are no shares of 1."""
    values = 50.0 + 10.0 * np.random.default_rng(0).random(40)
    found, alone = estimated([Trained(IDS, values, (2.0, -1.0))]), estimate(values)
    assert found == pytest.approx({"mean": alone.mean, "low": alone.low - 1.0, "high": alone.high + 2.0})


def test_prompts_are_found_by_their_ids() -> None:
    """The order of a seed's prompts does not count, and prompts that no other seed has are more prompts."""
    rng = np.random.default_rng(1)
    values = rng.random((2, 40))
    order = rng.permutation(40)
    straight = over_seeds([Trained(IDS, own) for own in values])
    turned = over_seeds([Trained(IDS, values[0]), Trained([IDS[i] for i in order], values[1][order])])
    assert (turned.low, turned.high) == pytest.approx((straight.low, straight.high), abs=0.005)
    other = over_seeds([Trained([f"{seed} {name}" for name in IDS], own) for seed, own in enumerate(values)])
    halves = [np.concatenate(values), values.mean(axis=0)]
    assert [estimate(half).mean for half in halves] == pytest.approx([other.mean, straight.mean])
    assert other.low != straight.low


def test_a_shift_by_interpolation_widens_the_side_it_is_on() -> None:
    """The mean of the seeds' shifts is added, each below or above."""
    plain = over_seeds([Trained((), np.array([value])) for value in (1.0, 2.0)])
    moved = over_seeds([Trained((), np.array([value]), (-0.5, 0.2)) for value in (1.0, 2.0)])
    assert (moved.mean, moved.low, moved.high) == pytest.approx((plain.mean, plain.low - 0.5, plain.high + 0.2))


@pytest.mark.parametrize(("seed_sd", "prompt_sd"), [(1.0, 0.0), (0.0, 4.0), (0.5, 2.0)])
def test_the_interval_covers_another_training_on_other_prompts(seed_sd: float, prompt_sd: float) -> None:
    """With seeds, prompts and noise of both that vary at random, it covers the truth at least at its level."""
    covered, trials = 0, 300
    for trial in range(trials):
        rng = np.random.default_rng(trial)
        of_seeds, of_prompts, noise = (rng.normal(size=size) for size in ((3, 1), 40, (3, 40)))
        found = over_seeds([Trained(IDS, own) for own in seed_sd * of_seeds + prompt_sd * of_prompts + noise])
        covered += found.low <= 0.0 <= found.high
    assert covered >= binom.ppf(0.001, trials, 0.95)


def test_one_training_has_no_interval() -> None:
    """It says so, whatever the prompts."""
    with pytest.raises(DataError, match="at least 2 seeds, found 1"):
        over_seeds([Trained(IDS, np.zeros(40))])
