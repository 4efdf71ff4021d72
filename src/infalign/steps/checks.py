"""What can be checked of a recipe before anything is computed."""

from importlib.util import find_spec
from pathlib import Path

from infalign.core.errors import ConfigError
from infalign.core.http import api_key
from infalign.models.conversion import converted_folder, is_convertible
from infalign.models.pretrained import check_causal
from infalign.models.settings import is_hub_id
from infalign.models.tokenizers import check_response_end, load_tokenizer
from infalign.recipe.settings import Recipe
from infalign.rewards.classifier import check_classifier
from infalign.rewards.sources import function_reward


def check_setup(recipe: Recipe) -> list[str]:
    """Check what a recipe names, without loading weights: models, reward functions, keys. Return what is unchecked.

    That is models of the hub and GGUF files. Runs and dry runs call it before anything is computed. Raises ConfigError.
    """
    for source in recipe.rewards.values():
        if source.function is not None:
            function_reward(source.function)
        api_key(source.api_key_env)
    api_key(recipe.rollout.engine.server[1])
    if absent := [tracker for tracker in recipe.report_to if find_spec(tracker) is None]:
        raise ConfigError(f"report_to: {absent[0]} is not installed; pip install {absent[0]}, or remove it")
    unchecked = []
    for name, path in recipe.named_models.items():
        key = f"{name}.model"
        if is_convertible(path):
            unchecked.append(f"{key}: {path}, which will be converted to {converted_folder(path)}")
        elif Path(path).is_dir():
            if name == "policy":
                _check_policy(recipe, path)
            else:
                load_tokenizer(path)
                if not recipe.rewards[name].trained:
                    check_classifier(path)
        elif is_hub_id(path):
            unchecked.append(f"{key}: {path} of the hub")
        else:
            raise ConfigError(f"{key}: the folder {path} does not exist")
    return unchecked


def _check_policy(recipe: Recipe, folder: str) -> None:
    from transformers import AutoConfig  # it takes seconds to load

    tokenizer = load_tokenizer(folder, template=recipe.policy.chat_template)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    check_causal(config, folder)
    check_response_end(tokenizer, folder)
    longest = recipe.data.max_prompt_tokens + recipe.rollout.max_new_tokens
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and longest > context:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens is {longest}, but the context of {folder} is {context}; "
            "lower one of them"
        )
