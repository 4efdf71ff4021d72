"""Log-probabilities and KL estimates against exact enumeration of every response of a tiny model."""

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from tiny_models import tiny
from transformers import LlamaForCausalLM, PreTrainedModel

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.kl import kl_from_reference_samples, rao_blackwell_kl, token_kl
from infalign.models.packed import can_pack, response_logprobs

VOCABULARY, EOS = 6, 1
PROMPTS = [[2], [3, 4, 5, 2], [5, 3]]
COMPLETIONS = [[4, 1], [3], [2, 2, 5, 3, 1]]


def tiny_llama(seed: int, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    """Return a random Llama in float64; if a function forgets evaluation mode, dropout makes its numbers random."""
    model = tiny(vocab_size=vocabulary, seed=seed, attention_dropout=0.5, bos_token_id=2, eos_token_id=EOS)
    return model.double().train()


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


@cache
@torch.no_grad()
def next_logits(model: PreTrainedModel, ids: tuple[int, ...]) -> np.ndarray:
    """Return the logits after the tokens, from an own unpadded forward pass."""
    return model.eval()(torch.tensor([ids])).logits[0, -1].double().numpy()


def naive_logprob(model: PreTrainedModel, prompt: list[int], completion: Sequence[int]) -> float:
    """Return log π(completion | prompt) token by token."""
    rows = [next_logits(model, (*prompt, *completion[:t])) for t in range(len(completion))]
    return sum(row[y] - np.logaddexp.reduce(row) for row, y in zip(rows, completion, strict=True))


def test_kl_estimates_have_the_exact_kl_as_their_expectation(policy, reference):
    """Averaged over all responses with their probabilities they are the exact KL, and vary less than log-ratios."""
    prompt, drawn = [2, 4], every_response()
    log_p, log_q = (np.array([naive_logprob(model, prompt, y) for y in drawn]) for model in (policy, reference))
    p = np.exp(log_p)
    exact = p @ (log_p - log_q)
    kl = rao_blackwell_kl(policy, reference, [prompt] * len(drawn), drawn, batch_tokens=64)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert exact > 0.1
    assert p @ kl == pytest.approx(exact, abs=1e-10, rel=0)
    assert kl.min() > 0
    assert p @ (kl - exact) ** 2 < p @ (log_p - log_q - exact) ** 2


def test_a_policy_has_no_divergence_from_itself(policy):
    """Where policy and reference are the same model the KL is 0, for an empty completion too."""
    kl = rao_blackwell_kl(policy, policy, [*PROMPTS, [3]], [*COMPLETIONS, []], batch_tokens=16)
    np.testing.assert_allclose(kl, 0, atol=1e-12)


def one_token(p: list[float], q: list[float], token: int) -> float:
    """Return the KL where one token was drawn, from the probabilities under policy and reference."""
    logits = torch.tensor([p, q], dtype=torch.float64).log()
    return float(token_kl(logits[:1], logits[1:], torch.tensor([token]))[0][0])


def test_a_token_worked_out_by_hand():
    """Also one that neither model has, which changes nothing, and one that only the reference or the policy has."""
    p, q, log = [0.5, 0.3, 0.2], [0.25, 0.25, 0.5], np.log
    expected = 0.5 * log(2) + 0.3 * log(1.2) + 0.2 * log(0.4)
    assert one_token(p, q, 1) == pytest.approx(expected)
    assert one_token([*p, 0.0], [*q, 0.0], 1) == pytest.approx(expected)
    assert one_token([0.5, 0.5], [1.0, 0.0], 0) == one_token([0.5, 0.5], [1.0, 0.0], 1) == np.inf
    assert one_token([1.0, 0.0], [0.5, 0.5], 0) == pytest.approx(log(2))


@pytest.mark.parametrize(("chunk", "logits"), [(1, 1), (3 * VOCABULARY, 7 * VOCABULARY)])
def test_kl_estimates_do_not_depend_on_chunks(policy, reference, chunk, logits, monkeypatch):
    """Token by token, and in chunks that divide neither tokens nor batches, the estimates are those of one piece."""
    drawn = every_response()

    def estimates() -> np.ndarray:
        return rao_blackwell_kl(policy, reference, [[2, 4]] * len(drawn), drawn, batch_tokens=999)

    whole = estimates()
    monkeypatch.setattr("infalign.evaluation.kl.CHUNK", chunk)
    monkeypatch.setattr("infalign.models.packed.MAX_LOGITS", logits)
    np.testing.assert_allclose(estimates(), whole, atol=1e-12)


def test_a_model_that_does_not_pack_has_the_same_kl() -> None:
    """A window longer than every text changes nothing but how the passes are made."""
    found = []
    for window in (None, 64):
        models = [tiny("Mistral", VOCABULARY, seed=seed, sliding_window=window).double() for seed in (0, 1)]
        assert [can_pack(model) for model in models] == [window is None] * 2
        of_policy = rao_blackwell_kl(*models, PROMPTS, COMPLETIONS, batch_tokens=64)
        found.append([of_policy, *kl_from_reference_samples(*models, PROMPTS, COMPLETIONS)])
    np.testing.assert_allclose(*found, atol=1e-12)
    assert (found[0][0] > 0.01).all()
    logprobs = [response_logprobs(model, PROMPTS, COMPLETIONS) for model in models]
    np.testing.assert_allclose(found[0][2], logprobs[0] - logprobs[1], atol=1e-12)


def test_half_precision_logits_are_not_rounded_further():
    """Estimates from bfloat16 logits are those of the same numbers in float64, and need no gradient switched off."""
    p, q = torch.randn(2, 12, 50, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    targets = torch.arange(12)
    np.testing.assert_allclose(token_kl(p, q, targets), token_kl(p.double(), q.double(), targets), atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_put_back_into_its_mode(training):
    """Measuring in the middle of training runs without dropout and leaves the training mode as it was."""
    model = tiny_llama(2).train(training)
    first = response_logprobs(model, PROMPTS, COMPLETIONS)
    assert model.training is training
    np.testing.assert_array_equal(response_logprobs(model, PROMPTS, COMPLETIONS), first)


def test_unanswerable_questions_are_errors(policy):
    """An empty prompt, unequal lists, another vocabulary, a token that is never drawn: refused with the reason."""
    with pytest.raises(DataError, match=r"row 1: the prompt has no tokens"):
        response_logprobs(policy, [[2], []], [[3], [3]])
    with pytest.raises(DataError, match=r"numbers of prompts \(2\) and completions \(1\) differ"):
        response_logprobs(policy, [[2], [2]], [[3]])
    with pytest.raises(ConfigError, match=r"shape \(1, 6\) \(policy\) and \(1, 7\)"):
        rao_blackwell_kl(policy, tiny_llama(0, vocabulary=7), [[2]], [[3]], batch_tokens=9)
    with pytest.raises(DataError, match="token 1, to which the policy gives probability 0; pass the model"):
        one_token([1.0, 0.0], [0.5, 0.5], 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("order", [1, -1])
def test_broken_logits_are_an_error(bad, order):
    """NaN or infinite logits of either model are refused."""
    pair = (torch.zeros(1, 3), torch.tensor([[0.0, bad, 0.0]]))[::order]
    with pytest.raises(ConfigError, match="NaN or infinite logits"):
        token_kl(*pair, torch.tensor([0]))
