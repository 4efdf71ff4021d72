"""Quadrature against integrals in closed form, among them masses within 1e-200 of an end."""

from collections.abc import Callable

import numpy as np
import pytest

from infalign.method.calibration import Array
from infalign.method.quadrature import TOLERANCE, Panels, adapted, graded


@pytest.mark.parametrize(
    ("integrand", "exact"),
    [
        (lambda p: p.u**-0.5, 2.0),
        (lambda p: p.v**-0.5, 2.0),
        (lambda p: p.u**-0.9, 10.0),
        (lambda p: np.log(p.u), -1.0),
        (lambda p: np.abs(p.u - 1 / 3), 5 / 18),
        (lambda p: p.u**1000 * 1001, 1.0),
        (lambda p: 2e-3 / (1e-6 + (p.u - 0.5) ** 2), 4 * np.arctan(500)),
        # jumps where no node of their panel sees them, or exactly between two panels
        *(
            (lambda p, jump=jump: (p.u < jump) * 1.0, jump)
            for jump in (0.5002, 0.50001, 0.4999, 0.0605516250196303, 0.85, 1 / 16, 1 - 1e-5)
        ),
    ],
)
def test_adapted_panels_reach_the_tolerance(integrand: Callable[[Panels], Array], exact: float) -> None:
    """Integrable singularities, jumps, kinks, poles nearby and masses within 1e-200 of an end cost no accuracy."""
    panels, error = adapted(graded(), lambda panels: (integrand(panels),))
    assert error <= TOLERANCE * max(1.0, abs(exact))
    assert np.sum(panels.weight * integrand(panels)) == pytest.approx(exact, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("distance", [lambda p: p.u, lambda p: p.v], ids=["bottom", "top"])
@pytest.mark.parametrize("width", [1e-3, 1e-30, 1e-290])
def test_a_normalised_density_is_found_wherever_it_lies(distance: Callable[[Panels], Array], width: float) -> None:
    """The density ∝ e^{−x/width} of a mass within 1e-290 of an end has its mean."""

    def height(panels: Panels) -> Array:
        exponent = -distance(panels) / width
        shifted = np.exp(exponent - exponent.max())
        return shifted / np.sum(panels.weight * shifted)

    panels, error = adapted(graded(), lambda panels: (height(panels),))
    assert error <= TOLERANCE * 2
    mean = np.sum(panels.weight * height(panels) * distance(panels))
    assert mean / width == pytest.approx(1.0 - (np.exp(-1 / width) / width), rel=1e-11)


def test_what_is_not_resolved_is_reported() -> None:
    """A function with more waves than there may be panels has a large error, not a wrong integral."""
    _, error = adapted(graded(), lambda panels: (1.0 + np.sin(1e8 * panels.u),))
    assert error > 0.01


def test_edges_separate_what_they_should() -> None:
    """A function with jumps at given edges needs no splitting, wherever they lie."""
    edges = np.array([1e-9, 0.15, 0.15 + 1e-12, 0.7])
    panels = graded(edges=edges)
    for edge in edges:
        assert np.sum(panels.weight * (panels.v < edge)) == pytest.approx(edge, abs=1e-15)
