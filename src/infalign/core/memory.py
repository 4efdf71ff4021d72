"""Memory: how much is computed at once, when there is none left, and how it is given back."""

import ctypes
import sys
from contextlib import suppress

ON_GPU = 8  # times what a CPU computes at once


def at_once(on_cpu: int, device_type: str) -> int:
    """Return how many of something to compute at once on a device of torch, ``on_cpu`` on one.

    A CPU is fastest with what stays in its cache; a GPU takes no longer for more, and waits for each launch.
    """
    return on_cpu if device_type == "cpu" else ON_GPU * on_cpu


def out_of_memory(error: Exception) -> bool:
    """Return whether Python, or torch on whatever device, reports with this error that memory ran out."""
    if isinstance(error, MemoryError) or "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from accelerate.utils.memory import should_reduce_batch_size

    return bool(should_reduce_batch_size(error))


def free_memory() -> None:
    """Give back what nothing uses any more: what a failed attempt holds, or a device's cache."""
    from accelerate.utils.memory import clear_device_cache

    clear_device_cache(garbage_collection=True)


def trim_heap() -> None:
    """Give freed memory back to the system: glibc keeps blocks of less than 32 MB, gigabytes after a training."""
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)
