"""States of a frozen reference on disk: the same logits, losses and gradients as without them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pytest
import torch
from peft import TaskType
from safetensors.torch import load_file
from tiny_models import tiny

from infalign.core.errors import ConfigError
from infalign.evaluation.kl import kl_from_reference_samples
from infalign.models import states
from infalign.models.guided import GuidedForCausalLM, evenly_spaced_layers
from infalign.models.packed import PackedBatch, packed_batches, packing, response_logprobs
from infalign.models.scratch import new_policy
from infalign.models.settings import Fit, Lora, Scratch
from infalign.models.states import StateFolder, stored_states, write_states
from infalign.models.top_layers import check_top_layers, count_layers_below, starting_from_states
from infalign.training.common import with_adapter

K = 3
PROMPTS = [[5, 6, 7], [8, 9], [5, 6, 7], [10, 11, 12, 13]]  # one of them twice
RESPONSES = [[20 + i, 21, *range(30, 30 + i)] for i in range(K * len(PROMPTS))]


@pytest.fixture(scope="module", params=["side", "side, 20", "side, 300", "network, 20"])
def policy(request: pytest.FixtureRequest) -> GuidedForCausalLM:
    """Return a policy whose guide has a random head, for some tokens or all, and reads two of four layers or tokens."""
    scratch, tokenizer = Scratch(**micro.SCRATCH | {"layers": 4, "context": 64}), micro.tokenizer()
    torch.manual_seed(0)
    reference = new_policy(scratch, tokenizer, seed=0)
    form, _, top_tokens = request.param.partition(", ")
    if form == "network":
        network = new_policy(scratch.model_copy(update={"layers": 1}), tokenizer, seed=1).base_model
        model = GuidedForCausalLM.with_network(reference, network, int(top_tokens))
    else:
        shape = {"hidden": 8, "layers": 1, "reads": 2}
        model = GuidedForCausalLM.with_side_network(reference, **shape, top_tokens=int(top_tokens or 0))
    with torch.no_grad():
        for linear in model.guide.head.children():
            linear.weight.normal_(0.0, 0.5)
    return model.eval()


def states_for(policy: GuidedForCausalLM, path: Path) -> StateFolder:
    """Return a folder of the states that are stored for the policy: those that its guide reads, or the last."""
    layers = policy.guide.reads or [policy.reference.config.num_hidden_layers]
    return StateFolder(path, layers, policy.config.guide["top_tokens"])


@pytest.fixture
def folder(policy: GuidedForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    """Return a folder with the states in shards of three prompts."""
    monkeypatch.setattr(states, "PROMPTS_PER_SHARD", 3)
    folder = states_for(policy, tmp_path / "states")
    write_states(policy.reference, folder, PROMPTS, RESPONSES, micro.silent)
    return folder


def test_layers_are_evenly_spaced_up_to_the_last() -> None:
    """Of a shallow model each layer is read once."""
    assert evenly_spaced_layers(30, 3) == [10, 20, 30]
    assert evenly_spaced_layers(2, 3) == [1, 2]
    assert evenly_spaced_layers(5, 1) == [5]


def assert_stored_changes_nothing(model: Any, stored: Any) -> dict[str, Any]:
    """Check that log-probabilities and gradients are those without what is stored, and return the gradients."""
    rows = [10, 1, 0, 4, 7, 11]  # of several shards in any order
    prompts, responses = [PROMPTS[row // K] for row in rows], [RESPONSES[row] for row in rows]
    found = []
    for kept in ([], [stored[row] for row in rows]):
        model.zero_grad()
        with packing(model):
            logprobs = PackedBatch.pack(prompts, responses, stored=kept).logprobs(model)
        logprobs.square().sum().backward()
        found.append((logprobs.detach(), {n: w.grad.clone() for n, w in model.named_parameters() if w.requires_grad}))
    (plain, of_plain), (kept, of_kept) = found
    torch.testing.assert_close(kept, plain)
    assert of_kept.keys() == of_plain.keys()
    for name, gradient in of_plain.items():
        torch.testing.assert_close(of_kept[name], gradient, rtol=1e-4, atol=1e-5 * max(1.0, gradient.abs().max()))
    return of_plain


def test_loss_and_gradients_are_those_without_stored_states(policy: GuidedForCausalLM, folder: StateFolder) -> None:
    """At each weight of the guide, to the bit of the sums' order."""
    stored = stored_states(PROMPTS, RESPONSES, folder.path, top_tokens=folder.top_tokens > 0)
    assert_stored_changes_nothing(policy, stored)


