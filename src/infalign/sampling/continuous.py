"""Draw responses to many prompts together: a token of each at every step, and rows join and leave between steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from infalign.core.errors import ConfigError, first_line
from infalign.method.calibration import Array
from infalign.models.attention import odd_layers
from infalign.models.pretrained import eos_token_id
from infalign.sampling.engine import (
    NO_POLICY,
    Prompt,
    Response,
    Sampling,
    check_evaluating,
    check_prompt,
    pick_tokens,
    token_uniforms,
)
from infalign.sampling.shared_prefix import prefill

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = Sampling(1)  # temperature 1 and no truncation
ELSEWHERE = "; serve it with vLLM and name that server's URL as the engine"


@dataclass(eq=False, slots=True)
class Row:
    """A response that is being drawn, and a random number for each token that it may have."""

    uniforms: Array
    token_ids: list[int] = field(default_factory=list)
    logprob: float = 0.0


class ContinuousBatch:
    """Responses to many prompts that are drawn together from one model.

    A response depends on (seed, prompt_id, index) only, and is the one that `SharedPrefixEngine` draws, up to rounding.
    Takes transformers decoders in which every layer attends to all earlier tokens, also a guided policy; raises
    `ConfigError` for others. The rows of a prompt share its computation, and each has the prompt in its cache.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.eos = eos_token_id(tokenizer)
        self.rows: list[Row] = []
        self._cache: Any = None  # of all rows, padded on the left
        self._attended: Tensor  # rows × tokens, 0 where a row is padded
        self._logits: Tensor  # rows × V, after the last token of each row
        self._check()

    def join(self, asked: Iterable[tuple[Prompt, int, Sampling]]) -> list[Row]:
        """Begin rollouts, each of a prompt and a number; neighbours of one prompt share its computation.

        Of a sampling the seed and the length count; the distribution is the policy's own. Raises DataError for a prompt
        that the model cannot answer.
        """
        begun: list[tuple[Sequence[int], list[Row]]] = []
        for identity, group in groupby(asked, lambda one: one[0].prompt_id):
            rows = []
            for prompt, index, sampling in group:
                check_prompt(prompt.token_ids, identity, self.model, sampling)
                rows.append(Row(token_uniforms(sampling, identity, [index])[0]))
            begun.append((prompt.token_ids, rows))
        self._begin(begun)
        return [row for _, rows in begun for row in rows]

    def leave(self, rows: Collection[Row]) -> None:
        """Take rows out, finished or not."""
        gone = set(map(id, rows))
        self._keep([place for place, row in enumerate(self.rows) if id(row) not in gone])

    def step(self) -> list[Row]:
        """Draw the next token of every row; return the rows that end with it, which have left.

        Raises ConfigError for a model with NaN or infinite logits.
        """
        import torch

        uniforms = [row.uniforms[len(row.token_ids)] for row in self.rows]
        with torch.no_grad():
            tokens, logprobs = pick_tokens(self._logits, torch.tensor(uniforms, device=self._logits.device), PLAIN)
            if not logprobs.isfinite().all():
                raise ConfigError(NO_POLICY)
            for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
                row.token_ids.append(token)
                row.logprob += logprob
            ended = [
                row for row in self.rows if row.token_ids[-1] == self.eos or len(row.token_ids) == row.uniforms.size
            ]
            self.leave(ended)
            if self.rows:
                self._forward([row.token_ids[-1] for row in self.rows])
        return ended

    def response(self, row: Row) -> Response:
        """Return a row as a response."""
        text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
        finish = "stop" if row.token_ids[-1:] == [self.eos] else "length"
        return Response(tuple(row.token_ids), text, finish, row.logprob)

    def _begin(self, begun: Sequence[tuple[Sequence[int], list[Row]]]) -> None:
        """Add the rows of each prompt."""
        import torch
        from torch.nn.functional import pad

        with torch.no_grad():
            parts = [(self._cache, self._attended, self._logits)] if self.rows else []
            for prompt_ids, rows in begun:
                logits, cache = prefill(self.model, prompt_ids)
                for layer in cache.layers:
                    layer.keys, layer.values = (x.expand(len(rows), -1, -1, -1) for x in (layer.keys, layer.values))
                ones = torch.ones(len(rows), len(prompt_ids), dtype=torch.long, device=logits.device)
                parts.append((cache, ones, logits.expand(len(rows), -1)))
            caches, attended, logits_of = zip(*parts, strict=True)
            length = max(x.shape[1] for x in attended)
            for layers in zip(*(cache.layers for cache in caches), strict=True):
                for name in ("keys", "values"):
                    padded = [pad(x, (0, 0, length - x.shape[2], 0)) for x in (getattr(part, name) for part in layers)]
                    setattr(layers[0], name, torch.cat(padded))
            self._cache = caches[0]
            self._attended = torch.cat([pad(x, (length - x.shape[1], 0)) for x in attended])
            self._logits = torch.cat(logits_of)
        self.rows = [*self.rows, *(row for _, rows in begun for row in rows)]

    def _keep(self, places: list[int]) -> None:
        """Keep the rows at these places, and no token that all of them are padded at."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if not self.rows:
            self._cache = None
            return
        self._attended = self._attended[places]
        first = int(self._attended.argmax(dim=1).min())
        self._attended, self._logits = self._attended[:, first:], self._logits[places]
        for layer in self._cache.layers:
            layer.keys, layer.values = (x[places][:, :, first:] for x in (layer.keys, layer.values))

    def _forward(self, tokens: Sequence[int]) -> None:
        """Append a token to each row."""
        import torch
        from torch.nn.functional import pad

        self._attended = pad(self._attended, (0, 1), value=1)
        out = self.model(
            input_ids=torch.tensor(tokens, device=self._attended.device)[:, None],
            attention_mask=self._attended,
            position_ids=self._attended.sum(dim=1, keepdim=True) - 1,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._logits = out.logits[:, -1]

    def _check(self) -> None:
        """Raise `ConfigError` unless a token after prompts of different lengths gets the logits of plain passes."""
        import torch

        check_evaluating(self.model)
        name = type(self.model).__name__
        if odd := odd_layers(self.model):
            raise ConfigError(f"{name} has layers without full attention ({odd}){ELSEWHERE}")
        ids = [token % self.model.config.get_text_config(decoder=True).vocab_size for token in range(1, 6)]
        texts = ids[:5], ids[:2]
        try:
            with torch.no_grad():
                plain = [self.model(torch.tensor([text], device=self.model.device)).logits[0, -1] for text in texts]
                self._begin([(text[:-1], [Row(np.empty(0))]) for text in texts])
                self._forward([text[-1] for text in texts])
        except Exception as error:  # a model that takes no padding or position can raise any exception
            raise ConfigError(f"{name} cannot draw for several prompts: {first_line(error)}{ELSEWHERE}") from error
        expected, found = torch.stack(plain).float(), self._logits.float()
        self._keep([])
        if not expected.isfinite().all():
            raise ConfigError(NO_POLICY)
        gap = float((found - expected).abs().max() / (1 + expected.abs().max()))
        if not gap <= torch.finfo(self.model.dtype).eps ** 0.5:
            raise ConfigError(f"{name} gives other logits beside another prompt (relative gap {gap:.1e}){ELSEWHERE}")
