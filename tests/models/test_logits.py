"""Logits made in parts: the values and gradients of the whole, with nothing of the vocabulary's size kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import kl_div

from infalign.models import logits
from infalign.models.guided import GuidedForCausalLM
from infalign.models.logits import Logits, kl_from
from infalign.models.packed import PackedBatch, packing

PACKED = PackedBatch.pack([[1, 2, 3], [1, 2, 3], [6]], [[10, 11, 12, 13], [13], [14, 15, 16, 17, 18]])


def adapted(base: Any) -> Any:
    """Return a model with a random adapter."""
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def on_states() -> Any:
    """Return a random guide on a reference's states."""
    model = GuidedForCausalLM.with_side_network(tiny(), hidden=8, layers=1, reads=2)
    torch.nn.init.normal_(model.guide.head.linear.weight)
    return model


IN_PARTS: dict[str, Callable[[], Any]] = {
    "adapter": lambda: adapted(tiny()),
    "adapter, tied": lambda: adapted(tiny("Gemma", head_dim=4)),
    "guide on states": on_states,
}
WHOLE: dict[str, Callable[[], Any]] = {
    "all trained": tiny,
    "logits that are scaled": lambda: adapted(tiny("Granite", logits_scaling=3.0)),
    "a vocabulary of the guide's own": lambda: GuidedForCausalLM.with_network(tiny(), tiny().model),
}


@pytest.fixture(params=IN_PARTS | WHOLE)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name a kind of model; parts are of three tokens."""
    monkeypatch.setattr(logits, "TOKENS_PER_BLOCK", 3)
    return str(request.param)


def new(name: str) -> Any:
    """Return a model of that kind, always the same, in evaluation mode."""
    torch.manual_seed(0)
    return (IN_PARTS | WHOLE)[name]().eval()


def gradients(model: Any, value: Tensor) -> Tensor:
    """Return the gradient of a number in all weights that are trained."""
    model.zero_grad()
    value.backward()
    found = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
    return torch.cat(found)


def plain(logits: Tensor) -> Tensor:
    """Return log π of each response."""
    return PACKED.sum_by_response(logits.log_softmax(-1).gather(-1, PACKED.targets[:, None])[:, 0])


def test_log_probabilities_and_gradients_are_those_of_the_whole(name: str) -> None:
    """Also twice, as a head that a model changes is found out once."""
    model, weights = new(name), torch.tensor([0.3, -1.0, 2.0])
    with packing(model):
        expected = plain(PACKED.logits(model))
        slope = gradients(model, expected @ weights)
        rounding = 1e-5 * float(slope.abs().max())
        for _ in range(2):
            found = PACKED.logprobs(model)
            assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
            assert gradients(model, found @ weights).tolist() == pytest.approx(slope.tolist(), rel=1e-4, abs=rounding)
        assert PACKED.logits(model).shape == (10, 40)  # the head is what it was


def test_a_divergence_from_other_logits_is_that_of_the_whole(name: str) -> None:
    """Both are made in parts."""
    model = new(name)
    teacher = tiny(seed=2)

    def kl(logits: Tensor, other: Tensor) -> Tensor:
        return kl_div(logits.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="none").sum(-1)

    with packing(model), packing(teacher):
        with torch.no_grad():
            whole, parts = PACKED.logits(teacher), PACKED.logits_in_parts(teacher)
        expected = kl(PACKED.logits(model), whole)
        slope = gradients(model, expected.sum())
        found = PACKED.logits_in_parts(model).measured(kl_from(parts))
        assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-5)
        assert gradients(model, found.sum()).tolist() == pytest.approx(slope.tolist(), rel=1e-4, abs=1e-5)


def test_the_logits_are_whole_only_where_the_head_is_trained_or_changed(name: str) -> None:
    """Neither in the pass nor for the gradient is there an array of all tokens and the vocabulary."""
    model, kept = new(name), list[tuple[int, ...]]()
    weights = {weight.data_ptr() for weight in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            kept.append(tuple(tensor.shape))
        return tensor

    with packing(model), saved_tensors_hooks(keep, lambda tensor: tensor):
        PACKED.logprobs(model)
    assert any(shape[-2:] == (10, 40) for shape in kept) == (name in WHOLE)


@pytest.mark.parametrize("mixed", [True, False])
def test_logits_are_float32_unless_mixed_precision_says_otherwise(mixed: bool) -> None:
    """Also of a model in bfloat16; in mixed precision the product is as there."""
    head = torch.nn.Linear(16, 50, bias=False, dtype=torch.float32 if mixed else torch.bfloat16)
    states = torch.randn(7, 16, dtype=head.weight.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        found = torch.cat([logits for _, logits in Logits(states, head).parts()])
        expected = head(states).float() if mixed else states.float() @ head.weight.float().T
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
