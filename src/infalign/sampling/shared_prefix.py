"""Draw many responses together: those to one prompt share its computation and its cache, and rows join and leave."""

import math
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

from infalign.core.errors import ConfigError, first_line
from infalign.models.attention import attending, attention_configs
from infalign.models.policy import AnyModel, loaded
from infalign.models.settings import Compute
from infalign.sampling.engine import (
    UNDEFINED_POLICY,
    Draw,
    Engine,
    EngineSettings,
    OpenEngine,
    Prompt,
    Response,
    Sampling,
    Vocabulary,
    check_evaluating,
    check_prompt,
    pick_tokens,
    token_uniforms,
)
from infalign.sampling.prefix_cache import SharedPrefixCache, attend

if TYPE_CHECKING:
    from torch import Tensor

ALTERNATIVES = (
    "; set `rollout.engine.kind: transformers`, which is slower but supports any causal language model, or "
    "`rollout.engine.command`, which starts vLLM; to serve it, start vLLM and give --engine-url"
)


class SharedPrefixError(ConfigError):
    """A model that the fast engine cannot run; what it says ends with `ALTERNATIVES`."""


@dataclass(eq=False, slots=True)
class Row:
    """A response that is being drawn: a random number for each token that it may have, and its tokens so far."""

    prompt_tokens: int
    uniforms: list[float]
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    ended: bool = False
    greedy: bool = False


