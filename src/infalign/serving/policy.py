"""A policy of a run, ready to be served."""

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.core.http import checked_url
from infalign.core.settings import explained
from infalign.core.user_code import import_function
from infalign.data.messages import Message
from infalign.models.adapters import merge_adapter
from infalign.models.conversations import prompt_ids
from infalign.models.pretrained import generation_of, is_adapter, load_policy, model_files
from infalign.models.tokenizers import load_tokenizer
from infalign.pipeline.pending import pending
from infalign.rewards.base import RewardFunction, score
from infalign.rewards.server import RemoteReward
from infalign.rewards.settings import RewardSource
from infalign.rewards.sources import Scorer
from infalign.sampling.engine import Sampling, Vocabulary
from infalign.sampling.server import ServerEngine
from infalign.serving.answers import BaseRewards, ServedPolicy, parse_served
from infalign.serving.batches import Batches
from infalign.serving.draws import DrawSource, LocalDraws, RemoteDraws
from infalign.steps.external_policy import check_fits
from infalign.steps.run import Run
from infalign.steps.status import recorded_recipe
from infalign.steps.whole_run import check_opened, units

LOGGER = logging.getLogger(__name__)
KEY_VARIABLE = "INFALIGN_ENGINE_KEY"
REWARD_KEY_VARIABLE = "INFALIGN_REWARD_KEY"
SERVING_RETRY_SECONDS = 10.0  # seconds that an engine or a reward at a URL may be, before a request fails
MAX_DRAWS_AT_ONCE = 64  # draws at once; of an engine at a URL, requests


def open_policy(
    root: Path,
    policy: str | None = None,
    procedure: str | None = None,
    *,
    engine_url: str | None = None,
    engine_model: str | None = None,
    reward: str | None = None,
) -> ServedPolicy:
    """Return a policy of the run in ``root``, served by ``procedure`` unless asked otherwise.

    The policy is one of the recipe's (the first by default), ``reference``, or the folder of a model with the same
    tokenizer or of a LoRA adapter on the reference; the procedure is the recipe's by default. Draws are made here, or
    by an OpenAI-compatible server at ``engine_url`` that has the policy under the name ``engine_model`` (by default its
    path). ``reward`` is a function or the URL of a server in place of the run's reward. A model that the recipe would
    make anew is used as it is, with a warning. Raises ConfigError for what is not there, and for a folder with another
    tokenizer or vocabulary.
    """
    run = Run.of(recorded_recipe(root))
    recipe = run.recipe
    name = policy or next(iter(recipe.policies))
    served_by = recipe.procedure if procedure is None else parse_served(procedure)
    path = _model(run, name)
    opened = {path, run.reference, *map(str, run.reward_inputs("reward"))}
    check_opened(run, run.layout.data, *opened)
    _warn_of_others(run, opened)
    tokenizer = load_tokenizer(run.layout.tokenizer)
    if recipe.compute.threads is not None:
        import torch

        torch.set_num_threads(recipe.compute.threads)
    sampling = Sampling(recipe.rollout.max_new_tokens, seed=recipe.seed)
    scored_by = (run.scorer("reward") if reward is None else _other_scorer(run, reward)).load().function
    if isinstance(scored_by, RemoteReward):
        scored_by = replace(scored_by, retry_seconds=SERVING_RETRY_SECONDS)
    scores = Batches(partial(_scored, scored_by))
    engine = engine_model or path
    words = Vocabulary(tokenizer, generation_of(path))
    seeded = recipe.rollout.engine.model_dump().get("seed") != "none"
    draws = _local(run, path) if engine_url is None else _remote(engine_url, engine, words, sampling, seeded=seeded)
    base = BaseRewards(partial(_local, run, run.reference), scores, recipe.rollout.k, sampling)
    others = [other for other in ("reference", *recipe.policies) if other != name]
    name, longest = Path(name).resolve().name, sampling.max_new_tokens
    return ServedPolicy(name, served_by, longest, tokenizer, draws, scores, base, others)


