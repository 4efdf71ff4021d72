"""Offline solvers: they learn from the K rollouts a prompt that calibration has paid for, and generate nothing.

A solver is a value with two methods. ``examples`` turns the K rewards of one prompt into training examples: which
rollouts each looks at, (E, M), and one number each, (E,). ``loss`` compares those numbers with h = log π/π_ref of the
rollouts, (B, M), summed over tokens. The number is a target, a weight or a label; the trainer is the same for all.

========  ====================================================  ====================================================
solver    loss                                                  optimum over all policies
========  ====================================================  ====================================================
qrpo      (Φ(Ĉ)/β − log Z − h)²                                 π_ref·e^{Φ/β}/Z
resample  −h·e^{Φ(Ĉ)/β}/Z                                       π_ref·e^{Φ/β}/Z, fitted by the forward KL
ipo       (h_i − h_j − (2w_ij − 1)/2τ)²                         π_ref·e^{C/τ}/Z: the identity transformation at β = τ
bon-sft   −h·(weight in the Best-of-n of the K)                 Best-of-n itself
bonbon    −α·h_best + (1 − α)·(h_best − h_worst − 1/2β_n)²      its own, which is not Best-of-n
========  ====================================================  ====================================================

In qrpo and resample any :class:`infalign.shaping.Shaping` of the reward may stand in place of Φ(Ĉ).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray
from peft import TaskType, get_peft_model
from torch.nn.functional import logsigmoid
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from infalign.method.calibration import Array, win
from infalign.method.procedures import BestOfN
from infalign.method.shapings import Shaping, log_ratios, parse_shaping, shape_rollouts
from infalign.method.transforms import Transformation
from infalign.models.logprobs import IGNORED, completion_logprobs, right_padded
from infalign.runs.recipe import Policy
from infalign.training.common import Job, arguments, fit_and_save, length_class, lora, training_order
from infalign.training.settings import Fit

HELD_OUT = 0.1  # share of prompts whose rollouts only watch for memorisation
Examples = tuple[NDArray[np.intp], Array]  # rollouts (E, M), numbers (E,)


class Solver(Protocol):
    """What is learnt from the rollouts of a prompt, and how."""

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return the rollouts (E, M) and the number (E,) of each example that one pass over a prompt's rollouts has."""

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch, from h = log π/π_ref and the rollouts' lengths in tokens."""


@dataclass(frozen=True, slots=True)
class QRPO:
    """Regression of h on Φ(Ĉ)/β − log Z (Quantile Reward Policy Optimization, NeurIPS 2025); β for the paper's raw Φ.

    With calibrated rewards Z is known, so that the optimum of RLHF is a least-squares fit.
    """

    shaping: Transformation | Shaping
    beta: float

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return every rollout with its target."""
        return _singles(rewards_K), regression_targets(rewards_K[None], self.shaping, self.beta)[0]

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean squared residual, in nats²."""
        return (number_B - h_BM[:, 0]).square().mean()


@dataclass(frozen=True, slots=True)
class Resample:
    """Fine-tuning on rollouts weighted by e^{Φ(Ĉ)/β}, normalised within the prompt; β for the paper's raw Φ.

    The population loss is KL(π* ‖ π) but for a constant: the projection of π* = π_ref·e^{Φ/β}/Z by the forward KL.
    """

    shaping: Transformation | Shaping
    beta: float

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return every rollout with its weight, of mean 1."""
        return _singles(rewards_K), np.exp(_log_ratios(rewards_K[None], self.shaping, self.beta)[0])

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the weighted negative log-likelihood, counted from the reference's."""
        return _weighted(h_BM, number_B)


@dataclass(frozen=True, slots=True)
class BestOfNTuning:
    """Fine-tuning on the best of n, averaged over all sets of n among the K rollouts: its optimum is Best-of-n.

    Ties share their weight. Raises DataError, when it makes examples, for fewer than n rollouts.
    """

    n: int

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return every rollout with its weight, of mean 1."""
        return _singles(rewards_K), BestOfN(self.n).weights(rewards_K[None])[0] * rewards_K.size

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the weighted negative log-likelihood, counted from the reference's."""
        return _weighted(h_BM, number_B)


@dataclass(frozen=True, slots=True)
class IPO:
    """Pairs of rollouts labelled by the reward (Azar et al. 2023, equation 17), with τ the β of the identity.

    In each pass a rollout is in one pair, with a partner drawn anew; a tie has the label 0. ``length_averaged`` divides
    each h by its number of tokens, as TRL does; the optimum is then no longer the identity's.
    """

    tau: float
    length_averaged: bool = False

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return disjoint random pairs (i, j) with (2w_ij − 1)/2τ; of an odd number of rollouts one is left out."""
        pairs = _random_sets(rewards_K.size, 2, rng)
        first, second = rewards_K[pairs].T
        return pairs, (2.0 * win(first, second) - 1.0) / (2.0 * self.tau)

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean squared residual, in nats² (of nats a token if averaged)."""
        first, second = (h_BM / lengths_BM if self.length_averaged else h_BM).unbind(1)
        return (first - second - number_B).square().mean()


