"""The errors a user can meet, each with the exit code of the command line."""

from signal import SIGTERM


class InfalignError(Exception):
    """Something failed and the message says what, where and what to do; the base of all errors of infalign.

    >>> issubclass(ConfigError, InfalignError) and issubclass(DataError, InfalignError)
    True
    """

    exit_code = 1


class ConfigError(InfalignError):
    """The recipe, an option or a model folder asks for something that cannot be done.

    >>> parse_procedure("best-of-0")
    Traceback (most recent call last):
    infalign.core.errors.ConfigError: N must be a whole number of samples from 1 to 100,000, found N = 0
    """

    exit_code = 2


class DataError(InfalignError):
    """The data is invalid; the message names the file and line, the prompt or the reward.

    >>> estimate([0.5])
    Traceback (most recent call last):
    infalign.core.errors.DataError: an interval needs at least 2 prompts, found 1
    """

    exit_code = 3


class RequestError(ConfigError):
    """A server refuses what one request holds, such as a text that is too long for its model."""


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
