"""Memory: how much is in use, and when there is none left."""

import ctypes
import sys
import threading
from contextlib import suppress


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


class PeakMemory:
    """Measures the most memory in use within a ``with`` block.

    On the CPU a thread looks every twentieth of a second. (transformers' own tracker looks without a pause, and
    so slows down the training.)
    """

    INTERVAL = 0.05  # seconds

    def __init__(self, device: str) -> None:
        self.peak, self._on_gpu = 0, device != "cpu"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        if self._on_gpu:
            import torch

            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            import torch

            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._ended.set()
            self._thread.join()

    def _watch(self) -> None:
        from psutil import Process

        process, ended = Process(), False
        while not ended:
            self.peak = max(self.peak, process.memory_info().rss)
            ended = self._ended.wait(self.INTERVAL)
