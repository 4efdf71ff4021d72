"""The commands that list built-in recipes, print one, explain keys, and write a first recipe."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from infalign.core.display import printable
from infalign.recipe.built_in import built_in, named

RECIPES_EPILOGUE = """\
Examples:
  infalign recipes                               the built-in recipes
  infalign recipes demo > my.yaml                a copy to start from
  infalign recipes --explain policies.NAME       keys of a policy
  infalign recipes --explain learning_rate       keys with this word

Commands take the name of a built-in recipe (demo) or the path of a file, which
ends in .yaml or .yml or has a folder in front (my.yaml, ./demo). docs/keys.md
lists all keys.
"""


def recipes(
    name: Annotated[str | None, Parameter(help="Print this recipe.")] = None,
    /,
    *,
    explain: Annotated[
        str | None, Parameter(help="Explain the recipe keys whose name contains this: meaning, type and default.")
    ] = None,
) -> None:
    """List the built-in recipes, print one, or explain a key."""
    if explain is not None:
        from infalign.recipe.schema import keys_named

        for key in keys_named(explain):
            print(f"{key.name}\n  {key.facts}\n  {key.meaning}")
    elif name is not None:
        sys.stdout.write(named(name).read_text(encoding="utf-8"))
    else:
        for known, opening in built_in().items():
            print("\n  ".join([known, *opening]))


INIT_EPILOGUE = """\
Examples:
  infalign init --data questions.jsonl --reward my_checker.py:check \\
    --procedure best-of-8
  infalign init --data rows.jsonl --policy Qwen/Qwen3-0.6B --out mine.yaml
  infalign init --data trl-lib/tldr-preference --policy scratch --procedure best-of-8
  infalign init --data rows.jsonl --policy ./my-model \\
    --reward my_reward.py:score --kl-budget 0.5

The recipe has the transformation that `infalign choose` recommends, or for a
checker the optimum and pass@k, learning rates that suit the model, and ordinary
RLHF for comparison. A reward function is tried on twenty rows, and the recipe
checked, before it is written; no file is overwritten.
"""


def init(
    *,
    data: Annotated[str, Parameter(help="A file, a hub id, or world.")],
    policy: Annotated[
        str, Parameter(help="A model folder, a GGUF file, a hub id, or scratch.")
    ] = "Qwen/Qwen2.5-0.5B-Instruct",
    reward: Annotated[
        str | None, Parameter(help="my_file.py:function, a URL, or a model. Default: trained on the pairs.")
    ] = None,
    procedure: Annotated[str, Parameter(help="How the policy will be served.")] = "best-of-4",
    kl_budget: Annotated[
        float | None, Parameter(help="KL budget, in nats per response. Default: 0.6; for a checker 0.1.")
    ] = None,
    out: Annotated[Path, Parameter(help="The file to write.")] = Path("recipe.yaml"),
) -> None:
    """Write a first recipe of your own, commented and checked."""
    from infalign.recipe.template import write_first_recipe

    following = write_first_recipe(
        out, data=data, policy=policy, reward=reward, procedure=procedure, kl_budget=kl_budget
    )
    print(printable("\n  ".join([f"Wrote {out}. Next:", *following]), "\n"))
