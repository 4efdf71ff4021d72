"""A real language model whose responses can all be listed, so that every law about it is exact.

Responses have two tokens at most: seven letters and the end make 57 of them. Prompts have letters of their own, which
a bias of the output layer keeps out of responses. Reference and rewards are arbitrary, and differ between prompts.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from finite_model import FiniteModel
from finite_optima import best_law
from scipy.optimize import brentq, minimize
from scipy.special import expit, log_expit, wrightomega
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

from infalign import BestOfN, Law, Rollouts, WorstOfN
from infalign import tilted as tilted_law

PAD, START, END = "<pad>", "<start>", "<end>"
LETTERS, PROMPT_LETTERS = "abcdefg", "pqrs"
PROMPTS = ("p q", "q r s", "r p p")
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
COPIES = 10  # of each prompt, under different names: one of ten prompts is held out, and it must not be a new one
NEVER = -1e4  # a logit whose probability rounds to 0


@dataclass(frozen=True)
class Enumerable:
    """The saved reference, its prompts and responses as token ids, its law and the rewards."""

    folder: Path
    prompt_ids: list[list[int]]
    responses: list[list[int]]
    log_reference: np.ndarray  # (P, Y), nats
    rewards: np.ndarray  # (P, Y), distinct within a prompt

    def finite(self) -> list[FiniteModel]:
        """Return each prompt as a finite model."""
        return [
            FiniteModel(np.exp(row), rewards) for row, rewards in zip(self.log_reference, self.rewards, strict=True)
        ]

    def laws(self, model: Any) -> np.ndarray:
        """Return log π of every response to every prompt, shape (P, Y), in nats."""
        p, y = self.log_reference.shape
        return _laws(model, self.prompt_ids, self.responses).reshape(p, y)

    def rollouts(self, k: int) -> list[dict[str, Any]]:
        """Return k rollouts of each of the copies of each prompt, as a run stores them.

        They are drawn systematically: a response of probability p is drawn k·p times, rounded up or down, and all
        copies together are one systematic draw of k × ``COPIES``.
        """
        rows: list[dict[str, Any]] = []
        for copy in range(COPIES):
            points = (np.arange(k) + (copy + 0.5) / COPIES) / k
            for p, logprobs in enumerate(self.log_reference):
                cdf = np.exp(logprobs).cumsum()
                drawn = np.searchsorted(cdf / cdf[-1], points)
                rows += [
                    {
                        "prompt_id": f"{PROMPTS[p]} {copy}",
                        "prompt_ids": self.prompt_ids[p],
                        "completion_ids": self.responses[y],
                        "reference_logprob": float(logprobs[y]),
                        "reward": float(self.rewards[p, y]),
                    }
                    for y in drawn
                ]
        # the copies that are held out, every tenth name, are one of each prompt
        return sorted(rows, key=lambda row: (row["prompt_id"][:-2], row["prompt_id"]))

    def drawn(self, k: int) -> Rollouts:
        """Return `rollouts` as `sample` does, as far as `fit` reads them."""
        rows = self.rollouts(k)
        asked = [
            {"prompt_id": row["prompt_id"], "prompt": [], "columns": "{}", "token_ids": row["prompt_ids"]}
            for row in rows[::k]
        ]
        drawn = [{"token_ids": row["completion_ids"], "logprob": row["reference_logprob"]} for row in rows]
        return Rollouts(pa.Table.from_pylist(asked), pa.Table.from_pylist(drawn))

    def law(self, k: int, shaping: Any, beta: float) -> Law:
        """Return the tilted law of these rollouts, with the trainer's ``beta``."""
        return tilted_law(np.array([row["reward"] for row in self.rollouts(k)]).reshape(-1, k), shaping, beta=beta)


