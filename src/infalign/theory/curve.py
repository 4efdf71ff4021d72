"""Points of the analytic curves."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from infalign.core.errors import InfalignError
from infalign.method.procedures import Served, Standard, rewinds
from infalign.method.roots import check_strength
from infalign.method.transforms import Transformation, parse_transform
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.optimum import rank_optimum

SWEEP = np.linspace(0.1, np.sqrt(5.0), 25) ** 2  # KL in nats; at small KL win rates rise like its square root
LARGEST_ERROR = 1e-4  # the largest error of a point; a worse one would look like an answer
TransformOrOptimum = Transformation | Literal["optimal"]


@dataclass(frozen=True, slots=True)
class Point:
    """One point of an analytic curve: an aligned policy, its KL to the base policy and its win rates against it.

    ``error`` bounds what numerics may have done to ``kl`` and the win rates. ``draws`` and ``base_draws`` exist for
    Rewind-and-Repeat, and ``residual`` and ``self_check`` for the optimum (see ``RankOptimum``).
    """

    procedure: str
    base: str  # the procedure that serves the base policy
    transform: str
    beta: float  # the weight of the KL for the paper's raw Φ
    normalized_beta: float  # for the normalized Φ that trainers use
    kl: float  # nats
    win_rate: float
    standard_win_rate: float  # both policies served by one plain draw
    error: float
    draws: float | None = None
    base_draws: float | None = None
    residual: float | None = None
    self_check: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers that exist, for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def parse_transform_or_optimum(name: str) -> TransformOrOptimum:
    """Return the transformation that ``name`` spells, or ``optimal``, which is another one at every KL, as it is."""
    return "optimal" if name == "optimal" else parse_transform(name)


def curve_point(
    procedure: Served,
    transform: TransformOrOptimum,
    *,
    beta: float | None = None,
    kl: float | None = None,
    base: Served | None = None,
) -> Point:
    """Return the point of ``transform``, or of the optimum for ``procedure``, at the paper's ``beta`` or ``kl`` nats.

    ``base`` serves the base policy, by default ``procedure``. Raises ConfigError unless exactly one of ``beta`` and
    ``kl`` is given, positive and within reach, and InfalignError for a point that could not be computed to 1e-4.
    """
    check_strength(kl, beta)
    more: dict[str, Any] = {}
    if isinstance(transform, str):
        optimum = rank_optimum(procedure, beta=beta, kl=kl, base=base)
        law, spent, wins = optimum.law, optimum.kl, optimum.win_rate
        more = {"residual": optimum.residual, "self_check": optimum.self_check}
    else:
        law = law_at_kl(transform, kl=kl) if kl is not None else aligned_law(transform, beta=beta or 0.0)
        spent, wins = law.kl, law.win_rate(procedure, base)
    name = transform if isinstance(transform, str) else transform.name
    if rewinds(procedure):
        more |= {"draws": law.draws(procedure), "base_draws": float(procedure.expected_draws(procedure.quantile))}
    error = law.error + more.get("self_check", 0.0)
    if not error <= LARGEST_ERROR:
        raise InfalignError(f"{name} for {procedure.name} at {spent:.4g} nats is known only to within {error:.1g}")
    return Point(
        procedure=procedure.name,
        base=(base or procedure).name,
        transform=name,
        beta=law.beta,
        normalized_beta=law.beta / law.transform.scale,
        kl=spent,
        win_rate=wins,
        standard_win_rate=law.win_rate(Standard()),
        error=error,
        **more,
    )


def sweep(procedure: Served, transform: TransformOrOptimum, *, base: Served | None = None) -> tuple[list[Point], str]:
    """Return the points from 0.01 to 5 nats, up to the first that cannot be computed, and why ("" if all can).

    Raises InfalignError if there is no point at all.
    """
    points: list[Point] = []
    for kl in SWEEP:
        try:
            points.append(curve_point(procedure, transform, kl=float(kl), base=base))
        except InfalignError as error:
            if not points:
                raise
            return points, str(error)
    return points, ""
