"""The likelihood of held-out responses."""

import math

import micro
import pytest
import torch

from infalign.core.errors import DataError
from infalign.data.examples import Example
from infalign.data.messages import reply
from infalign.models.scratch import new_policy, train_tokenizer
from infalign.models.settings import Scratch
from infalign.steps.likelihood import preferred_logprobs


def test_a_uniform_model_gives_each_token_the_logarithm_of_its_vocabulary() -> None:
    """Whatever the text and its length; a response beyond the model's context is left out."""
    shape = Scratch(**micro.SCRATCH)
    tokenizer = train_tokenizer(["How do I bake bread?", "Knead it."] * 9, shape)
    model = new_policy(shape, tokenizer, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    chosen = ["Knead it.", "Ask the baker on the corner.", "Please wait. " * 80]
    prompt = ({"role": "user", "content": "How do I bake bread?"},)
    pairs = [Example(prompt, (reply(text),), None, "") for text in chosen]
    found = preferred_logprobs(model, tokenizer, pairs)
    assert found.tolist() == pytest.approx([-math.log(model.config.vocab_size)] * 2)
    with pytest.raises(DataError, match="1 of 1 preferred test responses fit the model's context of 192"):
        preferred_logprobs(model, tokenizer, pairs[:1])
