"""The command that writes a first recipe."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from infalign.cli import completion
from infalign.cli.output import open_console
from infalign.core.display import say
from infalign.core.errors import ConfigError, InfalignError

if TYPE_CHECKING:
    from infalign.recipe.template import Answers

FROM_PAIRS = "learn it from the pairs"  # what is asked for as a reward
QUESTIONS: dict[str, tuple[str, Any]] = {  # with the default answer
    "data": ("Data: a file of yours, hh-helpful, hh-harmless, tldr, a hub id, or world", "world"),
    "policy": ("Policy: a model's folder, GGUF or hub id, or scratch", "scratch"),
    "reward": ("Reward: my_file.py:function, a URL, a model, fit, head", FROM_PAIRS),
    "procedure": ("Served as: best-of-N, worst-of-N, rewind:Q:N, standard", "best-of-4"),
    "kl_budget": ("KL budget, nats per response", 0.6),
}
INIT_EPILOGUE = """\
Examples:
  infalign init                                    asks
  infalign init --data rows.jsonl --policy Qwen/Qwen3-0.6B --out mine.yaml
  infalign init --data hh-helpful --policy scratch --procedure best-of-8
  infalign init --data rows.jsonl --policy ./my-model \\
    --reward my_reward.py:score --kl-budget 0.5

The recipe has the transformation that `infalign choose` finds for procedure
and budget, learning rates that suit the model, and ordinary RLHF beside it to
compare with. It is read before it is written, and no file is overwritten.
"""


def init(
    *,
    data: Annotated[
        str | None,
        Parameter(help="A file, hh-helpful, hh-harmless, tldr, a hub id, or world.", completer=completion.rows),
    ] = None,
    policy: Annotated[str | None, Parameter(help="A model's folder, GGUF or hub id, or scratch.")] = None,
    reward: Annotated[
        str | None,
        Parameter(help="fit or head (from pairs), my_file.py:function, a URL, or a model. Default: from pairs."),
    ] = None,
    procedure: Annotated[str | None, Parameter(help="How the policy will be served. Default: best-of-4.")] = None,
    kl_budget: Annotated[
        float | None, Parameter(help="How far it may move, in nats per response. Default: 0.6.")
    ] = None,
    out: Annotated[Path, Parameter(help="The new file.")] = Path("recipe.yaml"),
) -> None:
    """Write a first recipe of your own, commented and checked."""
    ask = sys.stdin.isatty() and sys.stdout.isatty()
    if not ask and (data is None or policy is None):
        raise ConfigError("give --data and --policy; on a terminal, `infalign init` asks for them")
    from infalign.recipe.template import Answers, write_first_recipe

    options = {"data": data, "policy": policy, "reward": reward, "procedure": procedure, "kl_budget": kl_budget}
    given: dict[str, Any] = {name: answer for name, answer in options.items() if answer is not None}
    answers = Answers(**{name: default for name, (_, default) in QUESTIONS.items()} | {"reward": None} | given)
    if ask:
        answers = _asked(answers, [name for name in QUESTIONS if name not in given], out)
    following = write_first_recipe(answers, out)
    print("\n  ".join([f"{out} is written. Next:", *following]))


def _asked(answers: "Answers", names: Sequence[str], out: Path) -> "Answers":
    """Return answers in which those of ``names`` are asked for, each again as long as no recipe can have it.

    What is given is checked before the first question, and then each answer with those before it.
    """
    from rich.prompt import FloatPrompt, Prompt

    from infalign.recipe.template import checked

    if "reward" in names:  # data without pairs will do until it is asked whether the reward learns from them
        answers = replace(answers, reward="http://127.0.0.1")
    checked(answers, out)
    for name in names:
        question, default = QUESTIONS[name]
        kind: Any = FloatPrompt if isinstance(default, float) else Prompt
        while True:
            answer = kind.ask(question, default=default)
            change: dict[str, Any] = {name: None if answer == FROM_PAIRS else answer}
            found = replace(answers, **change)
            try:
                checked(found, out)
                break
            except InfalignError as error:
                say(open_console(), str(error), markup=False)
        answers = found
    return answers
