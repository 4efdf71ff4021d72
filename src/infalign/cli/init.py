"""The command that writes a first recipe."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from infalign.cli import completion
from infalign.core.display import printable

INIT_EPILOGUE = """\
Examples:
  infalign init --data rows.jsonl --policy Qwen/Qwen3-0.6B --out mine.yaml
  infalign init --data trl-lib/tldr-preference --policy scratch --procedure best-of-8
  infalign init --data rows.jsonl --policy ./my-model \\
    --reward my_reward.py:score --kl-budget 0.5

The recipe has the transformation that `infalign choose` recommends, learning
rates that suit the model, and ordinary RLHF for comparison. It is checked
before it is written; no file is overwritten.
"""


def init(
    *,
    data: Annotated[
        str,
        Parameter(help="A file, a hub id, or world.", completer=completion.rows),
    ],
    policy: Annotated[str, Parameter(help="A model folder, a GGUF file, a hub id, or scratch.")],
    reward: Annotated[
        str | None,
        Parameter(help="my_file.py:function, a URL, or a model. Default: trained on the pairs."),
    ] = None,
    procedure: Annotated[str, Parameter(help="How the policy will be served.")] = "best-of-4",
    kl_budget: Annotated[float, Parameter(help="KL budget, in nats per response.")] = 0.6,
    out: Annotated[Path, Parameter(help="The file to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a first recipe of your own, commented and checked."""
    from infalign.recipe.template import write_first_recipe

    following = write_first_recipe(
        out, data=data, policy=policy, reward=reward, procedure=procedure, kl_budget=kl_budget
    )
    print(printable("\n  ".join([f"Wrote {out}. Next:", *following]), "\n"))
