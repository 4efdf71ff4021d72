"""The strength of a guide: the KL asked for, exactly, on a model whose law is known."""

import numpy as np
import pytest
import torch
from enumerable import Enumerable

from infalign.models.guided import GuidedForCausalLM
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.training.guide_strength import scale_guide_to_kl


def guide(case: Enumerable, strength: float, form: str = "trunk") -> GuidedForCausalLM:
    """Return a guide with a random head, and a random adapter if it is one."""
    reference, tokenizer = load_policy(case.folder)
    torch.manual_seed(0)
    if form == "trunk":
        model: GuidedForCausalLM = add_network_guide(case.folder, reference, tokenizer).eval()
    else:
        model = GuidedForCausalLM.with_lora(reference, rank=4, alpha=8.0).eval()
    with torch.no_grad():
        model.guide.head.linear.weight.normal_(0.0, strength)
        for name, weight in model.named_parameters():
            if ".lora_B" in name:
                weight.normal_(0.0, 0.1)
    return model


def mean_kl(case: Enumerable, model: GuidedForCausalLM) -> float:
    """Return the exact KL from the reference, the mean over prompts."""
    laws = case.laws(model)
    return float((np.exp(laws) * (laws - case.log_reference)).sum(1).mean())


@pytest.mark.parametrize(
    ("kl", "form", "strength"), [(0.1, "trunk", 0.15), (1.0, "trunk", 0.15), (0.5, "adapter", 0.8)]
)
def test_a_guide_is_brought_to_the_kl(case: Enumerable, kl: float, form: str, strength: float) -> None:
    """On systematic rollouts the estimate is nearly exact; what is left is the interpolation between factors."""
    model = guide(case, strength, form)
    assert abs(mean_kl(case, model) - kl) > 0.02
    before = model.guide.head.linear.weight.clone()
    scale, reached = scale_guide_to_kl(model, case.rollouts(64), kl)
    assert mean_kl(case, model) == pytest.approx(kl, rel=0.02)
    assert reached == pytest.approx(kl)
    assert torch.equal(model.guide.head.linear.weight, before * scale)


def test_a_guide_that_is_too_weak_is_strengthened_fourfold(case: Enumerable) -> None:
    """An untrained one stays the reference."""
    for strength in (0.0, 0.001):
        model = guide(case, strength)
        scale, reached = scale_guide_to_kl(model, case.rollouts(16), 1.0)
        assert (scale, reached < 0.1) == (4.0, True)
        assert mean_kl(case, model) == pytest.approx(reached, abs=1e-4)


def test_no_guide_is_strengthened_beyond_what_rollouts_can_tell(case: Enumerable) -> None:
    """Where a few of them have all the weight, they underestimate the KL, by as much as you like."""
    model = guide(case, 0.15)
    scale, reached = scale_guide_to_kl(model, case.rollouts(16), 3.0)
    assert 1.0 < scale < 4.0
    assert reached == pytest.approx(mean_kl(case, model), rel=0.02)


def test_a_guide_that_rollouts_tell_nothing_of_keeps_its_strength(case: Enumerable) -> None:
    """It spends 2.6 nats, of which 48 rollouts know nothing."""
    model = guide(case, 0.5)
    before = model.guide.head.linear.weight.clone()
    assert scale_guide_to_kl(model, case.rollouts(16), 3.0) == (1.0, None)
    assert torch.equal(model.guide.head.linear.weight, before)
