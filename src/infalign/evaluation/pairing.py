"""Two tables of rewards side by side, prompt by prompt.

Responses are selected by ``reward`` and judged by ``judge_reward``, or by ``reward`` itself where neither table has a
judge; lengths, in any unit, give a length-controlled win rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infalign.core.errors import DataError
from infalign.core.spelling import listed_names
from infalign.evaluation.reward_tables import Labels, RewardTable
from infalign.evaluation.samples import Samples


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts with equal numbers of samples: their places in the order of the policy's table, and the samples."""

    places: NDArray[np.intp]
    example: str  # a prompt
    policy: Samples
    base: Samples


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two tables side by side: the blocks of the prompts that both have, and how many prompts only one has."""

    policy: RewardTable
    base: RewardTable
    blocks: Sequence[Block]
    policy_only: int = 0
    base_only: int = 0


def pair(policy: RewardTable, base: RewardTable, *, common_prompts: bool = False, seed: int = 0) -> Pairing:
    """Return the samples of both tables for the same prompts, in blocks of equal numbers of samples.

    The samples of a prompt are shuffled: a table sorted by reward would give Rewind-and-Repeat a wrong threshold.

    Raises DataError for prompts that only one table has, unless ``common_prompts`` leaves them out; if none is common;
    and if only one table has a judge.
    """
    if policy.judge != base.judge:
        has, lacks = (policy, base) if policy.judge == "judge_reward" else (base, policy)
        raise DataError(f"{has.source} has the column judge_reward, {lacks.source} does not; add it or drop it")
    tables = (policy, base)
    for table in tables:
        if len(table.models.names) > 1:
            raise DataError(f"{table.source} has the models {listed_names(table.models.names)}; give a table of each")
    prompts_of_both = Labels.joined([table.prompts for table in tables])
    texts, codes = prompts_of_both.names, np.split(prompts_of_both.codes, [policy.prompts.codes.size])
    counts = np.stack([np.bincount(code, minlength=len(texts)) for code in codes])
    common = np.flatnonzero((counts > 0).all(axis=0))
    alone = [np.flatnonzero(counts[other] == 0) for other in (1, 0)]
    if any(places.size for places in alone) and not common_prompts:
        clauses = [
            f"{places.size:,} prompts are only in {table.source}, such as {texts[places[0]]!r}"
            for table, places in zip(tables, alone, strict=True)
            if places.size
        ]
        raise DataError(f"{'; '.join(clauses)}; pass --common-prompts to compare the {common.size:,} prompts in both")
    if common.size == 0:
        raise DataError(f"{policy.source} and {base.source} have no prompts in common")
    rng = np.random.default_rng(seed)
    shuffled = [rng.permutation(code.size) for code in codes]
    rows = [order[np.argsort(code[order], kind="stable")] for code, order in zip(codes, shuffled, strict=True)]
    starts = np.cumsum(counts, axis=1) - counts
    shapes, shape_of = np.unique(counts.T[common], axis=0, return_inverse=True)
    blocks = []
    for number, shape in enumerate(shapes):
        places = np.flatnonzero(shape_of == number)
        prompts = common[places]
        both = list[Samples]()
        for table, order, start, samples in zip(tables, rows, starts, shape, strict=True):
            rows_PM, numbers = order[start[prompts][:, None] + np.arange(samples)], table.numbers
            lengths = numbers["length"][rows_PM] if "length" in numbers else None
            both.append(Samples(numbers["reward"][rows_PM], numbers[table.judge][rows_PM], lengths))
        blocks.append(Block(places, texts[prompts[0]], *both))
    return Pairing(policy, base, blocks, *(places.size for places in alone))