class SharedPrefixBatch:
    """Responses to one or many prompts that are drawn together: a token of each at every step.

    Rows join and leave between steps. Takes any transformers decoder in which every layer attends to all earlier tokens
    through the attention interface (Llama, Qwen, Mistral without a window, Gemma, GPT-2, …), also a guided policy;
    raises `ConfigError` for others. A response depends on (seed, prompt_id, index) only, up to rounding in matrix
    products, which depends on the batch size.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.vocabulary = model, Vocabulary.of(model, tokenizer)
        self._absent = self.vocabulary.absent_on(model.device)
        self.rows: list[Row] = []  # with some that have ended: compacting the cache is costly
        self._cache = SharedPrefixCache()
        self._configs = attention_configs(model)
        self._logits: Tensor  # rows × V, after the last token of each row
        self._check()

    def join(self, draws: Iterable[tuple[Prompt, int, Sampling]]) -> list[Row]:
        """Begin rollouts, each of a prompt and a number; neighbors of one prompt share its computation.

        Raises DataError for a prompt that the model cannot answer.
        """
        begun: list[tuple[Sequence[int], list[Row]]] = []
        for _, group in groupby(draws, lambda draw: (draw[0].prompt_id, tuple(draw[0].token_ids))):  # tools count
            rows = list(group)
            prompt, longest = rows[0][0], max((sampling for *_, sampling in rows), key=lambda one: one.max_new_tokens)
            check_prompt(prompt, self.model, longest)
            tokens, streams = len(prompt.token_ids), list[Row]()
            for _, index, sampling in rows:
                (uniforms,) = token_uniforms(sampling, prompt.prompt_id, [index])
                streams.append(Row(tokens, uniforms.tolist(), greedy=sampling.greedy))
            begun.append((prompt.token_ids, streams))
        self._begin(begun)
        return [row for _, rows in begun for row in rows]

    def leave(self, rows: Collection[Row]) -> None:
        """Take rows out, finished or not."""
        for row in rows:
            row.ended = True
        if all(row.ended for row in self.rows):
            self.rows, self._cache = [], SharedPrefixCache()

    def step(self) -> list[Row]:
        """Draw the next token of every row; return the rows that end with it, which have left.

        Raises ConfigError for a model with NaN or infinite logits.
        """
        import torch

        uniforms = [0.0 if row.ended else row.uniforms[len(row.token_ids)] for row in self.rows]
        with torch.no_grad():
            at = torch.tensor(uniforms, dtype=torch.float64, device=self._logits.device)
            tokens, logprobs = pick_tokens(self._logits, at, self._absent, [row.greedy for row in self.rows])
            ended = []
            for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
                if row.ended:
                    continue
                if not math.isfinite(logprob):
                    raise ConfigError(UNDEFINED_POLICY)
                row.token_ids.append(token)
                row.logprob += logprob
                if token in self.vocabulary.ends or len(row.token_ids) == len(row.uniforms):
                    ended.append(row)
            self.leave(ended)
            if sum(not row.ended for row in self.rows) <= 0.75 * len(self.rows):
                self._compact()
            if self.rows:
                self._forward()
        return ended

    def responses(self, rows: Sequence[Row]) -> list[Response]:
        """Return rows as responses."""
        return self.vocabulary.responses([row.token_ids for row in rows], [row.logprob for row in rows])

    def _begin(self, begun: Sequence[tuple[Sequence[int], list[Row]]]) -> None:
        """Add the rows of each prompt, whose keys, values and logits come from the model's normal attention."""
        import torch
        from transformers import DynamicCache

        self._compact()
        with torch.no_grad():
            parts = [self._logits] if self.rows else []
            for prompt_ids, rows in begun:
                ids = torch.tensor([list(prompt_ids)], device=self.model.device)
                cache = DynamicCache(config=self.model.config)
                out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                self._cache.add([(layer.keys, layer.values) for layer in cache.layers], len(rows))
                self.rows += rows
                parts.append(out.logits[:, -1].expand(len(rows), -1))
            self._logits = torch.cat(parts)

    def _compact(self) -> None:
        places = [place for place, row in enumerate(self.rows) if not row.ended]
        if 0 < len(places) < len(self.rows):
            self.rows, self._logits = [self.rows[place] for place in places], self._logits[places]
            self._cache.keep(places)

    def _forward(self) -> None:
        """Append the last token of each row to the cache, and compute the logits after it."""
        import torch

        device, cache = self._logits.device, self._cache
        tokens = [row.token_ids[-1] for row in self.rows]
        positions = [row.prompt_tokens + len(row.token_ids) - 1 for row in self.rows]
        with attending(self._configs, "infalign_shared_prefix", attend):
            out = self.model(
                input_ids=torch.tensor(tokens, device=device)[:, None],
                position_ids=torch.tensor(positions, device=device)[:, None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                shared_prefix=cache,  # models pass unknown keyword arguments on to the attention function
            )
        cache.length += 1
        self._logits = out.logits[:, -1]

    def _check(self) -> None:
        """Raise `ConfigError` unless tokens after prompts of different lengths get the logits of plain passes."""
        import torch
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer

        check_evaluating(self.model)
        name = type(self.model).__name__
        layers = {type(layer) for layer in DynamicCache(config=self.model.config).layers}
        if layers != {DynamicLayer}:  # whose cache is every earlier token's keys and values
            odd = ", ".join(sorted(layer.__name__ for layer in layers - {DynamicLayer})) or "unknown layers"
            raise SharedPrefixError(f"{name} has layers without full attention ({odd}){ALTERNATIVES}")
        size = self.model.config.get_text_config(decoder=True).vocab_size
        ids = [(size // 2 + token) % size for token in range(5)]  # the first ids are special: far from any text
        device = self.model.device
        try:
            with torch.no_grad():
                plain = [
                    self.model(torch.tensor([text], device=device), use_cache=False).logits[0, -1]
                    for text in (ids, ids, ids[:3])
                ]
                self._begin([(ids[:3], [Row(3, [], ids[3:4]), Row(3, [], ids[3:4])])])
                self._forward()
                for row in self.rows:
                    row.token_ids.append(ids[4])
                self._begin([(ids[:2], [Row(2, [], ids[2:3])])])
                self._forward()
        except Exception as error:  # a model without the attention interface can raise any exception
            raise SharedPrefixError(f"{name} cannot share a prefix: {first_line(error)}{ALTERNATIVES}") from error
        expected, logits = torch.stack(plain).float(), self._logits.float()
        self.leave(self.rows)
        if not expected.isfinite().all():
            raise ConfigError(UNDEFINED_POLICY)
        # Not the largest gap: at the edge of a guide's top tokens rounding decides which logits change.
        gap = float((logits - expected).abs().quantile(0.98) / (1 + expected.abs().max()))
        if not gap <= torch.finfo(self.model.dtype).eps ** 0.5:
            wrong = f"{name} gives other logits with a shared prefix (relative gap {gap:.1e})"
            raise SharedPrefixError(f"{wrong}{ALTERNATIVES}")


class SharedPrefixEngine(Engine):
    """Draws the rollouts of a run by `SharedPrefixBatch`: those of one call begin together."""

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling) -> None:
        self.batch, self.sampling, self.device_type = SharedPrefixBatch(model, tokenizer), sampling, model.device.type

    def sample_together(self, draws: Sequence[Draw]) -> list[Response]:
        """Return the rollouts, which are drawn in one batch."""
        try:
            rows = self.batch.join((prompt, index, self.sampling) for prompt, index in draws)
            while self.batch.rows:
                self.batch.step()
        except BaseException:
            self.batch.leave(self.batch.rows)
            raise
        return self.batch.responses(rows)


class Settings(EngineSettings):
    """The sampler of infalign, `SharedPrefixEngine`."""

    kind: Literal["shared-prefix"] = "shared-prefix"

    def open(self, model: AnyModel, sampling: Sampling, compute: Compute, probe: Prompt) -> OpenEngine:
        """Return the engine on the loaded model. Raises ConfigError for a model that it cannot sample from."""
        return nullcontext(SharedPrefixEngine(*loaded(model, compute), sampling))
