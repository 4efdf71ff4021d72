"""Print docs/faults.md."""

from faults.registry import page

print(page(), end="")
