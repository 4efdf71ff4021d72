"""The explorer: one page that shows what theory promises for a procedure, N, KL, K, ρ and price of a draw.

The page only looks up numbers, which benchmarks/explorer_tables.py computed by the exact laws.
"""

import json
from importlib.resources import files

from infalign.report.curve_figures import COLOR_OF_TRANSFORM


def explorer_page(served: str = "best-of-4") -> str:
    """Return the page, whole in itself; it opens at 0.5 nats with the procedure ``served`` where it knows it."""
    page, numbers = (
        (files(__package__) / name).read_text(encoding="utf-8") for name in ("explorer.html", "explorer.json")
    )
    tables = json.loads(numbers)
    colors = COLOR_OF_TRANSFORM | {"optimal": "currentColor"}
    data = tables | {"colors": colors, "served": served, "kl": tables["kls"].index(0.5)}
    return page.replace("{{ data }}", json.dumps(data, separators=(",", ":")))
