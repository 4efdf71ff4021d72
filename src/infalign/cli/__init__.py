"""The command line: exit codes, and commands that parse, call one library function and write one output."""

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from infalign.cli import recipes, run, serving, tables, theory, trainers
from infalign.core.display import printable
from infalign.core.errors import InfalignError, StoppedError
from infalign.core.signals import raise_outside

CONTINUES = "rerun the same command to resume"
STOP_WITHIN = 20.0  # seconds; workers have 10
HELP = """\
Align a language model for the way it is served: Best-of-N, Worst-of-N and other inference-time procedures.

It ranks rewards among the reference policy's own rollouts, transforms the rank for the procedure, and hands the \
result to an ordinary RLHF solver.
"""
EPILOGUE = """\
Examples:
  infalign recipes                      the built-in recipes
  infalign run demo --dry-run           check the data and show the plan
  infalign run demo                     the whole run, from data to report
  infalign run my.yaml --until train    stop after training
  infalign status runs/demo             what is done, and what is not and why
  infalign run demo --set rollout.k=128    more rollouts; keeps the old ones
  infalign choose --procedure best-of-32 --kl 0.5 --rollouts 100

Rerun the same command to resume after a stop; after a change, it redoes only
what depends on the change. Add --debug to see where an error came from.

Exit codes: 0 done, 1 failed or run directory in use, 2 wrong usage, recipe or
model, 3 invalid data, 4 unfinished (rerun to resume), 130 SIGINT, 143 SIGTERM,
141 closed pipe.
"""

COMMANDS: dict[str, dict[Callable[..., None], str | None]] = {  # commands, and how their help ends
    "Run a recipe": {run.run: None, run.status: run.STATUS_EPILOGUE},
    "Write your own recipe": {recipes.init: recipes.INIT_EPILOGUE, recipes.recipes: recipes.RECIPES_EPILOGUE},
    "Use an aligned policy": {serving.generate: serving.GENERATE_EPILOGUE, serving.serve: serving.SERVE_EPILOGUE},
    "Plan a run with theory": {theory.curve: theory.CURVE_EPILOGUE, theory.choose: theory.CHOOSE_EPILOGUE},
    "Measure tables of rewards": {tables.win_rate: tables.WIN_RATE_EPILOGUE, tables.pass_at_k: tables.PASS_EPILOGUE},
    "Use another trainer": {trainers.export: trainers.EXPORT_EPILOGUE, trainers.serve_reward: trainers.SERVE_EPILOGUE},
}
_GROUPS = [Group(title, sort_key=place) for place, title in enumerate(COMMANDS)]

app = App(
    name="infalign",
    help=HELP,
    help_format="plaintext",
    help_epilogue=EPILOGUE,
    version_flags=["--version"],
    group_commands=_GROUPS[0],
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(negative=(), show_default=lambda default: None if default is False else default),
)

for _group, _commands in zip(_GROUPS, COMMANDS.values(), strict=True):
    for _place, (_command, _epilogue) in enumerate(_commands.items()):
        app.command(_command, group=_group, sort_key=_place, help_epilogue=_epilogue)
app.register_install_completion_command(help="Complete commands and options with TAB.")


def main() -> None:
    """Run the command line: errors in one sentence, exit codes that scripts can use."""
    debug = "--debug" in sys.argv[1:]
    words = [word for word in sys.argv[1:] if word != "--debug"]
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in a background job
        signal.signal(signal.SIGINT, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every encoding has ✓
    warnings.formatwarning = lambda message, *_: f"infalign: {printable(str(message))}\n"
    if words[:1] == ["run"]:  # reads the built-in recipes
        app["run"].help_epilogue = run.run_epilogue()
    try:
        app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        said = str(error)
        if not words or words[0] not in app:  # the list of all commands says nothing
            said = said.partition(" Available commands:")[0]
        said = said.rstrip(".")
        _fail(f"{said}{'' if said.endswith('?') else '.'} See `infalign --help`.", 2)
    except KeyboardInterrupt:
        _fail(f"interrupted; {CONTINUES}", 130)
    except StoppedError:
        _fail(f"stopped; {CONTINUES}", 143)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        _fail(f"stopped: the reader of the output closed it; {CONTINUES}", 141)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exception(error)
        if isinstance(error, InfalignError):
            _fail(str(error), error.exit_code)
        text = " ".join(str(error).split())
        _fail(f"unexpected {type(error).__name__}: {text}; rerun with --debug to see where", 1)


def _stop(number: int, frame: FrameType | None) -> None:
    """Raise, so that `main` ends in one sentence; exit at once on a second signal. Workers end with this process."""
    for second in (signal.SIGINT, signal.SIGTERM):
        signal.signal(second, _stop_at_once)
    if sys.stderr is not None and sys.stderr.isatty():  # workers take seconds to end
        os.write(sys.stderr.fileno(), b"\ninfalign: stopping; once more stops at once\n")
    hanging = threading.Timer(STOP_WITHIN, _stop_at_once, (number, frame))  # in a thread of a user's code, say
    hanging.daemon = True
    hanging.start()
    raise_outside(KeyboardInterrupt if number == signal.SIGINT else StoppedError, frame)


def _stop_at_once(number: int, _: FrameType | None) -> NoReturn:
    with suppress(OSError):
        os.write(2, f"infalign: stopped; {CONTINUES}\n".encode())
    os._exit(128 + number)


def _fail(sentence: str, exit_code: int) -> NoReturn:
    shown = sentence if len(sentence) <= 10_000 else f"{sentence[:5_000]} … {sentence[-5_000:]}"
    print(f"infalign: {printable(shown)}", file=sys.stderr)
    sys.exit(exit_code)
