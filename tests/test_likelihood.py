"""Log-probabilities and KL estimates against exact enumeration of every response of a tiny model."""

import itertools

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from infalign.errors import ConfigError, DataError
from infalign.likelihood import (
    completion_logprobs,
    length_batches,
    rao_blackwell_kl,
    token_logprobs,
)

torch.set_num_threads(1)

VOCABULARY, EOS, PAD = 6, 1, 0
PROMPTS = [[2], [3, 4, 5, 2], [5, 3]]
COMPLETIONS = [[4, 1], [3], [2, 2, 5, 3, 1]]


def tiny_llama(seed: int, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """Return a random Llama in float64 with weights large enough for distributions that are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        attention_dropout=0.5,  # if a function forgets evaluation mode, its numbers are random
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).double()


def tiny_gpt2() -> GPT2LMHeadModel:
    """Return a random GPT-2, whose absolute positions notice a row that padding has moved."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3, bos_token_id=2, eos_token_id=EOS
    )
    return GPT2LMHeadModel(config).double()


@pytest.fixture(scope="module")
def policy() -> LlamaForCausalLM:
    """Return the model that the responses come from."""
    return tiny_llama(0)


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    """Return a model that differs from the policy in all its weights."""
    return tiny_llama(1)


def every_response(longest: int = 3) -> list[list[int]]:
    """Return all responses that sampling can give: up to the first EOS, or ``longest`` tokens without one."""
    tokens = [token for token in range(VOCABULARY) if token != EOS]
    ended = [[*body, EOS] for n in range(longest) for body in itertools.product(tokens, repeat=n)]
    return ended + [list(body) for body in itertools.product(tokens, repeat=longest)]


@torch.no_grad()
def naive_logprob(model: LlamaForCausalLM, prompt: list[int], completion: list[int], temperature: float = 1.0) -> float:
    """Return log π(completion | prompt) token by token, each from an own unpadded forward pass."""
    model.eval()
    total = 0.0
    for t, token in enumerate(completion):
        logits = model(torch.tensor([prompt + completion[:t]])).logits[0, -1] / temperature
        total += logits.log_softmax(-1)[token].item()
    return total


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input ids, mask and labels of the module's prompts and completions, padded on one side."""
    width = max(len(p) + len(c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True))
    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        gap = width - len(prompt) - len(completion)
        left, right = (gap, 0) if side == "left" else (0, gap)
        ids = [PAD] * left + prompt + completion + [PAD] * right
        mask = [0] * left + [1] * (width - gap) + [0] * right
        labels = [-100] * (left + len(prompt)) + completion + [-100] * right
        rows.append((ids, mask, labels))
    ids, mask, labels = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(labels)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_kl_estimates_have_the_exact_kl_as_their_expectation(policy, reference, temperature):
    """Averaged over all responses as they are sampled, both estimates are the exact sequence KL; RB varies less."""
    prompt, responses = [2, 4], every_response()
    log_p = np.array([naive_logprob(policy, prompt, y, temperature) for y in responses])
    log_q = np.array([naive_logprob(reference, prompt, y, temperature) for y in responses])
    p = np.exp(log_p)
    exact = p @ (log_p - log_q)
    kl = rao_blackwell_kl(
        policy,
        reference,
        [prompt] * len(responses),
        responses,
        pad_id=PAD,
        batch_tokens=64,
        temperature=temperature,
    )
    assert p.sum() == pytest.approx(1, abs=1e-9)
    assert exact > 0.1
    assert p @ kl.rao_blackwell == pytest.approx(exact, abs=1e-9)
    assert p @ kl.k1 == pytest.approx(exact, abs=1e-9)
    assert (kl.rao_blackwell > 0).all()
    assert p @ (kl.rao_blackwell - exact) ** 2 < p @ (kl.k1 - exact) ** 2
    np.testing.assert_allclose(kl.k1, log_p - log_q, atol=1e-9)
    assert kl.tokens.tolist() == [len(y) for y in responses]


