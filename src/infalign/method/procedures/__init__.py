"""Inference-time procedures: what is served when the model is sampled several times.

A rank-based procedure is a *distortion* h of the CDF: a policy with CDF F over calibrated reward is served with CDF
h(F) (docs/derivations.md, distortion of a procedure). Each procedure also weighs the samples of a finite set: the
weighted law is an unbiased estimate of what would be served, and says how one answer is chosen from draws (`Serving`).
A family is a module with a function ``parse``, and a line in `FAMILIES`.
"""

from contextlib import suppress

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean
from infalign.method.procedures import extremes, order_statistics, own, rewind, standard
from infalign.method.procedures.base import BaseQuantile, Draws, Procedure, RankProcedure, Votes, looks_at_ranks
from infalign.method.procedures.extremes import BestOfN, Extreme, WorstOfN
from infalign.method.procedures.mixture import Mixture, ranked, respelled, spelled_parts
from infalign.method.procedures.order_statistics import OrderStatistics
from infalign.method.procedures.own import Own
from infalign.method.procedures.rewind import RewindAndRepeat, Served, distortion, rewinds
from infalign.method.procedures.standard import Standard

__all__ = [
    "BaseQuantile",
    "BestOfN",
    "Draws",
    "Extreme",
    "Mixture",
    "OrderStatistics",
    "Procedure",
    "RankProcedure",
    "RewindAndRepeat",
    "Served",
    "Standard",
    "Votes",
    "WorstOfN",
    "distortion",
    "looks_at_ranks",
    "respelled",
    "rewinds",
]

FAMILIES = (standard, extremes, order_statistics, rewind)


def parse_procedure(name: str, *, loads: bool = True) -> Served:
    """Return the procedure that ``name`` spells.

    ``standard``, ``best-of-4``, ``worst-of-4``, ``2nd-best-of-8``, ``top-2-of-8``, ``rewind:0.85:32``,
    ``rewind:0.85:32:best``, ``pass@8`` and ``pass^8`` for the best and the worst of 8, ``mine.py:Mine`` for a class or
    an instance of one's own, and mixtures like ``0.5*best-of-2+0.5*standard``. Without ``loads`` no code of the user's
    is: what a client of a server may name. Raises ConfigError for another name.

    >>> parse_procedure("best-of-4")
    BestOfN(n=4)
    """
    families = (*FAMILIES, own) if loads else FAMILIES

    def single(name: str) -> Served | None:  # no mixture, which could hold others without end
        return next((procedure for family in families if (procedure := family.parse(name)) is not None), None)

    with suppress(ValueError):  # a number in the name is none
        parts = [(float(share), single(part)) for share, part in spelled_parts(name)]
        if parts and all(part is not None for _, part in parts):
            return Mixture(tuple((share, ranked(part)) for share, part in parts if part is not None))
        if not parts and (procedure := single(name)) is not None:
            return procedure
    known = [spelling for family in families for spelling in family.SPELLINGS]
    raise ConfigError(
        f"unknown procedure {name!r}; known: {', '.join(known)}, and mixtures like 0.5*best-of-2+0.5*standard"
        f"{did_you_mean(name, known, after='; ')}"
    )


def as_procedure(procedure: Served | str) -> Served:
    """Return a procedure, or the one that a text spells."""
    return parse_procedure(procedure) if isinstance(procedure, str) else procedure


def seen_in(rollouts: int, procedure: Served) -> Served:
    """Return what weights of so many rollouts can tell apart: of an N above half of them, that with half.

    The mean is over all sets of N rollouts: where N is their number, that is one set, whose weight cancels.
    """
    if not isinstance(procedure, Extreme) or procedure.n <= rollouts // 2:
        return procedure
    return type(procedure)(max(1, rollouts // 2))


def own_spellings(procedure: Procedure) -> list[str]:
    """Return what spells the user's own procedures among it and, if it is a mixture, its parts."""
    parts = [part for _, part in procedure.parts] if isinstance(procedure, Mixture) else [procedure]
    return [part.spelling for part in parts if isinstance(part, Own)]
