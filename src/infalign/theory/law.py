"""Analytic curves: win rate and KL of the aligned policy, which depend on (procedure, Φ, β) alone.

The aligned policy has density f(u) ∝ exp(Φ(u)/β) over the calibrated reward u of the base policy
(docs/derivations.md, law of the aligned policy). Its mass may lie within 1e-300 of an end, so u and 1 − u are kept
apart, panels are split until every integral is resolved, and a law carries the error that is left.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import RewindAndRepeat, Served, as_procedure, distortion
from infalign.method.quadrature import TOLERANCE, Panels, adapted, graded
from infalign.method.roots import LOWEST_LOG_BETA, check_strength, find_log_beta
from infalign.method.transforms import Transformation, parse_transform

MIN_KL = 1e-20  # nats; below it the solution would be rounding error


@dataclass(frozen=True, slots=True)
class RankLaw:
    """The law of the calibrated reward u under an aligned policy, at nodes ``u`` with quadrature weights ``weight``.

    ``error`` estimates the absolute error of its KL and of the win rates of smooth procedures; 1e-12 is usual. It
    grows when the mass lies so near to an end that a plain function's values there are rounded.
    """

    transform: Transformation
    beta: float  # the weight of the KL for the paper's raw Φ
    kl: float  # nats
    error: float
    u: Array = field(repr=False)
    v: Array = field(repr=False)  # 1 − u, exact near u = 1
    log_density: Array = field(repr=False)
    cdf: Array = field(repr=False)
    weight: Array = field(repr=False)
    panels: Panels = field(repr=False)

    @property
    def density(self) -> Array:
        """f(u) at the nodes."""
        return np.asarray(np.exp(self.log_density))

    def cdf_at(self, u: ArrayLike) -> Array:
        """Return F at any ``u``."""
        shape = self.panels.weight.shape
        return np.clip(self.panels.integral_to(self.density.reshape(shape), np.asarray(u, float)), 0.0, 1.0)

    def win_rate(self, procedure: Served | str, base: Served | str | None = None) -> float:
        """Return W = 1 − ∫ h(F(u))·h₀'(u) du against the base policy served by ``base``, by default the same."""
        served = as_procedure(procedure)
        theirs = distortion(as_procedure(base or procedure))

        def lost(law: RankLaw) -> Array:
            at_nodes = distortion(served, law.cdf_at).distortion(law.cdf) * theirs.density(law.u)
            return at_nodes.reshape(law.panels.weight.shape)

        law = self
        if self.panels.tails(lost(self)).sum() > TOLERANCE:
            panels, _ = adapted(self.panels, lambda panels: (lost(_law(self.transform, self.beta, panels)),))
            law = _law(self.transform, self.beta, panels)
        return 1.0 - float(np.sum(law.panels.weight * lost(law)))

    def draws(self, procedure: RewindAndRepeat) -> float:
        """Return the expected number of draws of the policy; for the base it is ``expected_draws(quantile)``."""
        return float(procedure.expected_draws(self.cdf_at(procedure.quantile)))


def aligned_law(transform: Transformation, *, beta: float) -> RankLaw:
    """Return the law of the optimal policy of RLHF with reward Φ(C) and KL weight ``beta`` (for the paper's raw Φ).

    KL = E_f[log f] in nats. Raises ConfigError unless beta is positive and finite, and for a Φ that is NaN or +∞.
    """
    return _resolved(transform, beta, graded(edges=transform.edges))


def check_kl(kl: float) -> None:
    """Raise ConfigError for a KL budget that is none, or so small that laws would be rounding errors."""
    if not (kl > 0 and np.isfinite(kl)):
        raise ConfigError(f"the KL budget must be positive and finite, found {kl}")
    if kl < MIN_KL:
        raise ConfigError(f"a KL of {kl:g} leaves the base policy unchanged; give at least {MIN_KL:g} nats")


