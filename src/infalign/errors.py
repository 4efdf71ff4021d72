"""The errors a user can meet, each with the exit code of the command line, and how to tell that memory ran out."""


class InfalignError(Exception):
    """Something failed and the message says what, where and what to do."""

    exit_code = 1


class ConfigError(InfalignError):
    """The recipe, an option or a model folder asks for something that cannot be done."""

    exit_code = 2


class DataError(InfalignError):
    """The data is invalid; the message names the file and line, the prompt or the reward."""

    exit_code = 3


class PartialError(InfalignError):
    """The work stopped half way; what is finished is kept and the same command continues."""

    exit_code = 4


def out_of_memory(error: Exception) -> bool:
    """Return whether Python, or torch on whatever device, says with this error that memory ran out."""
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or bool(should_reduce_batch_size(error))
