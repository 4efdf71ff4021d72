"""How much of a reward's rank can be read from states of a network, at the end of a response and on the way there.

A policy decides token by token, so what it can win is bounded by what is known of the final rank while the response is
being written (docs/theory.md, when the network knows less than the rank).
"""

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtri

from infalign.core.errors import DataError
from infalign.method.calibration import Array, calibrate

FOLDS = 4
PENALTIES = np.geomspace(1e-3, 10.0, 9)  # of a standardised state, as parts of the number of rollouts


def readable(states_PMF: Array, rewards_PM: Array, *, seed: int = 0) -> Array:
    """Return for each prompt how well its rewards' ranks are read from states, the correlation ρ, shape (P′,).

    Rank and what is read are compared as normal scores within a prompt, as in `theory.knowledge`. The reading is a
    ridge regression on states (P, M, F) fitted to the prompts of other folds, with the penalty that reads best in all.
    Prompts where all rewards tie are left out. Raises DataError for fewer than 8 others.
    """
    differ = np.ptp(rewards_PM, axis=1) > 0
    states, rewards = states_PMF[differ].astype(np.float32), rewards_PM[differ]
    prompts, samples, width = states.shape
    if prompts < 2 * FOLDS:
        raise DataError(f"reading ranks needs at least {2 * FOLDS} prompts of different rewards, found {prompts}")
    states -= states.mean(axis=1, keepdims=True)
    states /= states.std(axis=(0, 1)) + 1e-6
    scores = ndtri(calibrate(rewards, np.sort(rewards, axis=1)))
    scores -= scores.mean(axis=1, keepdims=True)
    fold = np.random.default_rng(seed).permutation(prompts) % FOLDS
    parts = [(states[fold == f].reshape(-1, width), scores[fold == f].ravel()) for f in range(FOLDS)]
    gram, moment = [x.T @ x for x, _ in parts], [x.T @ y for x, y in parts]
    read = np.empty((len(PENALTIES), prompts, samples))
    for out in range(FOLDS):
        rest = [f for f in range(FOLDS) if f != out]
        whole, target = sum(gram[f] for f in rest), sum(moment[f] for f in rest)
        rows = sum(len(parts[f][1]) for f in rest)
        for place, penalty in enumerate(PENALTIES):
            weights = cho_solve(cho_factor(whole + penalty * rows * np.eye(width, dtype=np.float32)), target)
            read[place, fold == out] = states[fold == out] @ weights
    read -= read.mean(axis=2, keepdims=True)
    norms = np.linalg.norm(read, axis=2) * np.linalg.norm(scores, axis=1)
    correlation = np.einsum("lpm,pm->lp", read, scores) / np.maximum(norms, 1e-12)
    best: Array = correlation[correlation.mean(axis=1).argmax()]
    return best
