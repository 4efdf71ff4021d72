"""The command line: parse, call one library function, write one output."""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter

from infalign.errors import InfalignError

if TYPE_CHECKING:
    from rich.console import Console

    from infalign.config import Recipe

CONTINUES = "the same command continues where this one stopped"
HELP = """\
Align a language model for the way it is served: Best-of-N, Worst-of-N and other inference-time procedures.

Rewards are ranked among the reference policy's own rollouts, the rank is transformed for the procedure, and an \
ordinary RLHF solver does the rest.
"""
EPILOGUE = """\
Examples:
  infalign run recipes/demo.yaml --dry-run    check the data, show the plan
  infalign run recipes/demo.yaml              everything, from data to report
  infalign train recipes/demo.yaml            up to the policies, no evaluation
  infalign run recipes/demo.yaml --set rollout.k=128    more rollouts, none lost

The same command continues after a stop and, after a change, redoes what
depends on it. --debug, anywhere, shows where an error came from.

Exit codes: 0 done, 1 failed, 2 wrong usage, recipe or model, 3 invalid data,
4 partial (run it again), 130 interrupted by SIGINT, 143 by SIGTERM.
"""
STAGES = {
    "data": "Read and split the data, make the tokenizer.",
    "sft": "Fine-tune the policy on demonstrations: the reference.",
    "reward-model": "Fit the reward model and, on other rows, the judge.",
    "rollout": "Draw K responses to every training prompt.",
    "score": "Score the rollouts with the reward.",
    "calibrate": "Give every training prompt its reference_rewards.",
    "train": "Train the policies on calibrated, transformed rewards.",
    "evaluate": "Measure win rates and KL on fresh samples.",
    "report": "Write the report with its figures.",
}

app = App(
    name="infalign",
    help=HELP,
    help_format="plaintext",
    help_epilogue=EPILOGUE,
    version_flags=["--version"],
    group_commands=Group("The whole run", sort_key=0),
    suppress_keyboard_interrupt=False,
)

RecipePath = Annotated[str, Parameter(help="A recipe (YAML).")]
Overrides = Annotated[
    list[str] | None,
    Parameter(
        name="--set", help="Change a setting, e.g. --set rollout.k=16. Repeatable.", negative=(), show_default=False
    ),
]


@app.command
def run(
    recipe: RecipePath,
    /,
    *,
    set_: Overrides = None,
    dry_run: Annotated[
        bool,
        Parameter(help="Check recipe and data, print the plan, load no model.", negative=(), show_default=False),
    ] = False,
) -> None:
    """Run a recipe from data to report; done work is not repeated."""
    if dry_run:
        from infalign.plan import print_plan

        print_plan(_recipe(recipe, set_), _console())
        return
    root = _run_until("report", recipe, set_)
    from infalign.report import print_table

    print_table(root, _console())


def _add_stage(stage: str, text: str, group: Group) -> None:
    def command(recipe: RecipePath, /, *, set_: Overrides = None) -> None:
        _run_until(stage, recipe, set_)

    command.__doc__ = f"{text}\n\nStages before it that are not done yet are done first."
    app.command(command, name=stage, group=group, sort_key=list(STAGES).index(stage))


_group = Group("Up to one stage, in this order", sort_key=1)
for _stage, _text in STAGES.items():
    _add_stage(_stage, _text, _group)


def main() -> None:
    """Run the command line: errors in one sentence, exit codes that scripts can use."""
    debug = "--debug" in sys.argv[1:]
    words = [word for word in sys.argv[1:] if word != "--debug"]
    signal.signal(signal.SIGTERM, _stop)
    app["run"].help_epilogue = f"{_recipes()}\n\n{EPILOGUE}"
    try:
        app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        _fail(f"{str(error).rstrip('.')}. See `infalign --help`.", 2)
    except KeyboardInterrupt:
        _fail(f"interrupted; {CONTINUES}", 130)
    except _StoppedError:
        _fail(f"stopped; {CONTINUES}", 143)
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exception(error)
        if isinstance(error, InfalignError):
            _fail(str(error), error.exit_code)
        text = " ".join(str(error).split())
        _fail(f"unexpected {type(error).__name__}: {text}; run again with --debug to see where", 1)


class _StoppedError(BaseException):
    """SIGTERM came; like KeyboardInterrupt no `except Exception` holds it up."""


def _stop(*_: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off the first one's clean-up
    raise _StoppedError


def _fail(sentence: str, exit_code: int) -> NoReturn:
    print(f"infalign: {sentence}", file=sys.stderr)
    sys.exit(exit_code)


def _recipes() -> str:
    """Return the recipes of the folder ``recipes``, each with its first comment line."""
    found = sorted(Path("recipes").glob("*.yaml"))
    lines = (
        path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].removeprefix("#").strip()
        for path in found
    )
    return "\n".join(["Recipes here:", *(f"  {path}: {line}" for path, line in zip(found, lines, strict=True))])


def _recipe(path: str, overrides: list[str] | None) -> "Recipe":
    from infalign.config import load_recipe

    return load_recipe(path, overrides)


def _console() -> "Console":
    from rich.console import Console

    return Console(quiet=os.environ.get("RANK", "0") != "0")  # of a distributed training the first process speaks


def _run_until(stage: str, path: str, overrides: list[str] | None) -> Path:
    recipe = _recipe(path, overrides)
    from infalign import pipeline

    return pipeline.run(recipe, until=stage, console=_console())
