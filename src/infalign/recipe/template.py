"""A first recipe: one of the two in the folder ``first``, with what the user named in its place, and checked."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from infalign.core.errors import ConfigError
from infalign.core.spelling import listed_names
from infalign.core.storage import write_text
from infalign.core.user_code import is_file
from infalign.data.examples import Example
from infalign.data.files import READERS
from infalign.data.messages import to_text
from infalign.data.sources import Data, read_examples
from infalign.evaluation.settings import read_procedure
from infalign.evaluation.win_rates import rewind_samples
from infalign.method.procedures import Extreme, respelled, rewinds
from infalign.models.conversion import locate_model
from infalign.models.settings import is_hub_id
from infalign.recipe.reading import recipe_of
from infalign.rewards.sources import function_reward, score_examples
from infalign.theory.choose import best_named

FOLDER = Path(__file__).parent / "first"
LOOKED_AT = 1000  # rows of a file
TRIED = 20  # of them are scored by a function
LETTERS = 300  # a vocabulary: the 256 bytes and some frequent words


def write_first_recipe(
    path: Path, *, data: str, policy: str, reward: str | None, procedure: str, kl_budget: float | None
) -> list[str]:
    """Write a commented recipe to a new file and return the commands that come next.

    ``data`` is a file, ``world`` or a hub id; ``policy`` a model or ``scratch``; ``reward`` a function,
    a URL or a model, None for one that learns from preference pairs. A function that is a checker (`_is_checker`), of
    rows without pairs, gets the recipe for pass@k. Raises ConfigError for a file that is there and for what no recipe
    can have, DataError for data that cannot be read and a function that cannot score it; nothing is written then.
    """
    if path.exists():
        raise ConfigError(f"{path} already exists and is not overwritten; choose another --out")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path.name}: the folder {path.parent} does not exist")
    yaml, served, source = YAML(), read_procedure(procedure), _source(data)
    yaml.width = 200
    template = (FOLDER / ("scratch.yaml" if policy == "scratch" else "pretrained.yaml")).read_text(encoding="utf-8")
    recipe: Any = yaml.load(template if reward is None else re.sub("(#.*\n)+(?=reward:)", "", template))
    examples = _first_rows(source, reward)
    has_pairs = not examples or any(example.rejected is not None for example in examples)
    others = listed_names(sorted({name for example in examples for name in example.columns}), 12) or "none"
    recipe["run_dir"], recipe["procedure"] = f"runs/{path.stem}", respelled(procedure, partial(_from, path))
    recipe["data"].insert(0, "sources", [source])
    if policy != "scratch":
        recipe["policy"]["model"] = policy
    elif examples and not any(example.chosen for example in examples):
        raise ConfigError(
            f"{data} has no responses to tune a new model on (other columns: {others}); name them completion, or give "
            "a model as --policy"
        )
    if not has_pairs:
        del recipe["judge"]
        if policy == "scratch":  # of answers without words, such as codes, each longer token would have to be learned
            recipe["policy"]["scratch"]["vocabulary"] = LETTERS
    aware, evaluate, checked = recipe["policies"]["aware"], recipe["evaluate"], False
    if reward is not None:
        recipe["reward"].clear()
        recipe["reward"] |= (given := _given_reward(reward, path))
        checked = "function" in given and _is_checker(reward, examples) and not has_pairs
    elif not has_pairs:
        raise ConfigError(
            f"{data} has no preference pairs to train a reward on (other columns: {others}); name the responses chosen "
            "and rejected, or give --reward"
        )
    elif policy == "scratch":
        aware["guide"]["trunk"] = "reward"
    if checked:
        evaluate["truth"] = "reward"
        recipe.yaml_add_eol_comment("the checker says what is right: the report has pass@k", "evaluate", 0)
        recipe["rollout"] |= {} if policy == "scratch" else {"max_new_tokens": 256}
    _fit_context(recipe, policy)
    kl_budget = (0.1 if checked else 0.6) if kl_budget is None else kl_budget
    ranked = best_named(procedure, kl_budget, recipe["rollout"]["k"])
    ties = checked and ranked != "identity" and not rewinds(served)
    aware["kl_budget"], aware["transform"] = kl_budget, "optimal" if ties else ranked
    if aware["transform"] == "identity":
        del recipe["policies"]["ordinary"]
    if isinstance(served, Extreme):
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


def _source(data: str) -> dict[str, Any]:
    """Return the source in a recipe for the built-in world, a file or a hub id."""
    if data == "world":
        return {"world": 2000}
    is_file_name = data.startswith(".") or data.endswith((*READERS,)) or Path(data).is_file()
    if not is_file_name and is_hub_id(data) and "/" in data:
        return {"hub": {"id": data, "split": "train"}}
    return {"path": data}


def _first_rows(source: Mapping[str, Any], reward: str | None) -> list[Example]:
    """Return valid rows of a file, or for a reward's sake of the hub, else none."""
    if "path" not in source and ("hub" not in source or reward is None):
        return []
    data = Data.model_validate({"sources": [{**source, "limit": LOOKED_AT}], "skip_invalid": True})
    return read_examples(data, data.sources, seed=0)[0]


def _is_checker(function: str, examples: Sequence[Example]) -> bool:
    """Return whether a function gives rows, asked at once for their own answer and for another, only 0 and 1.

    Raises ConfigError if all are right, or if all are wrong, responses of the data included. Such verdicts on a few
    rows can be chance where few responses are right, so it then tries more.
    """
    for tried in (examples[:TRIED], examples):
        asked = [example for example in tried for _ in range(2)]
        said = [text for e in tried for text in (to_text(e.chosen) or str(e.columns.get("answer")), "?")]
        rewards = score_examples(function_reward(function), function, asked, said)
        values = np.unique(rewards[~np.isnan(rewards)])
        if values.tolist() != [1.0] and (values.tolist() != [0.0] or not all(e.chosen for e in tried)):
            return bool(np.isin(values, (0.0, 1.0)).all())
    raise ConfigError(
        f"{function} gives {values[0]:g} to the responses of the first {len(examples)} rows and to `?` alike; make it "
        "tell right responses from wrong ones"
    )


def _fit_context(recipe: Any, policy: str) -> None:
    """Lower the lengths of a recipe to what a model in a folder reads."""
    file, data, rollout = Path(locate_model(policy)) / "config.json", recipe["data"], recipe["rollout"]
    context = json.loads(file.read_bytes()).get("max_position_embeddings") if file.is_file() else None
    if context is not None and context < data["max_prompt_tokens"] + rollout["max_new_tokens"]:
        data["max_prompt_tokens"], rollout["max_new_tokens"] = context // 2, context - context // 2
        why = f"half of the {context} tokens that the model reads; longer prompts are left out and counted"
        data.yaml_add_eol_comment(why, "max_prompt_tokens")


def _given_reward(reward: str, path: Path) -> dict[str, str]:
    """Return the section ``reward`` of a recipe at ``path``, beside which a function's file is looked for."""
    if reward.startswith(("http://", "https://")):
        return {"url": reward}
    if reward.endswith(".py"):
        raise ConfigError(f"--reward {reward} names no function; add :function, such as {reward}:check")
    if ":" not in reward or reward.startswith("package:"):
        return {"model": reward}
    return {"function": _from(path, reward)}


def _from(path: Path, spec: str) -> str:
    """Return what spells a function or a class, its file as seen from the recipe at ``path``."""
    file, _, name = spec.rpartition(":")
    return f"{os.path.relpath(Path(file).resolve(), path.parent.resolve())}:{name}" if is_file(spec) else spec
