"""A Bradley–Terry reward on frozen states of a language model; layers and penalty are chosen by cross-validation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_expit

from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.data.messages import Pair, prompt_id
from infalign.method.calibration import Array
from infalign.models.conversations import conversation_ids, prompt_ids
from infalign.models.packed import PackedBatch, packed_batches, packing_if_possible
from infalign.models.passes import FEW_TOKENS, context_length
from infalign.models.pooled import PooledForSequenceClassification, response_opening

DEPTHS = 6  # layers to choose from, evenly spaced
PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
FOLDS = 4


@dataclass(frozen=True)
class ChosenHead:
    """The layers and the penalty with the least cross-validated loss, and each pair's margin outside of its fold."""

    layers: list[int]
    penalty: float
    loss: float
    margins: Array


def fit_head(
    base: Any, tokenizer: Any, pairs: Sequence[Pair], *, seed: int, on_progress: OnProgress
) -> tuple[PooledForSequenceClassification, ChosenHead]:
    """Fit a head on (prompt, chosen, rejected) and return the reward model with what was chosen.

    ``base`` is a language model or an encoder, of which nothing is trained. The loss is Bradley–Terry's on differences
    of the responses' mean states, standardized, with an L2 penalty. The best layer is chosen, and a second one where
    that lowers the loss in `FOLDS` folds of prompts. Raises ConfigError for a chat template as in `response_opening`.
    """
    opening, depth = response_opening(tokenizer), base.config.num_hidden_layers
    layers = sorted({max(1, round(depth * step / DEPTHS)) for step in range(1, DEPTHS + 1)})
    reader = PooledForSequenceClassification.on(base.base_model, layers, opening)
    states = pooled_states(reader, tokenizer, pairs, on_progress)  # (pairs, 2, layers · width)
    scale = states.std(axis=(0, 1)) + 1e-6
    gaps = ((states[:, 0] - states[:, 1]) / scale).reshape(len(pairs), len(layers), -1)
    fold = prompt_folds([prompt_id(prompt) for prompt, _, _ in pairs], seed)
    best = min((_cross_validate(gaps, [place], fold) for place in range(len(layers))), key=lambda head: head.loss)
    more = [sorted({*best.layers, place}) for place in range(len(layers)) if place not in best.layers]
    best = min([best, *(_cross_validate(gaps, both, fold) for both in more)], key=lambda head: head.loss)
    weights = fit_weights(gaps[:, best.layers].reshape(len(pairs), -1), best.penalty)
    chosen = [layers[place] for place in best.layers]
    model = PooledForSequenceClassification.on(base.base_model, chosen, opening)
    by_layer = scale.reshape(len(layers), -1)[best.layers].ravel()
    model.score.weight.copy_(torch.tensor(weights / by_layer)[None])
    return model, ChosenHead(chosen, best.penalty, best.loss, best.margins)


def pooled_states(
    reader: PooledForSequenceClassification, tokenizer: Any, pairs: Sequence[Pair], on_progress: OnProgress
) -> Array:
    """Return the mean states of both responses of each pair, (pairs, 2, layers · width).

    Raises DataError for a pair that the chat template renders otherwise, or that is longer than the model's context.
    """
    prompts, responses, context = list[list[int]](), list[list[int]](), context_length(reader)
    before = prompt_ids(tokenizer, [prompt for prompt, *_ in pairs])
    whole = iter(conversation_ids(tokenizer, [[*prompt, *said] for prompt, *both in pairs for said in both]))
    for (prompt, *both), asked in zip(pairs, before, strict=True):
        for ids in (next(whole) for _ in both):
            if ids[: len(asked)] != asked or len(ids) == len(asked):
                raise DataError(f"prompt {prompt_id(prompt)}: the chat template changes it when a response follows")
            if context is not None and len(ids) > context:
                raise DataError(
                    f"prompt {prompt_id(prompt)}: with its response it has {len(ids)} tokens, but the head's model "
                    f"accepts at most {context}; set head.max_length to that"
                )
            prompts.append(asked)
            responses.append(ids[len(asked) :])
    states, model = list[Array](), reader.base_model
    with torch.inference_mode(), packing_if_possible(model, PackedBatch.last_states):
        for rows, batch in packed_batches(prompts, responses, FEW_TOKENS, model, logits=False):
            states.append(batch.last_states(model).float().cpu().numpy())
            on_progress(rows.stop // 2, len(pairs), "states of pairs")
    return np.concatenate(states).astype(float).reshape(len(pairs), 2, -1)


def prompt_folds(prompts: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Return the fold of each pair, (pairs,); the pairs of a prompt share one."""
    names, place = np.unique(prompts, return_inverse=True)
    return np.random.default_rng(seed).permutation(len(names))[place] % FOLDS


def fit_weights(gaps: Array, penalty: float) -> Array:
    """Return the minimizer w of mean −log σ(gaps·w) + penalty/2·|w|², for gaps (pairs, features)."""

    def loss(w: Array) -> tuple[float, Array]:
        margins = gaps @ w
        gradient = -gaps.T @ expit(-margins) / len(gaps) + penalty * w
        return -log_expit(margins).mean() + penalty / 2 * (w @ w), gradient

    return np.asarray(minimize(loss, np.zeros(gaps.shape[1]), jac=True, method="L-BFGS-B").x)


def _cross_validate(gaps: Array, places: list[int], fold: NDArray[np.int64]) -> ChosenHead:
    """Return the best penalty for some of the layers, by the loss outside of each pair's fold."""
    rows = gaps[:, places].reshape(len(gaps), -1)

    def outside(penalty: float) -> ChosenHead:
        margins = np.empty(len(rows))
        for held_out in range(FOLDS):
            margins[fold == held_out] = rows[fold == held_out] @ fit_weights(rows[fold != held_out], penalty)
        return ChosenHead(places, penalty, float(-log_expit(margins).mean()), margins)

    return min(map(outside, PENALTIES), key=lambda head: head.loss)