@dataclass(frozen=True, slots=True)
class BoNBoN:
    """Best and worst of n (Gui et al. 2024): −α·log π(best) + (1 − α)·(h_best − h_worst − 1/2β_n)².

    1/2β_n = (n − 1)·H_{n−1} is the mean of h_best − h_worst under Best-of-n itself, but pairs with that *mean* do not
    make Best-of-n the optimum. ``released_code`` gives the loss that the paper's repository computes, which has
    −log σ(β_n·(h_best − h_worst)) for the square. Each pass cuts the rollouts into K/n random sets; in a set of equal
    rewards best and worst are one rollout.
    """

    n: int
    released_code: bool = False
    alpha: float = 0.005

    @property
    def margin(self) -> float:
        """1/2β_n."""
        return float((self.n - 1) * (1.0 / np.arange(1, self.n)).sum())

    def examples(self, rewards_K: Array, rng: np.random.Generator) -> Examples:
        """Return the best and the worst of each set with 1/2β_n."""
        sets = _random_sets(rewards_K.size, self.n, rng)
        rewards, rows = rewards_K[sets], np.arange(len(sets))
        pairs = np.stack([sets[rows, rewards.argmax(1)], sets[rows, rewards.argmin(1)]], axis=1)
        return pairs, np.full(len(sets), self.margin)

    def loss(self, h_BM: torch.Tensor, lengths_BM: torch.Tensor, number_B: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, with the best's log-likelihood counted from the reference's."""
        best, worst = h_BM.unbind(1)
        if self.released_code:
            contrast = -logsigmoid((best - worst) / (2.0 * number_B))
        else:
            contrast = (best - worst - number_B).square()
        return (self.alpha * -best + (1.0 - self.alpha) * contrast).mean()


def offline_solver(policy: Policy, beta: float) -> Solver:
    """Return the solver that a recipe's policy names, with ``beta`` for the paper's raw Φ."""
    shaping = parse_shaping(policy.transform)
    if policy.solver == "qrpo":
        return QRPO(shaping, beta)
    if policy.solver == "resample":
        return Resample(shaping, beta)
    if policy.solver == "ipo":
        return IPO(beta, policy.length_averaged)
    assert policy.n is not None
    return BestOfNTuning(policy.n) if policy.solver == "bon-sft" else BoNBoN(policy.n, policy.released_code)


def regression_targets(rewards_PK: Array, shaping: Transformation | Shaping, beta: float) -> Array:
    """Return log π*/π_ref of each rollout, shape (P, K), with the exact Z of the K rollouts of its prompt.

    Rewards are shaped among the prompt's own K rollouts, where Ĉ is the mid-rank, and Z = mean exp(Φ(Ĉ)/β) over them:
    every tie counts as it is, and a prompt with one reward everywhere has targets 0. ``beta`` is for the paper's raw Φ.

    Ratios below 1/K, which K rollouts cannot tell from 0, are raised to it: −e^{−10u} at a KL of one nat asks for
    log-ratios of −1000 at the bottom, and squares of those would be all that is learned.
    """
    seen_PK = np.maximum(_log_ratios(rewards_PK, shaping, beta), -np.log(rewards_PK.shape[1]))
    return log_ratios(seen_PK, 1.0)


def fit_offline(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    solver: Solver,
    rollouts: Sequence[dict[str, Any]],
    fit: Fit,
    job: Job,
    model_dir: Path,
) -> list[dict[str, Any]]:
    """Fit the policy to ``rollouts`` and save it; return the log.

    A rollout has prompt_id, prompt_ids, completion_ids, reference_logprob and reward; those of one prompt follow each
    other. A tenth of the prompts is held out and the checkpoint with the lowest held-out loss is kept, stopping after
    two evaluations without a better one. Every epoch makes its examples, and so its pairs, anew. If no checkpoint has
    a lower held-out loss than the start, the last row of the log has ``overfitted``, and a report says so: by this
    measure the reference is better than the best checkpoint, which is saved nevertheless.
    """
    groups = _by_prompt(rollouts)
    held_out, others = groups[:: round(1 / HELD_OUT)], [g for i, g in enumerate(groups) if i % round(1 / HELD_OUT)]
    rng, passes = np.random.default_rng(job.seed), ceil(fit.epochs)
    evaluation = _examples(solver, held_out, rng)
    training = concatenate_datasets([_examples(solver, others, rng) for _ in range(passes)])
    order = training_order(list(training["length"]), fit.epochs / passes, fit.batch_size, job.seed)
    config = lora(fit, TaskType.CAUSAL_LM)
    settings = arguments(fit, job) | {
        "eval_strategy": "steps",
        "eval_steps": 0.2,
        "save_steps": 0.2,
        "eval_on_start": True,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "remove_unused_columns": False,
        "label_names": ["labels"],
    }
    trainer = _Offline(
        solver,
        model=get_peft_model(model, config) if config else model,
        args=TrainingArguments(**settings),
        train_dataset=training.select(order),
        eval_dataset=evaluation,
        data_collator=_Collator(rollouts, tokenizer.pad_token_id),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    history = fit_and_save(trainer, tokenizer, job, model_dir)
    start, *later = [row["eval_loss"] for row in history if "eval_loss" in row]
    if min(later) >= start:
        history[-1]["overfitted"] = True
        steps = trainer.state.max_steps
        job.on_progress(
            steps, steps, f"! overfitted: the held-out loss is {start:.3g} at the start, {min(later):.3g} at best"
        )
    return history


@dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one prompt: the number of the first, their rewards and classes of length."""

    first: int
    rewards: Array
    lengths: NDArray[np.intp]


def _by_prompt(rollouts: Sequence[dict[str, Any]]) -> list[_Group]:
    groups, first = [], 0
    for _, rows in groupby(rollouts, key=itemgetter("prompt_id")):
        found = [(row["reward"], len(row["prompt_ids"]) + len(row["completion_ids"])) for row in rows]
        rewards, lengths = zip(*found, strict=True)
        groups.append(_Group(first, np.array(rewards, float), length_class(np.array(lengths))))
        first += len(found)
    return groups


def _examples(solver: Solver, groups: Iterable[_Group], rng: np.random.Generator) -> Dataset:
    """Return one pass over the rollouts of ``groups``: which rollouts, their number, the longest's class of length."""
    found = [(group, *solver.examples(group.rewards, rng)) for group in groups]
    rollouts_EM = np.concatenate([group.first + indices_EM for group, indices_EM, _ in found])
    lengths_E = np.concatenate([group.lengths[indices_EM].max(1) for group, indices_EM, _ in found])
    numbers_E = np.concatenate([number_E for _, _, number_E in found])
    return Dataset.from_dict({"rollouts": rollouts_EM, "number": numbers_E, "length": lengths_E})


def _singles(rewards_K: Array) -> NDArray[np.intp]:
    return np.arange(rewards_K.size)[:, None]


def _random_sets(k: int, size: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Return disjoint random sets, (k // size, size), of the numbers below ``k``."""
    return rng.permutation(k)[: k // size * size].reshape(-1, size)


def _weighted(h_BM: torch.Tensor, weight_B: torch.Tensor) -> torch.Tensor:
    return -(weight_B * h_BM[:, 0]).mean()


def _log_ratios(rewards_PK: Array, shaping: Transformation | Shaping, beta: float) -> Array:
    """Return Φ(Ĉ)/β − log Z, shape (P, K), with β for the paper's raw Φ."""
    return log_ratios(shape_rollouts(shaping, rewards_PK), beta / shaping.scale)


class _Offline(Trainer):
    def __init__(self, solver: Solver, **settings: Any) -> None:
        super().__init__(**settings)
        self._solver = solver
        # Llama and others take a token count with the loss, and Trainer then leaves accumulated losses undivided.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        logprob = completion_logprobs(model, inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        h_BM = (logprob - inputs["reference_logprob"]).view(len(inputs["number"]), -1)
        lengths_BM = (inputs["labels"] != IGNORED).sum(1).view_as(h_BM)
        loss = self._solver.loss(h_BM, lengths_BM, inputs["number"])
        return (loss, {"log_ratio": h_BM}) if return_outputs else loss


@dataclass(frozen=True)
class _Collator:
    rollouts: Sequence[dict[str, Any]]
    pad_id: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [self.rollouts[i] for example in examples for i in example["rollouts"]]
        cpu = torch.device("cpu")
        tokens = [[*row["prompt_ids"], *row["completion_ids"]] for row in rows]
        labels = [[*[IGNORED] * len(row["prompt_ids"]), *row["completion_ids"]] for row in rows]
        return {
            "number": torch.tensor([example["number"] for example in examples]),
            "input_ids": right_padded(tokens, self.pad_id, cpu),
            "attention_mask": right_padded([[1] * len(row) for row in tokens], 0, cpu),
            "labels": right_padded(labels, IGNORED, cpu),
            "reference_logprob": torch.tensor([row["reference_logprob"] for row in rows]),
        }
