"""Objectives of offline training, and ascents of on-policy training: what a solver makes of a law."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from infalign.method.calibration import Array
from infalign.method.shapings import Shaping
from infalign.training.advantages import Advantages

if TYPE_CHECKING:
    import torch

Examples = tuple[NDArray[np.intp], Array]  # rollouts (E, M), numbers (E,)


@dataclass(frozen=True, slots=True)
class Objective:
    """The training examples and the loss of an offline solver.

    ``examples`` turns the K rewards of one prompt, and their log π*/π_ref, into the examples of one pass: the rollouts
    of each example, (E, M), and one number per example, (E,): a target, a weight or a label. ``loss`` is the mean loss
    of a batch: it compares those numbers with h = log π/π_ref of the rollouts, (B, M), summed over tokens.
    """

    examples: Callable[[Array, Array, np.random.Generator], Examples]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ascent:
    """How an on-policy solver climbs, in groups of ``generations`` responses per prompt.

    Rewards are shaped by ``shaping``; ``beta`` is the weight of the KL beside them. ``advantages``, made for the folder
    of the reference, replace those of the TRL trainer; None keeps these. Training stops at ``stops_at`` nats.
    """

    shaping: Shaping
    beta: float
    generations: int = 8
    trl_trainer: Literal["rloo", "grpo"] = "rloo"
    trl_options: Mapping[str, Any] = field(default_factory=lambda: {"normalize_advantages": False})
    advantages: Callable[[str], Advantages] | None = None
    stops_at: float | None = None
