"""The errors a user can meet, each with the exit code of the command line."""

from signal import SIGTERM


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


class StoppedError(SystemExit):
    """SIGTERM came; like KeyboardInterrupt it is not caught by `except Exception`."""

    def __init__(self) -> None:
        super().__init__(128 + SIGTERM)


def first_line(error: Exception) -> str:
    """Return the type of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
