"""How a response's rank is read from a network's states while it is being written: cross-fitted ridge regression.

The regressors after t of at most L tokens are Σ_{s≤t} state_s / L and (1 − t/L)·state_t: what is written, and what is
to come. A reward that is linear in the mean of such states is read exactly at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtri

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.method.calibration import Array, calibrate

FOLDS = 4
PENALTIES = (0.1, 0.3, 1.0, 3.0)  # of a standardised regressor, as parts of the number of tokens
TOKENS = 2**18  # that the regression is fitted to at most
CHOSEN_BY = 256  # prompts, at most, that the penalty is chosen by
FEWEST = 256  # responses that ρ is measured on; it is taken to stay what it was where fewer are as long
LEAST, MOST = 0.01, 0.99  # ρ

StatesOf = Callable[[int], Sequence[Array]]
"""The states (tokens, F) of the K rollouts of a prompt, given its number."""


def read_on_the_way(states_of: StatesOf, rewards_PK: Array, *, seed: int, on_progress: OnProgress) -> list[list[Array]]:
    """Return what is read of each response's rank after each of its tokens: (tokens, 2) for K responses of P prompts.

    That is a standard normal reading and its correlation ρ with the normal score of the rank, within prompts. What is
    read of a prompt is fitted to those of other folds. Raises DataError for too few prompts.
    """
    prompts, k = rewards_PK.shape
    if prompts < 2 * FOLDS:
        raise DataError(
            f"reading ranks needs at least {2 * FOLDS} prompts, found {prompts}; raise rollout.prompts, or leave out "
            "loss: tokens"
        )
    scores = _normal_scores(rewards_PK)
    fold = np.random.default_rng(seed).permutation(prompts) % FOLDS
    lengths = np.array([[len(states) for states in states_of(prompt)] for prompt in range(prompts)])
    longest = int(lengths.max())
    stride = -(-int(lengths.sum()) // TOKENS)

    def regressors(prompt: int) -> Iterator[tuple[Array, Array]]:
        """Yield regressors (K, F′) after each token, and whether each response is so long, (K,)."""
        given = states_of(prompt)
        width = given[0].shape[1]
        padded = np.zeros((k, longest, width), np.float32)
        for place, states in enumerate(given):
            padded[place, : len(states)] = states
        written = padded.cumsum(axis=1) / longest
        for t in range(longest):
            alive = lengths[prompt] > t
            if alive.any():
                to_come = padded[:, t] * (1.0 - (t + 1) / longest)
                both = np.concatenate([written[:, t], to_come], axis=1)
                yield both - both.mean(axis=0), alive

    width = 2 * states_of(0)[0].shape[1]
    gram, moment, rows = np.zeros((FOLDS, width, width), np.float32), np.zeros((FOLDS, width)), np.zeros(FOLDS)
    for prompt in range(prompts):
        found = [pair for t, pair in enumerate(regressors(prompt)) if t % stride == prompt % stride]
        if found:  # otherwise all its responses are too short
            x = np.concatenate([both[alive] for both, alive in found])
            gram[fold[prompt]] += x.T @ x
            moment[fold[prompt]] += x.T @ np.concatenate([scores[prompt, alive] for _, alive in found])
            rows[fold[prompt]] += len(x)
        on_progress(prompt + 1, 2 * prompts, "ranks on the way")
    weights = [_fitted(gram, moment, rows, out) for out in range(FOLDS)]  # (penalties, F′) each

    def read_of(prompt: int, penalties: slice) -> NDArray[Any]:
        """Return what is read of a prompt with some penalties, (penalties, K, longest), NaN after a response's end."""
        own = weights[fold[prompt]][penalties]
        found = np.full((own.shape[0], k, longest), np.nan, np.float32)
        for t, (both, alive) in enumerate(regressors(prompt)):
            found[:, alive, t] = own @ both[alive].T
        return found

    some = range(0, prompts, -(-prompts // CHOSEN_BY))
    tried = np.stack([read_of(prompt, slice(None)) for prompt in some], axis=1)
    best = int(np.argmax([_correlations(one, scores[list(some)]).mean() for one in tried]))
    read = np.empty((prompts, k, longest), np.float32)
    for prompt in range(prompts):
        read[prompt] = read_of(prompt, slice(best, best + 1))[0]
        on_progress(prompts + prompt + 1, 2 * prompts, "ranks on the way")
    return _standardised(read, _correlations(read, scores))


def read_from_log_ratios(log_ratios: Sequence[Array], rewards_PK: Array, unseen: slice) -> list[list[Array]]:
    """Return the same as `read_on_the_way`, as a policy tells it: from log π/π_ref of each token of each rollout.

    The running sum, less its mean over those rollouts of the prompt that are as long, is the reading. Its ρ is measured
    on the prompts ``unseen``, which the policy was not trained on. Raises DataError for fewer than two of them.
    """
    prompts, k = rewards_PK.shape
    if len(rewards_PK[unseen]) < 2:
        raise DataError(
            f"reading ranks from a policy needs two prompts that it was not trained on, and it was on all but "
            f"{len(rewards_PK[unseen])} of {prompts}; raise rollout.prompts, or leave out reader"
        )
    read = np.full((prompts * k, max(map(len, log_ratios))), np.nan, np.float32)
    for row, of_tokens in zip(read, log_ratios, strict=True):
        row[: len(of_tokens)] = np.cumsum(of_tokens)
    read = read.reshape(prompts, k, -1)
    present = ~np.isnan(read)
    read -= np.nansum(read, axis=1, keepdims=True) / np.maximum(present.sum(axis=1, keepdims=True), 1)
    return _standardised(read, _correlations(read[unseen], _normal_scores(rewards_PK)[unseen]))


def _normal_scores(rewards_PK: Array) -> Array:
    """Return the normal score of each rollout's rank, less its mean over those of the prompt."""
    scores: Array = ndtri(calibrate(rewards_PK, np.sort(rewards_PK, axis=1)))
    return scores - scores.mean(axis=1, keepdims=True)


def _standardised(read_PKL: NDArray[Any], rho_L: Array) -> list[list[Array]]:
    """Return readings with ρ, (tokens, 2) for each response; ``read_PKL`` is NaN after a response's end."""
    read_PKL = read_PKL / (np.nanstd(read_PKL, axis=(0, 1)) + 1e-12)
    lengths_PK = (~np.isnan(read_PKL)).sum(axis=2)
    return [
        [np.stack([read_L[:length], rho_L[:length]], axis=1) for read_L, length in zip(*of_prompt, strict=True)]
        for of_prompt in zip(read_PKL, lengths_PK, strict=True)
    ]


def _fitted(gram: NDArray[Any], moment: Array, rows: Array, out: int) -> Array:
    """Return the weights for each penalty, (penalties, F′), by all folds but one."""
    rest = [fold for fold in range(FOLDS) if fold != out]
    whole, target, count = gram[rest].sum(axis=0), moment[rest].sum(axis=0), float(rows[rest].sum())
    scale = np.sqrt(np.diag(whole) / count) + 1e-6
    whole, target = whole / scale[:, None] / scale, target / scale
    ridge = count * np.eye(len(scale), dtype=np.float32)
    return np.stack([cho_solve(cho_factor(whole + penalty * ridge), target) / scale for penalty in PENALTIES])


def _correlations(read_PKL: NDArray[Any], scores_PK: Array) -> Array:
    """Return ρ within prompts after each token, (L,)."""
    found, last = np.empty(read_PKL.shape[2]), LEAST
    for t in range(read_PKL.shape[2]):
        alive = ~np.isnan(read_PKL[:, :, t])
        if alive.sum() >= min(FEWEST, scores_PK.size / 2) or t == 0:
            read, scores = read_PKL[:, :, t][alive].astype(float), scores_PK[alive]
            norm = float(np.linalg.norm(read) * np.linalg.norm(scores))
            last = min(max(float(read @ scores) / max(norm, 1e-12), LEAST), MOST)
        found[t] = last
    return found
