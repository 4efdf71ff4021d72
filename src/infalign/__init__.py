"""Align a language model for the way it is served.

Rewards are ranked against the reference policy's own rollouts, the rank is transformed for the
inference-time procedure (Best-of-N, Worst-of-N, …), and any RLHF solver does the rest (InfAlign, ICML 2025).

Axis letters in array names: ``P`` prompts, ``K`` reference rollouts of a prompt, ``M`` policy samples,
``B`` base samples, ``N`` the N of a procedure, ``G`` points of a grid, ``T`` tokens, ``V`` vocabulary.
"""

import re
from importlib import import_module
from pathlib import Path

_STUB = Path(__file__).with_suffix(".pyi")  # the public names, as type checkers read them
_MODULES = {name: module for module, name in re.findall(r"from (\S+) import (\w+)", _STUB.read_text("utf-8"))}

__all__ = sorted(_MODULES)


def __dir__() -> list[str]:
    """Return the public names, without importing any."""
    return [*__all__, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that ``infalign --help`` waits for neither NumPy nor SciPy."""
    if name == "__version__":
        from importlib.metadata import version

        return version("infalign")
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