def finding_answers(policy: ServedPolicy, spec: str | None) -> ServedPolicy:
    """Return a policy whose majority votes on what the function ``spec`` finds in a text, by default all of it."""
    return policy if spec is None else replace(policy, answer_in=import_function(spec, "answer function"))


def _model(run: Run, name: str) -> str:
    """Return the folder or hub id of a policy."""
    if name != "reference" and name not in run.recipe.policies:
        if not Path(name).is_dir():
            known = ", ".join(["reference", *run.recipe.policies])
            raise ConfigError(f"{run.layout.root} has no policy {name}, and no such folder exists; it has {known}")
        model_files(name)
        if not is_adapter(name):
            check_fits(name, run)
        return name
    made = run.layout.model(name)
    path = run.reference if name == "reference" else str(made)
    if path == str(made) and not made.is_dir():
        command = f"infalign run {run.layout.root}/recipe.yaml --until train"
        raise ConfigError(f"{name} is not trained yet: {path} does not exist; run `{command}`")
    return path


def _warn_of_others(run: Run, paths: Collection[str]) -> None:
    """Warn of models of the run that were made by another recipe than the recorded one, with what differs."""
    wanted = units(run, until="train")
    left = pending(wanted, run.layout.root)
    for unit in wanted:
        if str(unit.output) in paths and unit.name in left:
            LOGGER.warning(
                "! using %s as it is, although the recipe has changed since (%s); `infalign run %s/recipe.yaml "
                "--until train` trains it again",
                unit.output,
                left[unit.name].because,
                run.layout.root,
            )


def _local(run: Run, path: str) -> DrawSource:
    load = partial(load_policy, device=run.recipe.compute.torch_device(), dtype=run.recipe.compute.dtype)
    if not is_adapter(path):
        return LocalDraws(*load(path), rows=MAX_DRAWS_AT_ONCE)
    model, tokenizer = load(run.reference)
    return LocalDraws(merge_adapter(model, path), tokenizer, rows=MAX_DRAWS_AT_ONCE)


def _remote(url: str, model: str, vocabulary: Vocabulary, sampling: Sampling, *, seeded: bool) -> DrawSource:
    """Return the draws of a server, checked to sample from the policy's whole distribution."""
    try:
        checked_url(url)
    except ValueError as error:
        raise ConfigError(f"--engine-url: {str(error).replace('api_key_env', KEY_VARIABLE)}") from error
    key = KEY_VARIABLE if KEY_VARIABLE in os.environ else None
    retry = SERVING_RETRY_SECONDS
    engine = partial(ServerEngine, url, model, vocabulary, api_key_env=key, retry_seconds=retry, seeded=seeded)
    engine(sampling).check(*prompt_ids(vocabulary.tokenizer, [[{"role": "user", "content": "Hello"}]]))
    return RemoteDraws(engine, at_once=MAX_DRAWS_AT_ONCE)


def _other_scorer(run: Run, reward: str) -> Scorer:
    key = REWARD_KEY_VARIABLE if REWARD_KEY_VARIABLE in os.environ else None
    is_url = reward.startswith(("http://", "https://"))
    own = {"function": reward, "time_limit": run.recipe.reward.time_limit}
    with explained(f"--reward {reward}"):
        source = RewardSource.model_validate({"url": reward, "api_key_env": key} if is_url else own)
    return replace(run.scorer("reward"), source=source, shards=list)


def _scored(reward: RewardFunction, rows: Sequence[tuple[list[Message], str, str]]) -> list[float]:
    prompts, responses, columns = map(list, zip(*rows, strict=True))
    try:
        rewards = score(reward, prompts, responses, columns=columns, name="reward")
    except DataError as error:
        raise DataError(f"{error}; columns come from metadata or --input; majority-of-8 needs no reward") from error
    if np.isnan(rewards).any():
        raise DataError("the reward returned None for a response, so responses cannot be ranked; return a number")
    return [*rewards.tolist()]
