"""The explorer: one page that shows what theory promises for a procedure, N, KL, K, ρ and price of a draw.

The page only looks up numbers, which benchmarks/explorer_tables.py computed by the exact laws.
"""

import json
from importlib.resources import files

from infalign.report.curve_figures import COLOR_OF_TRANSFORM


def explorer_page(served: str = "best-of-4") -> str:
    """Return the page, whole in itself; it opens at 0.5 nats with the procedure ``served`` where it knows it."""
    tables = json.loads(_own_file("explorer.json"))
    data = {
        "colors": COLOR_OF_TRANSFORM | {"optimal": "currentColor"},
        "served": served,
        "kl": tables["kls"].index(0.5),
    }
    return _own_file("explorer.html").replace("{{ data }}", json.dumps(tables | data, separators=(",", ":")))


def _own_file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