def test_a_policy_has_no_divergence_from_itself(policy):
    """Where policy and reference are the same model both estimates are 0, for an empty completion too."""
    kl = rao_blackwell_kl(policy, policy, [*PROMPTS, [3]], [*COMPLETIONS, []], pad_id=PAD, batch_tokens=16)
    np.testing.assert_allclose(kl.rao_blackwell, 0, atol=1e-12)
    np.testing.assert_allclose(kl.k1, 0, atol=1e-12)
    assert kl.tokens.tolist() == [2, 1, 5, 0]


@pytest.mark.parametrize("batch_tokens", [1, 12, 1000])
def test_batched_logprobs_equal_a_loop_over_single_tokens(policy, batch_tokens):
    """The sums of a padded batch, in the order of the rows, are those of one forward pass for each token."""
    expected = [naive_logprob(policy, x, y) for x, y in zip(PROMPTS, COMPLETIONS, strict=True)]
    found = token_logprobs(policy, PROMPTS, COMPLETIONS, pad_id=PAD, batch_tokens=batch_tokens)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("model", [tiny_llama(0), tiny_gpt2()], ids=["llama", "gpt2"])
def test_logprobs_and_gradients_match_log_softmax_on_either_padding_side(model: PreTrainedModel, side: str):
    """Value and gradient are those of log_softmax over unpadded rows, whichever side the padding is on."""
    model.eval()
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    rows = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        positions = torch.arange(len(completion)) + len(prompt) - 1
        rows.append(logprobs[positions, completion].sum())
    expected = torch.stack(rows)
    gradients = torch.autograd.grad(weights @ expected, list(model.parameters()))

    found = completion_logprobs(model, *padded(side))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(weights @ found, list(model.parameters())), gradients)


def test_half_precision_models_are_summed_in_float32(policy):
    """A bfloat16 model gives float32 log-probabilities, within bfloat16 rounding of the float64 model."""
    half = tiny_llama(0).to(torch.bfloat16).eval()
    found = completion_logprobs(half, *padded("right"))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(
        found.detach(), token_logprobs(policy, PROMPTS, COMPLETIONS, pad_id=PAD, batch_tokens=99), rtol=0.05
    )


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_put_back_into_its_mode(training):
    """Measuring in the middle of training runs without dropout and leaves the training mode as it was."""
    model = tiny_llama(2).train(training)
    first = token_logprobs(model, PROMPTS, COMPLETIONS, pad_id=PAD, batch_tokens=99)
    assert model.training is training
    np.testing.assert_array_equal(token_logprobs(model, PROMPTS, COMPLETIONS, pad_id=PAD, batch_tokens=99), first)


def test_length_batches_cover_every_row_once_within_the_bound():
    """Batches partition the rows, and only a row that is too long alone exceeds the bound on padded tokens."""
    lengths = np.random.default_rng(0).integers(0, 60, 200).tolist()
    batches = list(length_batches(lengths, 50))
    assert sorted(row for rows in batches for row in rows) == list(range(200))
    assert all(len(rows) * max(lengths[row] for row in rows) <= 50 or len(rows) == 1 for rows in batches)
    assert len(batches) < 160
    assert list(length_batches([], 50)) == []


def test_unanswerable_questions_are_errors(policy):
    """An empty prompt, unequal lists, another vocabulary or a temperature of 0 is refused with the reason."""
    with pytest.raises(DataError, match=r"row 1: the prompt has no tokens"):
        token_logprobs(policy, [[2], []], [[3], [3]], pad_id=PAD, batch_tokens=9)
    with pytest.raises(DataError, match=r"2 prompts do not go with 1 completions"):
        token_logprobs(policy, [[2], [2]], [[3]], pad_id=PAD, batch_tokens=9)
    with pytest.raises(ConfigError, match=r"6 outputs and the reference 7"):
        rao_blackwell_kl(policy, tiny_llama(0, vocabulary=7), [[2]], [[3]], pad_id=PAD, batch_tokens=9)
    with pytest.raises(ConfigError, match=r"temperature, a number above 0, found 0"):
        rao_blackwell_kl(policy, policy, [[2]], [[3]], pad_id=PAD, batch_tokens=9, temperature=0)
