"""The numbers of the explorer page, computed again in half a minute.

What each transformation wins at a KL when it trains a policy whose rank correlation is ρ and that learns the mean of
the ranks among K rollouts.

    python benchmarks/explorer_tables.py > src/infalign/report/explorer.json
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RankProcedure, Standard, WorstOfN
from infalign.method.transforms import Exponential, Identity, Transformation
from infalign.theory.law import Law
from infalign.theory.optimum import optimal
from infalign.theory.rank_correlation import law_at_rank_correlation
from infalign.theory.tabulation import smoothed

KLS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # nats
NS = (1, 2, 4, 8, 16, 32)
RHOS = (1.0, 0.9, 0.7, 0.5)
ROLLOUTS = (None, 100, 16)  # K; None stands for exact ranks
RANKS = np.sin(np.linspace(0.0, np.pi / 2.0, 41)) ** 2  # denser at both ends, where densities are steep
PLAIN = Standard()

Curve = dict[str, Any]


def explorer_tables() -> dict[str, Any]:
    """Return all that the page looks up, and where each number stands."""
    places = {"kls": KLS, "ns": NS, "rhos": RHOS, "rollouts": ROLLOUTS, "ranks": RANKS.round(5).tolist()}
    return places | {"curves": _curves()}


def _curves() -> list[Curve]:
    """Return a record for each kind of procedure and transformation, and for the optimum of each N.

    ``won`` and ``from_plain`` have win rates for each N by KL, K and ρ: against the base served alike, and against one
    plain draw of it; None where the transformation cannot spend the KL. ``log_density`` is log f(u) at `RANKS` by KL
    for exact ranks.
    """
    makers: dict[str, type[BestOfN] | type[WorstOfN]] = {"best-of": BestOfN, "worst-of": WorstOfN}
    aims: list[tuple[str, Transformation | None, dict[int, RankProcedure]]] = []
    for kind, make in makers.items():
        procedures: dict[int, RankProcedure] = {n: PLAIN if n == 1 else make(n) for n in NS}
        sign = 1.0 if make is BestOfN else -1.0
        aims += [(kind, t, procedures) for t in (Identity(), Exponential(5.0 * sign), Exponential(10.0 * sign))]
        aims += [(kind, None, {n: procedure}) for n, procedure in procedures.items()]
    curves: list[Curve] = []
    for kind, transform, procedures in aims:
        name = transform.name if transform else "optimal"
        curves.append({"kind": kind, "transform": name} | _curve(transform, procedures))
    return curves


def _curve(transform: Transformation | None, procedures: Mapping[int, RankProcedure]) -> Curve:
    """Return the numbers of a transformation; None is the optimum of the one procedure."""
    aims = {kl: transform or optimal(*procedures.values(), kl=kl).law.transform for kl in KLS}
    laws = [[[_law(aim, k, rho, kl) for rho in RHOS] for k in ROLLOUTS] for kl, aim in aims.items()]
    exact = [by_rollouts[0][0] for by_rollouts in laws]
    density = [law and np.interp(RANKS, law.u, law.log_density).round(3).tolist() for law in exact]

    def wins(procedure: RankProcedure, base: RankProcedure) -> list[Any]:
        return [
            [[law and round(law.win_rate(procedure, base), 5) for law in by_rho] for by_rho in by_rollouts]
            for by_rollouts in laws
        ]

    return {
        "won": {n: wins(procedure, procedure) for n, procedure in procedures.items()},
        "from_plain": {n: wins(procedure, PLAIN) for n, procedure in procedures.items()},
        "log_density": density,
    }


def _law(transform: Transformation, rollouts: int | None, rho: float, kl: float) -> Law | None:
    """Return the law of the true rank, or None where the transformation cannot spend ``kl`` nats."""
    try:
        learnt = transform if rollouts is None else smoothed(transform, rollouts)
        return law_at_rank_correlation(learnt, rho=rho, kl=kl).law
    except ConfigError:
        return None


if __name__ == "__main__":
    print(json.dumps(explorer_tables(), allow_nan=False, separators=(",", ":")))
