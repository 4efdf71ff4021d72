"""Packed passes: the numbers of plain ones, for models of several kinds, and their gradients."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import tiny

from infalign.models.guided import GuidedForCausalLM
from infalign.models.packed import PackedBatch, can_pack, packing

PROMPTS = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
RESPONSES = [[10, 11, 12], [13], [14, 15, 16, 17, 18, 19], [20, 21], [22]]
PROMPT_OF = [0, 0, 2, 1, 2]
PACKED = PackedBatch.pack([PROMPTS[p] for p in PROMPT_OF], RESPONSES)


def guided() -> GuidedForCausalLM:
    """Return a guide with random weights on a trunk of another shape."""
    model = GuidedForCausalLM.with_network(tiny(), tiny(num_hidden_layers=1, hidden_size=24).model)
    torch.nn.init.normal_(model.guide.head.linear.weight)
    return model.eval()


MODELS = {"grouped heads": tiny, "learned positions": lambda: tiny("GPT2"), "guided": guided}
MODELS["gemma"] = lambda: tiny("Gemma", head_dim=4)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """Return each model with random weights, in evaluation mode."""
    return MODELS[request.param]()


@pytest.mark.parametrize("passes", [packing, nullcontext])
@pytest.mark.parametrize("responses", [RESPONSES, [[], [10, 11], [], [], [3]], [[], [], [], [], []]])
def test_a_batch_has_the_logprobs_of_single_rows(model: Any, responses: list[list[int]], passes: Any) -> None:
    """Packed or padded, between others or where all are empty, each response has the log-probability it has alone."""
    assert can_pack(model)
    prompts, expected = [PROMPTS[p] for p in PROMPT_OF], []
    with torch.no_grad():
        for prompt, response in zip(prompts, responses, strict=True):
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            expected.append(float(logits.log_softmax(-1).gather(-1, torch.tensor([response]).long().T).sum()))
        with passes(model):
            found = PackedBatch.pack(prompts, responses).logprobs(model)
    assert found.tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("passes", [packing, nullcontext])
def test_a_batch_has_the_gradients_of_single_rows(model: Any, passes: Any) -> None:
    """The gradient of a weighted sum of log-probabilities is the same, in every weight."""
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.5])
    with passes(model):
        (PACKED.logprobs(model) * weights).sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    for p, response, weight in zip(PROMPT_OF, RESPONSES, weights, strict=True):
        logits = model(torch.tensor([[*PROMPTS[p], *response]])).logits[0, len(PROMPTS[p]) - 1 : -1]
        (weight * logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).sum()).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], atol=1e-3, rtol=1e-3), name


def test_a_guide_whose_reference_cannot_pack_has_both_attentions_as_before() -> None:
    """Gemma 2 is eager, as its attention has a softcap; a plain pass works after a packed one has failed."""
    model = GuidedForCausalLM.with_side_network(tiny("Gemma2", head_dim=8), hidden=8, layers=1, reads=1)
    before = [model.reference.config._attn_implementation, model.guide.network.config._attn_implementation]
    assert not can_pack(model)
    assert [model.reference.config._attn_implementation, model.guide.network.config._attn_implementation] == before
    assert model(torch.tensor([PROMPTS[0]])).logits.isfinite().all()
