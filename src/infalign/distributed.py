"""Which of the processes of a distributed training this one is, by the variables that torchrun and accelerate set."""

import os


def is_first() -> bool:
    """Return whether this is the first process, which alone writes, or the only one."""
    return not int(os.environ.get("RANK", "0"))


def processes() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))