@pytest.mark.parametrize("last", [1, 3, 4])
def test_the_last_layers_learn_the_same_from_states_below(policy: GuidedForCausalLM, tmp_path: Path, last: int) -> None:
    """Log-probabilities, and the gradients of an adapter on them, are those of passes through the whole model."""
    reference = deepcopy(policy.reference)
    below = StateFolder(tmp_path / "states", [count_layers_below(reference.config, last)])
    write_states(reference, below, PROMPTS, RESPONSES, micro.silent)
    stored = stored_states(PROMPTS, RESPONSES, tmp_path / "states")
    torch.manual_seed(0)
    adapted = with_adapter(reference, Fit(lora=Lora(layers=last)), TaskType.CAUSAL_LM)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0.0, 0.2)
    with starting_from_states(adapted, last):
        gradients = assert_stored_changes_nothing(adapted, stored)
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in gradients} == {*range(4 - last, 4)}
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())


def test_layers_that_a_model_has_not_and_other_architectures_are_refused(policy: GuidedForCausalLM) -> None:
    """A model that scales what it embeds may start from states; one that calls its layers otherwise is refused."""
    check_top_layers(policy.reference, 2)
    with pytest.raises(ConfigError, match=r"lora.layers is 5, but the model has 4 layers"):
        check_top_layers(policy.reference, 5)
    check_top_layers(tiny("Gemma", head_dim=8), 1)
    with pytest.raises(ConfigError, match=r"from stored states \(Attr.*\); leave lora.layers out"):
        check_top_layers(tiny("GPT2"), 1)


def test_the_reference_is_known_from_its_states(policy: GuidedForCausalLM, folder: StateFolder) -> None:
    """Without the model: its logits, and the log-probabilities of a guide of zeros."""
    stored, asked = stored_states(PROMPTS, RESPONSES, folder.path), [prompt for prompt in PROMPTS for _ in range(K)]
    with torch.inference_mode(), packing(policy):
        batches = PackedBatch.pack(asked, RESPONSES), PackedBatch.pack(asked, RESPONSES, stored=stored[:])
        plain, known = (torch.cat([part for _, part in policy.reference_logits(batch).parts()]) for batch in batches)
        found = [batch.logprobs(policy) for _, batch in packed_batches(asked, RESPONSES, 17, policy, stored=stored)]
    torch.testing.assert_close(known, plain)
    assert torch.cat(found).tolist() == pytest.approx(response_logprobs(policy, asked, RESPONSES), abs=1e-4)


def test_finished_shards_are_kept(policy: GuidedForCausalLM, folder: StateFolder) -> None:
    """Who was killed goes on: a shard that is missing is computed again, the others are not touched."""
    first, second = sorted(folder.path.iterdir())
    content, before = load_file(second), first.stat().st_mtime_ns
    second.unlink()
    write_states(policy.reference, folder, PROMPTS, RESPONSES, micro.silent)
    assert (sorted(folder.path.iterdir()), first.stat().st_mtime_ns) == ([first, second], before)
    again = load_file(second)
    assert all(torch.equal(again[name], content[name]) for name in content)


def test_a_disk_too_small_is_named(policy: GuidedForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has both sizes and says how to do without; nothing is written."""
    monkeypatch.setattr(states, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(ConfigError, match=r"need 0.0 GB, but .* has 0.0 GB free; .* lower guide.side.reads"):
        write_states(policy.reference, states_for(policy, tmp_path / "states"), PROMPTS, RESPONSES, micro.silent)
    assert not [*(tmp_path / "states").iterdir()]


def test_the_kl_of_a_guide_is_found_without_the_model(policy: GuidedForCausalLM, folder: StateFolder) -> None:
    """From what is stored it is that of whole passes; a class of tokens has one log-ratio, so its KL is the tokens'."""
    prompts = [prompt for prompt in PROMPTS for _ in range(K)]
    kept = [*stored_states(PROMPTS, RESPONSES, folder.path, top_tokens=folder.top_tokens > 0)]
    whole, stored = (
        np.array(kl_from_reference_samples(policy, policy.reference, prompts, RESPONSES, given)) for given in ((), kept)
    )
    np.testing.assert_allclose(stored, whole, rtol=1e-3, atol=1e-6)
    assert (whole[0] > 1e-3).all()
