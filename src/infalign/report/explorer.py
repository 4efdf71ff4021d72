"""The explorer: one page that shows what theory promises for a procedure, N, KL, K, ρ and price of a draw.

The page only looks up numbers, which benchmarks/explorer_tables.py computed by the exact laws.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np

from infalign.core.display import COLORS, QUIET
from infalign.report.curve_figures import COLOR_OF_TRANSFORM
from infalign.report.results import policy_looks


def explorer_page(measured: Sequence[Mapping[str, Any]] = (), served: str = "best-of-4", rho: float = 1.0) -> str:
    """Return the page, whole in itself, which opens with the procedure ``served``, where it knows it, and near ``rho``.

    ``measured`` policies have name, transform, kl, color and win_rates by procedure; it opens at their mean KL, and
    what one of them was trained on has its color.
    """
    tables = json.loads(_own_file("explorer.json"))
    kl = np.mean([policy["kl"] for policy in measured]) if measured else 0.5
    nearest = int(np.abs(np.log(np.array(tables["kls"]) / max(kl, tables["kls"][0]))).argmin())
    knows = int(np.abs(np.array(tables["rhos"]) - rho).argmin())
    data = {"measured": measured, "colors": _colors(measured), "served": served, "kl": nearest, "rho": knows}
    text = json.dumps(tables | data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")  # inside a script
    return _own_file("explorer.html").replace("{{ data }}", text)


def explorer_of_run(results: Mapping[str, Any]) -> str:
    """Return the page with the policies of a run as points, in the colors that its report gives them."""
    points = [
        {"name": name, "color": color, "transform": policy["transform"], "kl": policy["kl"]["mean"]}
        | {"win_rates": policy["win_rates"]["reward"]}
        for (name, policy), (color, _) in zip(results["policies"].items(), policy_looks(results).values(), strict=True)
    ]
    correlations = [found["rho"]["mean"] for found in results["knowledge"].values()]
    return explorer_page(points, results["procedure"], max(correlations, default=1.0))


def _colors(measured: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the color of each transformation: of the first policy that was trained on it, or one that none has."""
    if not measured:
        return COLOR_OF_TRANSFORM | {"optimal": "currentColor"}
    trained = {policy["transform"]: policy["color"] for policy in reversed(measured)}
    free = iter([color for color in COLORS if color not in {policy["color"] for policy in measured}])
    others = {name: next(free, QUIET) for name in COLOR_OF_TRANSFORM if name not in trained}
    return others | {"optimal": "currentColor"} | trained


def _own_file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
