"""A first recipe: one of the two in the folder ``first``, with what the user named in its place, and checked."""

import os
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from ruamel.yaml import YAML

from infalign.core.errors import ConfigError
from infalign.core.storage import write_text
from infalign.core.user_code import is_file
from infalign.data.examples import parse_example
from infalign.data.files import READERS, read_rows
from infalign.evaluation.settings import read_procedure
from infalign.evaluation.win_rates import rewind_samples
from infalign.method.procedures import is_extreme, respelled, rewinds
from infalign.models.settings import is_hub_id
from infalign.recipe.reading import recipe_of
from infalign.theory.choose import best_named

FOLDER = Path(__file__).parent / "first"
LOOKED_AT = 1000  # rows of a file


def write_first_recipe(
    path: Path, *, data: str, policy: str, reward: str | None, procedure: str, kl_budget: float
) -> list[str]:
    """Write a commented recipe to a new file and return the commands that come next.

    ``data`` is a file, ``world`` or a hub id; ``policy`` a model or ``scratch``; ``reward`` a function,
    a URL or a model, None for one that learns from preference pairs. Raises ConfigError for a file that is there and
    for what no recipe can have, DataError for data that cannot be read; nothing is written then.
    """
    if path.exists():
        raise ConfigError(f"{path} already exists and is not overwritten; choose another --out")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path.name}: the folder {path.parent} does not exist")
    yaml, served, sources = YAML(), read_procedure(procedure), _sources(data)
    yaml.width = 200
    recipe: Any = yaml.load(FOLDER / ("scratch.yaml" if policy == "scratch" else "pretrained.yaml"))
    has_pairs = "path" not in sources["sources"][0] or _has_pairs(data)
    recipe["run_dir"], recipe["procedure"] = f"runs/{path.stem}", respelled(procedure, partial(_from, path))
    for key, value in reversed(sources.items()):
        recipe["data"].insert(0, key, value)
    if policy != "scratch":
        recipe["policy"]["model"] = policy
    if not has_pairs:
        del recipe["judge"]
    aware, evaluate = recipe["policies"]["aware"], recipe["evaluate"]
    if reward is not None:
        recipe["reward"].clear()
        recipe["reward"] |= _given_reward(reward, path)
    elif not has_pairs:
        raise ConfigError(f"{data} has no preference pairs to train a reward on; give --reward")
    elif policy == "scratch":
        aware["guide"]["trunk"] = "reward"
    aware["kl_budget"], aware["transform"] = kl_budget, best_named(procedure, kl_budget, recipe["rollout"]["k"])
    if aware["transform"] == "identity":
        del recipe["policies"]["ordinary"]
    if is_extreme(served):
        evaluate |= {"samples": max(evaluate["samples"], 2 * served.n), "max_n": max(evaluate["max_n"], served.n)}
    elif rewinds(served):
        evaluate["samples"] = max(evaluate["samples"], rewind_samples(served))
    text = StringIO()
    yaml.dump(recipe, text)
    recipe_of(text.getvalue().encode(), path)
    write_text(path, f"# {data}, served as {procedure}: written by `infalign init`.\n{text.getvalue()}")
    # A plain word would be the name of a built-in recipe.
    called = quote(str(path) if path.suffix in (".yaml", ".yml") or path.name != str(path) else f"./{path}")
    return [f"infalign run {called} --dry-run", f"infalign run {called}"]


def _sources(data: str) -> dict[str, Any]:
    """Return the section ``data`` of a recipe for the built-in world, a file or a hub id."""
    if data == "world":
        return {"sources": [{"world": 2000}]}
    is_file_name = data.startswith(".") or data.endswith((*READERS,)) or Path(data).exists()
    if not is_file_name and is_hub_id(data) and "/" in data:
        return {"sources": [{"hub": {"id": data, "split": "train"}}]}
    return {"sources": [{"path": data}]}


def _has_pairs(file: str) -> bool:
    examples = (parse_example(row, where) for where, row in islice(read_rows(file), LOOKED_AT))
    return any(example.rejected is not None for example in [*examples])


def _given_reward(reward: str, path: Path) -> dict[str, str]:
    """Return the section ``reward`` of a recipe at ``path``, beside which a function's file is looked for."""
    if reward.startswith(("http://", "https://")):
        return {"url": reward}
    if ":" not in reward or reward.startswith("package:"):
        return {"model": reward}
    return {"function": _from(path, reward)}


def _from(path: Path, spec: str) -> str:
    """Return what spells a function or a class, its file as seen from the recipe at ``path``."""
    file, _, name = spec.rpartition(":")
    return f"{os.path.relpath(Path(file).resolve(), path.parent.resolve())}:{name}" if is_file(spec) else spec
