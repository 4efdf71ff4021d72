"""The strength of a policy: how far it goes where training led, chosen on held-out rollouts by what is served.

At strength s a policy has the weights θ_ref + s·(θ − θ_ref). In the head of a guide this is Q times s, in an adapter ΔW
times s. Importance weights of the reference's rollouts give the KL of each strength, and what a procedure serves there.
"""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from infalign.core.progress import OnProgress
from infalign.evaluation.intervals import Estimate, estimate
from infalign.evaluation.kl import kl_from_reference_samples
from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.method.procedures import Extreme, Served, distortion, seen_in
from infalign.training.common import Fitted
from infalign.training.offline_trainer import Rows, measured_rollouts, split_prompts

STRENGTHS = (0.25, 0.5, 1.0, 2.0, 4.0)  # tried in this order, up to the budget
MIN_EFFECTIVE_ROLLOUTS = 50.0  # fewer say nothing of a KL, which from 5 nats on they underestimate
CLOSE = 1.05  # of the budget, at most
LEAST_LOG_WEIGHT = -10.0  # beside the largest of a prompt's, so that products do not vanish
CONFIDENCE = 0.8  # of an interval with two ends: 90 % for its lower one


class Tried(NamedTuple):
    """A strength, the policy's KL there (nats) and its gain over the reference, as served, on the rollouts' prompts."""

    strength: float
    kl: float
    gain: Estimate
    effective: float  # number of rollouts, as a share of those that an estimate needs


class Choice(NamedTuple):
    """The strength that a policy was given, and the best but 0, None where the rollouts tell of none."""

    chosen: Tried
    best: Tried | None
    seen_gain: Estimate | None  # of the best, on prompts that were trained on; None where the reference was not kept

    def summary(self) -> dict[str, Any]:
        """Return the numbers by name, as a run records them."""
        gains = {"gain": self.best and self.best.gain, "seen_gain": self.seen_gain}
        shown = {name: gain.as_dict() for name, gain in gains.items() if gain is not None}
        return {"strength": self.chosen.strength, "strength_kl": self.chosen.kl, **shown}


def choose_strength(
    fitted: Fitted,
    reference: Any,
    rollouts: Rows,
    law: Law,
    procedure: Served,
    on_progress: OnProgress = lambda done, total, note: None,
) -> Choice:
    """Give a policy the strength whose gain has the highest lower bound, up to the KL of its law.

    The reference, at strength 0, has the gain 0, so it is kept unless another gain is significant. Gains are on the
    prompts of ``rollouts`` that the training held out. Strengths are tried as long as the effective number of rollouts
    is at least `MIN_EFFECTIVE_ROLLOUTS`, or a quarter of them; the last one tried spends the budget.
    """
    model, start = fitted.model, fitted.start
    trained = {name: model.get_parameter(name).detach().clone() for name in start}

    @torch.no_grad()
    def apply(strength: float) -> None:
        for name, weight in trained.items():
            model.get_parameter(name).copy_(torch.lerp(start[name].to(weight), weight, strength))

    def tried(rows: Rows, strength: float) -> Tried:
        apply(strength)

        def report(done: int, total: int) -> None:
            on_progress(done, total, f"measuring at strength {strength:.3g}")

        report(0, len(rows))  # it begins anew
        return Tried(strength, *_measure(model, reference, rows, procedure, report))

    held_out, others = split_prompts(rollouts, law)
    known = _up_to_budget(partial(tried, measured_rollouts(rollouts, held_out)), law.kl)
    best = max(known, key=lambda one: one.gain.low, default=None)
    if best is not None and best.gain.low > 0:
        apply(best.strength)
        return Choice(best, best, None)
    seen_gain = best and tried(measured_rollouts(rollouts, others[: len(held_out)]), best.strength).gain
    apply(0.0)
    return Choice(Tried(0.0, 0.0, Estimate(0.0, 0.0, 0.0), np.inf), best, seen_gain)