def enumerable(folder: Path, *, seed: int = 0) -> Enumerable:
    """Save a tiny random causal language model to ``folder`` and return all that there is to know about it."""
    vocabulary = {word: i for i, word in enumerate([PAD, START, END, *LETTERS, *PROMPT_LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, vocabulary[START])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=START, eos_token=END, model_max_length=16
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = PhiForCausalLM(
        PhiConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            initializer_range=0.1,  # log-probabilities that spread over some nats
            pad_token_id=vocabulary[PAD],
            bos_token_id=vocabulary[START],
            eos_token_id=vocabulary[END],
        )
    )
    letters = [vocabulary[letter] for letter in LETTERS]
    end = vocabulary[END]
    with torch.no_grad():
        never = torch.full((len(vocabulary),), NEVER)
        never[[*letters, end]] = 0.0
        model.lm_head.bias.copy_(never)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    prompt_ids = [list(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    responses = [[end], *([letter, end] for letter in letters), *([a, b] for a in letters for b in letters)]
    reference = AutoModelForCausalLM.from_pretrained(folder)
    logprobs = _normalised(
        _laws(reference, prompt_ids, responses).reshape(len(PROMPTS), -1)
    )  # but for rounding, it was
    rng = np.random.default_rng(seed)
    first, second, own = (rng.normal(size=(len(PROMPTS), size)) for size in (len(vocabulary),) * 2 + (len(responses),))
    rewards = first[:, [ids[0] for ids in responses]] + second[:, [ids[-1] for ids in responses]] + 0.3 * own
    return Enumerable(folder, prompt_ids, responses, logprobs, rewards)


@torch.no_grad()
def _laws(model: Any, prompt_ids: list[list[int]], responses: list[list[int]]) -> np.ndarray:
    """Return log π of each response to each prompt, in one row: of one token that ends it, or of two."""
    firsts, lasts = (torch.tensor([ids[place] for ids in responses]) for place in (0, -1))
    rows, long = torch.arange(len(responses)), torch.tensor([len(ids) == 2 for ids in responses])
    found = []
    for prompt in prompt_ids:
        given = torch.cat([torch.tensor([prompt]).expand(len(responses), -1), firsts[:, None]], dim=1)
        logprobs = model.eval()(given).logits.double().log_softmax(-1)
        found.append(logprobs[rows, -2, firsts] + long * logprobs[rows, -1, lasts])
    return torch.cat(found).numpy()


# What a method would learn if it could be any distribution


def tilted(case: Enumerable, transform: Any, beta: float) -> np.ndarray:
    """Return log π* of π* = π_ref·e^{Φ(C)/β}/Z, (P, Y), with exact calibration and β for the paper's raw Φ."""
    return tilted_by(case, transformed(case, transform), beta / transform.scale)


def transformed(case: Enumerable, transform: Any) -> np.ndarray:
    """Return the normalised Φ(C) of every response, (P, Y)."""
    return np.stack([transform(model.calibrated()) for model in case.finite()])


def tilted_by(case: Enumerable, values_PY: np.ndarray, beta: float) -> np.ndarray:
    """Return log π* of π* = π_ref·e^{value/β}/Z, (P, Y)."""
    return _normalised(case.log_reference + values_PY / beta)


def best_of_n(case: Enumerable, n: float) -> np.ndarray:
    """Return the log-law of what Best-of-n serves, (P, Y); for real n the CDF's n-th power."""
    order = case.rewards.argsort(axis=1)
    log_cdf = np.log(np.take_along_axis(np.exp(case.log_reference), order, axis=1).cumsum(axis=1))
    rises = np.diff(log_cdf, prepend=-np.inf)
    law = np.empty_like(log_cdf)
    np.put_along_axis(law, order, n * log_cdf + np.log(-np.expm1(-n * rises)), axis=1)
    return _normalised(law)


def optimum(case: Enumerable, procedure: BestOfN | WorstOfN, beta: float) -> np.ndarray:
    """Return the log-law of the policy that maximises W − β·KL, the aim of maxk, (P, Y)."""
    return np.stack([best_law(model, procedure, beta) for model in case.finite()])


def standardized(case: Enumerable) -> np.ndarray:
    """Return the rewards less their mean, over their standard deviation, of each prompt under the reference, (P, Y)."""
    weights = np.exp(case.log_reference)
    spread = case.rewards - (weights * case.rewards).sum(axis=1, keepdims=True)
    return spread / np.sqrt((weights * spread**2).sum(axis=1, keepdims=True))


def preference(case: Enumerable) -> np.ndarray:
    """Return PAR's E_z σ(r(y) − r(z)) with z from the reference, (P, Y)."""
    return np.stack([expit(np.subtract.outer(m.rewards, m.rewards)) @ m.reference for m in case.finite()])


def log_sigmoid(case: Enumerable, quantile: float = 0.85) -> np.ndarray:
    """Return LSC's log σ(r(y) − q), (P, Y); q is the least reward whose reference CDF reaches ``quantile``."""
    order = case.rewards.argsort(axis=1)
    cdf = np.take_along_axis(np.exp(case.log_reference), order, axis=1).cumsum(axis=1)
    at = np.take_along_axis(order, (cdf >= quantile).argmax(axis=1)[:, None], axis=1)
    return log_expit(case.rewards - np.take_along_axis(case.rewards, at, axis=1))


def token_tilted(case: Enumerable, values_PY: np.ndarray, beta: float) -> np.ndarray:
    """Return the log-law where the gradients of E[value] and of β × in-loss KL cancel, (P, Y).

    In the loss, a token's KL knows nothing of the KL of later tokens. So at every prefix the law solves a problem of
    its own, π(token) ∝ π_ref(token)·e^{Q(token)/β} with Q = E_π[value | prefix, token]; the last token comes first.
    """
    law, value = case.log_reference.copy(), values_PY.copy()
    for length in reversed(range(max(map(len, case.responses)))):
        starts = [tuple(ids[:length]) for ids in case.responses]
        for prefix in set(starts):
            below = [y for y, start in enumerate(starts) if start == prefix]
            given = _normalised(law[:, below] + value[:, below] / beta)
            law[:, below] = given + np.logaddexp.reduce(law[:, below], axis=1, keepdims=True)
            value[:, below] = (np.exp(given) * value[:, below]).sum(axis=1, keepdims=True)
    return law


def group_advantages(values_PY: np.ndarray, log_policy_PY: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return E[(value − mean)/(std + 10⁻⁴)] of each response in a group with G − 1 others from the policy, (P, Y).

    Mean and unbiased std are of the whole group, as in TRL. The expectation is the mean over ``others``, uniform points
    of shape (groups, G − 1), from which the inverse CDF makes responses.
    """
    group, found = others.shape[1] + 1, []
    for values, policy in zip(values_PY, np.exp(log_policy_PY), strict=True):
        order = values.argsort()
        cdf = policy[order].cumsum()
        drawn = values[order][np.searchsorted(cdf / cdf[-1], others, side="right")]
        gap = values[:, None] - drawn.mean(axis=1)
        std = np.sqrt(drawn.var(axis=1) + gap**2 / group)
        found.append(((1.0 - 1.0 / group) * gap / (std + 1e-4)).mean(axis=1))
    return np.stack(found)


def group_normalised(
    case: Enumerable, values_PY: np.ndarray, kl_budget: float, others: np.ndarray, *, iterations: int = 40
) -> tuple[np.ndarray, float]:
    """Return the log-law, (P, Y), that spends the budget and on which GRPO as TRL ships it rests, and its residual.

    It is `token_tilted` by its own `group_advantages`, found by damped iteration; the residual is the largest
    difference of log-probabilities between it and the law whose advantages it is tilted by.
    """
    law = step = case.log_reference
    for _ in range(iterations):
        law = _normalised(0.5 * (law + step))
        advantages = group_advantages(values_PY, law, others)
        step = at_kl(case, partial(token_tilted, case, advantages), kl_budget)
    return step, float(np.abs(step - law).max())


def bond_step(case: Enumerable, log_anchor_PY: np.ndarray, gamma: float) -> np.ndarray:
    """Return the log-law that minimises J-BOND's expected loss with a frozen anchor a, (P, Y).

    ½·KL(Bo2(a)‖π) + ½·[KL(π‖a) − E_π r] + γ·KL(π‖a), with r = −log 16 times the chance to be worse than both of two
    draws of a. With x = log π/a the gradient vanishes where x − c·e^{−x} = s, so that x = s + W(c·e^{−s}), Lambert's W.
    """
    weight = 0.5 + gamma
    laws = []
    for rewards, log_anchor in zip(case.rewards, _normalised(log_anchor_PY), strict=True):
        anchor = np.exp(log_anchor)
        worse = (rewards[:, None] < rewards) @ anchor
        better_of_two = 2.0 * (1.0 - worse) - anchor  # over a; rewards are distinct
        log_c, r = np.log(0.5 * better_of_two / weight), -np.log(16.0) * worse**2

        def log_ratio(level: float, log_c: np.ndarray = log_c, r: np.ndarray = r) -> np.ndarray:
            s = level + 0.5 * r / weight
            return s + wrightomega(log_c - s)

        def excess(
            level: float, log_anchor: np.ndarray = log_anchor, log_ratio: Callable[[float], np.ndarray] = log_ratio
        ) -> float:
            return float(np.logaddexp.reduce(log_anchor + log_ratio(level)))

        laws.append(_normalised(log_anchor + log_ratio(brentq(excess, -50.0, 50.0, xtol=1e-14))))
    return np.stack(laws)


def bond(case: Enumerable, kl_budget: float) -> np.ndarray:
    """Return the log-law that spends the budget after steps of J-BOND, each from the last one's law as anchor, (P, Y).

    The steps have γ = 0 but for the last, which has the γ that hits the budget.
    """
    anchor = case.log_reference
    while kl(step := bond_step(case, anchor, 0.0), case.log_reference) < kl_budget:
        anchor = step
    return at_kl(case, partial(bond_step, case, anchor), kl_budget, between=(1e-9, 1e6))


def pair_optimum(case: Enumerable, tau: float) -> np.ndarray:
    """Return the log-law that minimises the expected loss of IPO over independent pairs, found numerically, (P, Y)."""

    def loss(h: torch.Tensor, p: int) -> torch.Tensor:
        reference, rewards = torch.tensor(np.exp(case.log_reference[p])), torch.tensor(case.rewards[p])
        label = torch.sign(rewards[:, None] - rewards) / (2.0 * tau)
        return reference @ (h[:, None] - h - label).square() @ reference

    return _tabular(case, loss)


def best_worst_optimum(case: Enumerable, n: int, *, alpha: float = 0.005, margin: float | None = None) -> np.ndarray:
    """Return the log-law that minimises the expected loss of BoNBoN, found numerically, (P, Y)."""
    if margin is None:
        margin = (n - 1) * sum(1.0 / k for k in range(1, n))

    def loss(h: torch.Tensor, p: int) -> torch.Tensor:
        # P(worst ≥ a, best ≤ b) = P(a..b)^n; its differences are the joint law of the two (rewards are distinct)
        ranks = case.rewards[p].argsort()
        edges = np.append(0.0, np.exp(case.log_reference[p][ranks]).cumsum())
        within = np.maximum(edges[None, :] - edges[:, None], 0.0) ** n
        joint = torch.tensor(within[:-1, 1:] - within[1:, 1:] - within[:-1, :-1] + within[1:, :-1])
        joint = joint.clamp(min=0.0)
        worst, best = h[ranks.copy()][:, None], h[ranks.copy()][None, :]
        gap = best - worst
        contrast = (
            (gap - margin).square().masked_fill(torch.eye(len(ranks), dtype=torch.bool), 0.0)
        )  # one response is both
        return (joint * (-alpha * best + (1.0 - alpha) * contrast)).sum()

    return _tabular(case, loss)


def at_kl(
    case: Enumerable,
    law: Callable[[float], np.ndarray],
    kl_budget: float,
    *,
    between: tuple[float, float] = (1e-6, 1e3),
) -> np.ndarray:
    """Return law(strength) at the strength between these two where the mean KL(π ‖ π_ref) is the budget, (P, Y)."""

    def excess(log_strength: float) -> float:
        return kl(law(float(np.exp(log_strength))), case.log_reference) - kl_budget

    return law(float(np.exp(brentq(excess, *np.log(between), xtol=1e-11))))


def _tabular(case: Enumerable, loss: Callable[[torch.Tensor, int], torch.Tensor]) -> np.ndarray:
    """Return log π of the policy with the least loss of h = log π/π_ref, prompt by prompt, (P, Y)."""
    laws = []
    for p, logprobs in enumerate(case.log_reference):
        reference = torch.tensor(logprobs)

        def value(theta: np.ndarray, p: int = p, reference: torch.Tensor = reference) -> tuple[float, np.ndarray]:
            logits = torch.tensor(theta, requires_grad=True)
            found = loss((reference + logits).log_softmax(0) - reference, p)
            found.backward()
            assert logits.grad is not None
            return found.item(), logits.grad.numpy()

        options = {"maxiter": 20000, "maxfun": 40000, "gtol": 1e-9, "ftol": 1e-15}
        theta = minimize(value, np.zeros(len(logprobs)), jac=True, method="L-BFGS-B", options=options).x
        laws.append(_normalised(logprobs + theta))
    return np.stack(laws)


def _normalised(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


# Comparing laws


def kl(log_p_PY: np.ndarray, log_q_PY: np.ndarray) -> float:
    """Return KL(p ‖ q), the mean over prompts, in nats."""
    return float((np.exp(log_p_PY) * (log_p_PY - log_q_PY)).sum(1).mean())


def win_rate(case: Enumerable, log_policy_PY: np.ndarray, procedure: Any) -> float:
    """Return the exact win rate against the reference, both served by ``procedure``, the mean over prompts."""
    policies = np.exp(_normalised(log_policy_PY))
    return float(np.mean([model.win_rate(row, procedure) for model, row in zip(case.finite(), policies, strict=True)]))


def row(case: Enumerable, log_policy_PY: np.ndarray) -> tuple[float, float, float]:
    """Return KL(π ‖ π_ref), Best-of-4 and Worst-of-4 win rate."""
    served = (win_rate(case, log_policy_PY, procedure) for procedure in (BestOfN(4), WorstOfN(4)))
    return (kl(log_policy_PY, case.log_reference), *served)  # type: ignore[return-value]


def print_table(
    methods: Mapping[str, Any], trained: Callable[[Enumerable, Any], np.ndarray], names: Sequence[str]
) -> None:
    """Train the methods that are named, or all, and print where each lands beside its own optimum."""
    torch.set_num_threads(1)
    print(f"{'':16} KL(π‖π*)   KL(π‖ref)       Best-of-4       Worst-of-4     (trained, optimum)")
    with tempfile.TemporaryDirectory() as folder:
        case = enumerable(Path(folder) / "reference")
        for name in names or methods:
            law, optimum_law = trained(case, methods[name]), methods[name].optimum(case)
            found = zip(row(case, law), row(case, optimum_law), strict=True)
            cells = "   ".join(f"{a:.4f} {b:.4f}" for a, b in found)
            print(f"{name:16} {kl(law, optimum_law):.4f}   {cells}", flush=True)
