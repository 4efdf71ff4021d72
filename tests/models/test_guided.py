"""A guide beside a frozen reference: what it starts from, how it is drawn from, kept and refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import micro
import pytest
import torch

from infalign.core.errors import ConfigError
from infalign.evaluation.kl import rao_blackwell_kl
from infalign.models.guided import GuidedForCausalLM
from infalign.models.packed import response_logprobs
from infalign.models.pretrained import add_network_guide, load_policy
from infalign.models.tokenizers import load_tokenizer
from infalign.sampling.engine import Prompt, Sampling
from infalign.sampling.shared_prefix import SharedPrefixBatch, SharedPrefixEngine
from infalign.sampling.transformers import TransformersEngine

PROMPT = [5, 6, 7, 8]

FORMS = pytest.mark.parametrize("form", ["network", "network, top tokens", "side", "side, top tokens"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small reference."""
    return Path(micro.write_policy(tmp_path_factory.mktemp("guided") / "reference", layers=2, context=64))


def policy(folder: Path, form: str, *, strength: float) -> tuple[GuidedForCausalLM, Any, Any]:
    """Return a guided policy whose head has random weights of that size, its reference and the tokenizer."""
    (reference, tokenizer), (inside, _) = load_policy(folder), load_policy(folder)
    torch.manual_seed(0)
    top_tokens = 20 if "top" in form else 0
    if form.startswith("side"):
        shape = {"hidden": 8, "layers": 1, "reads": 2}
        model = GuidedForCausalLM.with_side_network(inside, **shape, top_tokens=top_tokens)
    else:
        model = add_network_guide(folder, inside, tokenizer, top_tokens=top_tokens)
    draw(model, strength)
    return model.eval(), reference, tokenizer


def draw(model: GuidedForCausalLM, strength: float) -> None:
    """Give the head of a guide random weights of that size."""
    with torch.no_grad():
        for linear in model.guide.head.children():
            linear.weight.normal_(0.0, strength, generator=torch.Generator().manual_seed(1))


@FORMS
def test_a_guide_of_zeros_is_the_reference_bit_for_bit(folder: Path, form: str) -> None:
    """Before training every logit is the reference's."""
    model, reference, _ = policy(folder, form, strength=0.0)
    ids = torch.randint(0, reference.config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, reference(ids).logits)


@FORMS
def test_only_the_guide_is_trained(folder: Path, form: str) -> None:
    """No weight of the reference has a gradient, and every weight of the guide that it uses has one."""
    model, _, _ = policy(folder, form, strength=0.1)
    model(torch.tensor([PROMPT])).logits.square().sum().backward()
    with_gradient = {name for name, weight in model.named_parameters() if weight.grad is not None}
    assert with_gradient == {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert len(with_gradient) > 2
    assert not any(name.startswith("reference.") for name in with_gradient)


@FORMS
def test_engines_draw_what_the_policy_says(folder: Path, form: str) -> None:
    """Both draw the same tokens with the log-probabilities of a plain pass, which are not the reference's."""
    model, reference, tokenizer = policy(folder, form, strength=0.5)
    shared, plain = (
        engine(model, tokenizer, Sampling(12, seed=3)).sample(PROMPT, "p", range(6))
        for engine in (SharedPrefixEngine, TransformersEngine)
    )
    ids = [response.token_ids for response in shared]
    assert ids == [response.token_ids for response in plain]
    found, other = (response_logprobs(each, [PROMPT] * 6, ids) for each in (model, reference))
    for drawn in (shared, plain):
        assert [response.logprob for response in drawn] == pytest.approx(found.tolist(), abs=1e-4)
    assert abs(other - found).max() > 0.1


@FORMS
def test_a_saved_guide_is_a_policy_like_any_other(folder: Path, form: str, tmp_path: Path) -> None:
    """`load_policy` reads the folder: the same logits; in half precision up to rounding, and samplers take it."""
    model, reference, tokenizer = policy(folder, form, strength=0.5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (read, _), (half, _) = load_policy(tmp_path), load_policy(tmp_path, dtype="bfloat16")
    ids = torch.tensor([[*PROMPT, 9, 10]])
    with torch.no_grad():
        expected = model(ids).logits
        torch.testing.assert_close(read(ids).logits, expected, rtol=0, atol=2e-6)  # aligned differently
        gap = (half(ids).logits.float() - expected).flatten()
    assert rao_blackwell_kl(read, reference, [PROMPT], [[9, 10, 11]], batch_tokens=100)[0] > 0.01
    some = gap[gap.abs() <= gap.abs().quantile(0.98)]  # at the edge of the top tokens rounding decides on Q
    assert some.norm() < 0.02 * expected.norm()
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    SharedPrefixEngine(half, tokenizer, Sampling(8)).sample(PROMPT, "p", range(3))
    SharedPrefixBatch(half, tokenizer).join([(Prompt("p", PROMPT), 0, Sampling(8))])


@FORMS
def test_the_kl_of_a_guide_takes_one_pass(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the reference; the estimates are those of two models that know nothing of each other."""
    model, reference, _ = policy(folder, form, strength=0.5)
    assert model.is_beside(reference)
    texts = [PROMPT, PROMPT[:2]], [[9, 10, 11], [12]]
    found = []
    for beside in (True, False):
        monkeypatch.setattr(GuidedForCausalLM, "is_beside", lambda self, other, beside=beside: beside)
        found.append(rao_blackwell_kl(model, reference, *texts, batch_tokens=100))
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-5)
    monkeypatch.undo()
    with torch.no_grad():
        reference.get_output_embeddings().weight[3, 3] += 1.0
    assert not model.is_beside(reference)


@pytest.mark.parametrize(("reference_by", "trunk_by"), [(3, 0), (0, 3), (5, 2)])
def test_a_trunk_may_be_padded_otherwise(reference_by: int, trunk_by: int, folder: Path, tmp_path: Path) -> None:
    """As Qwen's sizes are, or a small reward beside one: it knows each token, and others as zeros; kept, it is read."""
    padded, tokenizer = load_policy(folder)[0], load_tokenizer(folder)
    for by, name in ((trunk_by, "trunk"), (reference_by, "reference")):
        model = load_policy(folder)[0]
        model.resize_token_embeddings(len(tokenizer) + by)
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / name)
    model = add_network_guide(tmp_path / "trunk", *load_policy(tmp_path / "reference")).eval()
    known = model.guide.network.get_input_embeddings().weight[: len(tokenizer)]
    assert torch.equal(known, padded.get_input_embeddings().weight)
    assert model.guide.network.get_input_embeddings().weight[len(tokenizer) + trunk_by :].count_nonzero() == 0
    draw(model, 0.5)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "guided")
    ids = torch.arange(len(tokenizer) + reference_by)[None, -20:]
    with torch.no_grad():
        found, again = model(ids).logits, load_policy(tmp_path / "guided")[0](ids).logits
    assert found.isfinite().all()
    torch.testing.assert_close(again, found)


def test_a_trunk_of_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    """The error has the folder; a folder without a model is refused by name too."""
    reference, tokenizer = load_policy(folder)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())
    ids = vocabulary["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    shutil.copytree(folder, tmp_path / "swapped")
    (tmp_path / "swapped" / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="swapped cannot be the trunk of a guide: its tokenizer differs"):
        add_network_guide(tmp_path / "swapped", reference, tokenizer)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="empty cannot be the trunk of a guide"):
        add_network_guide(tmp_path / "empty", reference, tokenizer)