def law_at_kl(transform: Transformation | str, *, kl: float) -> RankLaw:
    """Return the law whose KL to the base is ``kl`` nats. The KL weight to train with is `training_beta`.

    Raises ConfigError if no β reaches that KL, saying what is the largest KL in reach.

    >>> law = law_at_kl("exp:10", kl=1.0)
    >>> round(law.win_rate("best-of-4"), 4)
    0.9351
    """
    transform = parse_transform(transform) if isinstance(transform, str) else transform
    check_kl(kl)
    panels = graded(edges=transform.edges)
    log_scale = np.log(transform.scale)

    def law(log_beta: float) -> RankLaw:
        nonlocal panels
        resolved = _resolved(transform, float(np.exp(log_scale + log_beta)), panels)
        if len(resolved.panels.start) < 2 * len(graded(edges=transform.edges).start):  # the next β needs similar panels
            panels = resolved.panels
        return resolved

    root = find_log_beta(lambda log_beta: law(log_beta).kl, kl, step=2.0)
    if not root.found:
        raise ConfigError(
            f"{transform.name} cannot reach a KL of {kl:g} nats; the maximum is {root.kl:.4g}, "
            "at the smallest β of floating-point numbers"
        )
    return aligned_law(transform, beta=float(np.exp(log_scale + root.log_beta)))


def training_beta(transform: Transformation | str, *, kl: float) -> float:
    """Return the KL weight of a trainer whose reward is the normalized Φ and whose optimum spends ``kl`` nats.

    Raises as `law_at_kl`.

    >>> round(training_beta("exp:10", kl=1.0), 4)
    0.2413
    """
    law = law_at_kl(transform, kl=kl)
    return law.beta / law.transform.scale


def _resolved(transform: Transformation, beta: float, panels: Panels) -> RankLaw:
    check_strength(None, beta)
    least = float(np.exp(LOWEST_LOG_BETA)) * transform.scale
    if beta < 0.5 * least:  # half, for the rounding of a budget's smallest
        raise ConfigError(
            f"beta = {beta:g} is too small to compute with; for {transform.name}, give at least {least:.2g}"
        )

    def integrands(panels: Panels) -> tuple[Array, ...]:
        log_density = _log_density(transform, beta, panels)
        return np.exp(log_density), information(log_density)

    panels, error = adapted(panels, integrands)
    return _law(transform, beta, panels, error)


def _law(transform: Transformation, beta: float, panels: Panels, error: float = 0.0) -> RankLaw:
    log_density = _log_density(transform, beta, panels)
    density = np.exp(log_density)
    if transform.is_rounded:
        error += np.finfo(float).eps * float(density.max())  # u is rounded, and f varies over 1/max f
    kl = float(np.sum(panels.weight * information(log_density)))
    cdf = np.clip(panels.cumulative(density), 0.0, 1.0)
    u, v, weight = panels.u.ravel(), panels.v.ravel(), panels.weight.ravel()
    return RankLaw(transform, beta, kl, error, u, v, log_density.ravel(), cdf.ravel(), weight, panels)


def _log_density(transform: Transformation, beta: float, panels: Panels) -> Array:
    """Return log f at the nodes, from Φ relative to Φ(1), which may be −∞."""
    u, top = panels.u, transform(1.0)
    phi = np.where(panels.upper[:, None], transform.drop(panels.v), transform(u) - np.where(np.isfinite(top), top, 0.0))
    if (bad := np.isnan(phi) | (phi == np.inf)).any():
        raise ConfigError(f"the transformation {transform.name} is {transform(u)[bad][0]:g} at u = {u[bad][0]:.17g}")
    exponent = phi * (transform.scale / beta)
    if exponent.max() == -np.inf:
        raise ConfigError(f"the transformation {transform.name} is −∞ everywhere")
    return normalized(exponent, panels.weight)


def normalized(exponent: Array, weight: Array) -> Array:
    """Return ``exponent`` − log Σ weight·e^{exponent}, without overflow: the log density of a law."""
    shifted = exponent - exponent.max()  # e^{10}/0.01 overflows without the shift
    return np.asarray(shifted - np.log(np.sum(weight * np.exp(shifted))))


def information(log_density: Array) -> Array:
    """Return f log f − f + 1, which integrates to the KL without cancellation."""
    f = np.exp(log_density)
    return np.asarray(f * np.where(f > 0, log_density, 0.0) - np.expm1(log_density))