def _up_to_budget(tried: Callable[[float], Tried], budget: float) -> list[Tried]:
    """Return what is known of rising strengths, the last one at the budget if it is reached."""
    known = list[Tried]()
    for strength in STRENGTHS:
        trial = tried(strength)
        if trial.effective < 1.0:
            break
        if trial.kl <= budget:
            known.append(trial)
            continue
        # the KL is nearly a power of the strength, near 0 the square
        below = known[-1] if known and known[-1].kl > 0 else Tried(strength / 2, trial.kl / 4, trial.gain, 1.0)
        for _ in range(3):
            power = np.log(trial.strength / below.strength) / np.log(trial.kl / below.kl)
            trial = tried(float(trial.strength * (budget / trial.kl) ** power))
            if trial.kl <= CLOSE * budget:
                known.append(trial)
                break
        break
    return known


def _measure(
    model: Any, reference: Any, rows: Rows, procedure: Served, report: Callable[[int, int], None]
) -> tuple[float, Estimate, float]:
    """Return the KL of a policy, its gain over the reference, and the effective share of the rollouts."""
    prompts, responses = ([row[ids] for row in rows] for ids in ("prompt_ids", "completion_ids"))
    states = [row["states"] for row in rows if "states" in row]
    kl_R, h_R = kl_from_reference_samples(model, reference, prompts, responses, states, report)
    weight_R = np.exp(h_R - h_R.max())
    effective = weight_R.sum() ** 2 / (weight_R @ weight_R)
    rewards_R, gain_P = np.array([row["reward"] for row in rows], float), list[float]()
    binary = bool(np.isin(rewards_R, (0.0, 1.0)).all())
    for _, of_prompt in groupby(range(len(rows)), key=lambda i: rows[i]["prompt_id"]):
        own = [*of_prompt]
        weights = np.exp((h_R[own] - h_R[own].max()).clip(min=LEAST_LOG_WEIGHT))
        gain_P.append(served_gain(rewards_R[own], weights, procedure, binary=binary))
    needed = min(MIN_EFFECTIVE_ROLLOUTS, len(rows) / 4)
    return float(kl_R.mean()), estimate(gain_P, confidence=CONFIDENCE), float(effective / needed)


def served_gain(rewards_K: Array, weight_K: Array, procedure: Served, *, binary: bool) -> float:
    """Return what a law over K rollouts of the reference, by importance weights, gains over it when both are served.

    The gain is in the win rate against the reference, or in the share of successes where rewards are ``binary``. For
    the best or the worst of N, at most K/2 (`seen_in`), it is the mean over all sets of N rollouts by the products of
    their weights. What N draws of a law over the rollouts would serve is biased, as several of them may be one rollout:
    weights that are noise would gain for the worst of N.
    """
    procedure = seen_in(rewards_K.size, procedure)
    values, place_K = np.unique(rewards_K, return_inverse=True)

    def served(weight_K: Array) -> Array:
        """Return the probability that each value is served."""
        if isinstance(procedure, Extreme):
            best, last = procedure.sign > 0, len(values) - 1
            outside_VK = (np.arange(last)[:, None] < place_K) == best  # of what is at most, or above, each value
            apart = mean_product(np.where(outside_VK, 0.0, weight_K), procedure.n)
            apart /= mean_product(weight_K[None], procedure.n)
            return np.diff(np.r_[0.0, apart, 1.0] if best else np.r_[0.0, 1.0 - apart, 1.0])
        mass_K = weight_K / weight_K.sum()
        below = np.append(0.0, np.bincount(place_K, mass_K).cumsum().clip(max=1.0))
        h = distortion(procedure, lambda u: mass_K[rewards_K < np.quantile(rewards_K, u)].sum())
        return np.diff(h.distortion(below))

    policy, reference = served(weight_K), served(np.ones(rewards_K.size))
    worth = values if binary else reference.cumsum() - reference / 2.0
    return float((policy - reference) @ worth)


def mean_product(weight_VK: Array, n: int) -> Array:
    """Return the mean of the products of all sets of ``n`` of K weights, (V,): e_n(w)/C(K, n), one after the other."""
    of = np.arange(1, n + 1)
    mean = np.zeros((len(weight_VK), n + 1))
    mean[:, 0] = 1.0
    for k, weight_V in enumerate(weight_VK.T, 1):
        mean[:, 1:] = np.maximum(1.0 - of / k, 0.0) * mean[:, 1:] + of / k * weight_V[:, None] * mean[:, :-1]
    return np.asarray(mean[:, n])
