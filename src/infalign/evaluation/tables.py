"""Two tables of rewards side by side, prompt by prompt: the win rates between them, and how they are printed.

Responses are selected by ``reward`` and judged by ``judge_reward``, or by ``reward`` itself where neither table has a
judge; lengths, in any unit, give a length-controlled win rate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from infalign.core.display import amount, heading, plain_table, say, share
from infalign.core.errors import DataError
from infalign.core.spelling import listed_names
from infalign.evaluation.intervals import Confidence
from infalign.evaluation.length import length_controlled
from infalign.evaluation.reward_tables import Labels, RewardTable
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws, tie_rate, win_rates_of
from infalign.method.calibration import Array
from infalign.method.procedures import Procedure, parse_procedure, rewinds

NO_WIDTH = "every prompt has the same win rate, so the interval has zero width and does not generalize to other prompts"


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


def compare_tables(
    pairing: Pairing,
    procedures: Sequence[str],
    *,
    base_procedure: str | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return the win rate of a policy's responses over a base's under each procedure, one record each.

    ``base_procedure`` serves the base, by default the policy's own. Prompts may have different numbers of samples:
    every prompt counts once, and ``policy_samples`` and ``base_samples`` are the fewest of any prompt. ``win_rate``
    with ``low`` and ``high`` is from `estimate_share`, ``length_controlled`` the same at equal length, ``ties`` the
    share of pairs of samples that the judge finds equal, ``draws`` how many a procedure that rewinds takes. ``notes``
    say in sentences what is missing or does not mean what it seems to.

    Raises DataError for fewer samples than a procedure needs and for a single prompt; ConfigError for an unknown
    procedure.
    """
    blocks = pairing.blocks
    ours = list({procedure.name: procedure for procedure in map(parse_procedure, procedures)}.values())
    theirs = [parse_procedure(base_procedure) if base_procedure else procedure for procedure in ours]
    intervals = Confidence(confidence, seed)
    wins_RP = _by_prompt(blocks, lambda block: win_rates_of(block.policy, block.base, ours, theirs))
    shared = {
        "confidence": confidence,
        "prompts": wins_RP.shape[1],
        "policy_samples": min(block.policy.selected.shape[1] for block in blocks),
        "base_samples": min(block.base.selected.shape[1] for block in blocks),
        "policy_only_prompts": pairing.policy_only,
        "base_only_prompts": pairing.base_only,
        "judge": pairing.policy.judge,
        "ties": float(_by_prompt(blocks, lambda block: tie_rate(block.policy, block.base)).mean()),
    }
    records = []
    for procedure, served, wins in zip(ours, theirs, wins_RP, strict=True):
        win_rate = intervals.of_shares(wins)
        notes = [NO_WIDTH] if win_rate["high"] - win_rate["low"] < 1e-12 else []
        controlled = None
        try:
            raw = intervals.of(_at_equal_length(pairing, procedure, served))
            controlled = {key: min(max(value, 0.0), 1.0) for key, value in raw.items()}
        except DataError as error:
            notes.append(f"no length-controlled win rate: {error}")
        names = {"procedure": procedure.name, "base_procedure": served.name, "win_rate": win_rate.pop("mean")}
        draws = {model: intervals.of(draws_P) for model, draws_P in _draws(blocks, procedure, served).items()}
        records.append({**names, **win_rate, **shared, "length_controlled": controlled, "draws": draws, "notes": notes})
    return records


def _by_prompt(blocks: Sequence[Block], measure: Callable[[Block], Array]) -> Array:
    """Return what ``measure`` finds for the prompts of each block, the last axis in the order of the prompts."""
    by_block = []
    for block in blocks:
        try:
            by_block.append(measure(block))
        except DataError as error:
            raise DataError(f"prompt {block.example!r}: {error}") from error
    return np.concatenate(by_block, axis=-1)[..., _order(blocks)]


def _order(blocks: Sequence[Block]) -> NDArray[np.intp]:
    return np.argsort(np.concatenate([block.places for block in blocks]))


def _at_equal_length(pairing: Pairing, procedure: Procedure, served: Procedure) -> Array:
    """Return values of prompts whose mean is the win rate at equal length. Raises DataError where there is none."""
    if missing := [table.source for table in (pairing.policy, pairing.base) if "length" not in table.numbers]:
        raise DataError(f"no column length in {' and '.join(missing)}")
    values = length_controlled([(block.policy, block.base) for block in pairing.blocks], procedure, served)
    return values[_order(pairing.blocks)]


def _draws(blocks: Sequence[Block], procedure: Procedure, served: Procedure) -> dict[str, Array]:
    """Return the expected draws of policy and base for every prompt, where they are served by one that rewinds."""
    draws = {}
    if rewinds(procedure):
        draws["policy"] = _by_prompt(blocks, lambda block: rewind_draws(block.policy, block.base, procedure))
    if rewinds(served):
        draws["base"] = _by_prompt(blocks, lambda block: rewind_draws(block.base, block.base, served))
    return draws


def print_comparison(records: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the records of `compare_tables` as a table, below what they share and above their notes."""
    first = records[0]
    left_out = first["policy_only_prompts"] + first["base_only_prompts"]
    heading(
        console,
        f"Win rate of the policy over the base, judged by {first['judge']}",
        f"{first['prompts']:,} prompts × {first['policy_samples']} policy and {first['base_samples']} base "
        f"samples{f' ({left_out:,} prompts in only one table left out)' if left_out else ''}, "
        f"{100 * first['confidence']:g}% intervals, {first['ties']:.1%} of pairs tie",
    )
    lengths, draws = (any(record[key] for record in records) for key in ("length_controlled", "draws"))
    table = plain_table("procedure", "win rate, %", *["at equal length, %"] * lengths, *["draws"] * draws, breaking=[0])
    notes: dict[str, list[str]] = {}
    for record in records:
        served = dict.fromkeys((record["procedure"], record["base_procedure"]))
        cells = [share({**record, "mean": record["win_rate"]})]
        if lengths:
            cells.append(share(record["length_controlled"]) if record["length_controlled"] else "–")
        if draws:
            cells.append("\n".join(f"{model} {amount(e, digits=1)}" for model, e in record["draws"].items()))
        table.add_row(" against ".join(served), *cells)
        for note in record["notes"]:
            notes.setdefault(note, []).append(record["procedure"])
    console.print(table)
    for note, names in notes.items():
        say(console, f"{', '.join(names)}: {note}")
