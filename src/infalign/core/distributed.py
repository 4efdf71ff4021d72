"""Which of the processes of a distributed training this one is, by the variables that torchrun and accelerate set."""

import os


def is_first() -> bool:
    """Return whether this is the first process, which alone writes, or the only one."""
    return not _rank_and_size()[0]


def processes() -> int:
    """Return how many processes train together."""
    return _rank_and_size()[1]


def _rank_and_size() -> tuple[int, int]:
    """Return RANK and WORLD_SIZE; (0, 1) unless RANK is one of WORLD_SIZE processes that have a place to meet.

    Clusters set some of these variables for every process, also for one that is alone.
    """
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    can_meet = os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")
    return (rank, size) if 0 <= rank < size and can_meet else (0, 1)
