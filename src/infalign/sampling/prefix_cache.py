"""A cache of keys and values in which the rows of a prompt share it, and the attention that reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from copy import copy
from itertools import groupby
from typing import TYPE_CHECKING, Any

from infalign.models.attention import check_plain_softmax

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX_BLOCK = 32
Layers = list[tuple["Tensor", "Tensor"]]
"""Keys and values of each layer."""


class SharedPrefixCache:
    """The KV cache: keys and values of each prompt once for all of its rows, and blocks for the rows' own tokens.

    Rows are in groups: those of neighboring prompts with equally many rows, padded on the right. Whole blocks are
    read, unused positions included: on a CPU that is 2-3 times faster than slices of one large buffer. Models call only
    ``update`` and ``get_seq_length`` of a cache.
    """

    def __init__(self) -> None:
        self.prefixes: list[Layers] = []  # per group and layer; prompts × KV heads × P × width
        self.counts: list[int] = []  # number of rows per group
        self.suffix: list[Layers] = []  # per layer and block; rows × KV heads × BLOCK × width
        self.length = 0  # number of own tokens of the row that began first
        self.begins: list[tuple[int, int]] = []  # per row: the number of its prompt's tokens, place of its first own
        self.masked: Tensor | None = None  # rows × (P + places), where a row has no token; None if all have all

    def add(self, prefix: Layers, count: int) -> None:
        """Add a prompt with this many rows, which begin now."""
        from torch.nn.functional import pad

        rows = (0, 0, 0, 0, 0, 0, 0, count)
        self.suffix = [[(pad(keys, rows), pad(values, rows)) for keys, values in blocks] for blocks in self.suffix]
        self.suffix = self.suffix or [[] for _ in prefix]
        self.begins += [(prefix[0][0].shape[2], self.length)] * count
        if self.counts and len(self.prefixes[-1][0][0]) * count == self.counts[-1]:
            pairs = zip(self.prefixes.pop(), prefix, strict=True)
            prefix = [(_stacked(ks, k), _stacked(vs, v)) for (ks, vs), (k, v) in pairs]
            count += self.counts.pop()
        self.prefixes.append(prefix)
        self.counts.append(count)
        self._mask()

    def keep(self, rows: list[int]) -> None:
        """Keep these rows only, in their order, and no block in which none of them had begun."""
        unused = min(self.begins[row][1] for row in rows) // SUFFIX_BLOCK
        groups, begin = zip(self.prefixes, self.counts, strict=True), 0
        self.prefixes, self.counts = [], []
        for layers, count in groups:
            each = count // len(layers[0][0])
            left = Counter((row - begin) // each for row in rows if begin <= row < begin + count)
            for alike, some in groupby(sorted(left), left.__getitem__):
                prompts = list(some)
                longest = max(self.begins[begin + prompt * each][0] for prompt in prompts)
                taken = prompts if len(prompts) < len(layers[0][0]) else slice(None)
                self.prefixes.append(
                    [(keys[taken, :, :longest], values[taken, :, :longest]) for keys, values in layers]
                )
                self.counts.append(alike * len(prompts))
            begin += count
        self.suffix = [[(keys[rows], values[rows]) for keys, values in blocks[unused:]] for blocks in self.suffix]
        self.begins = [(tokens, first - unused * SUFFIX_BLOCK) for tokens, first in map(self.begins.__getitem__, rows)]
        self.length -= unused * SUFFIX_BLOCK
        self._mask()

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one token to each row of a layer; `attend` reads the blocks, so only the new token is returned."""
        blocks, place = self.suffix[layer_idx], self.length % SUFFIX_BLOCK
        if place == 0:
            shape = (*key.shape[:2], SUFFIX_BLOCK)
            blocks.append((key.new_zeros(*shape, key.shape[3]), value.new_zeros(*shape, value.shape[3])))
        for block, new in zip(blocks[-1], (key, value), strict=True):
            block[:, :, place] = new[:, :, 0]
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the one being computed, of the longest row."""
        return self.longest_prompt + self.length

    @property
    def longest_prompt(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(tokens for tokens, _ in self.begins)

    def layers_of(self, part: slice) -> SharedPrefixCache:
        """Return some layers as a cache of their own, for one of the models of a guided policy."""
        cache = copy(self)
        cache.prefixes, cache.suffix = [layers[part] for layers in self.prefixes], self.suffix[part]
        return cache

    def _mask(self) -> None:
        import torch

        tokens, first = torch.tensor(self.begins, device=self.prefixes[0][0][0].device).T[..., None]
        before, own = (torch.arange(int(most.max()), device=most.device) for most in (tokens, first))
        masked = torch.cat([before >= tokens, own < first], dim=1)
        self.masked = masked[:, None, None] if masked.any() else None


def _stacked(*parts: Tensor) -> Tensor:
    import torch
    from torch.nn.functional import pad

    longest = max(part.shape[2] for part in parts)
    return torch.cat([pad(part, (0, 0, 0, longest - part.shape[2])) for part in parts])


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attend from one token per row (rows × heads × 1 × width) to the row's prompt and to its own tokens."""
    import torch
    from torch.nn.functional import pad

    check_plain_softmax(options)
    cache: SharedPrefixCache = options["shared_prefix"]
    scaling = options.get("scaling")
    prefixes = [layers[module.layer_idx] for layers in cache.prefixes]
    longest, blocks = cache.longest_prompt, cache.suffix[module.layer_idx]
    n, kv_heads, _, width = key.shape
    query = query.reshape(n, kv_heads, -1, width) * (width**-0.5 if scaling is None else scaling)
    group = query.shape[2]

    def by_group(rows: Tensor, of_groups: Iterable[Tensor]) -> list[Tensor]:
        """Return the product of each group's rows; one per head for all that share a prompt makes the engine fast."""
        products = []
        for some, count, of_group in zip(torch.split(rows, cache.counts), cache.counts, of_groups, strict=True):
            prompts, width = len(of_group), of_group.shape[2]
            heads = some[..., :width].view(prompts, -1, kv_heads, group, width).transpose(1, 2)
            product = heads.reshape(prompts, kv_heads, -1, width) @ of_group
            products.append(product.view(*heads.shape[:4], -1).transpose(1, 2).reshape(count, kv_heads, group, -1))
        return products

    to_prefixes = by_group(query, (keys.mT for keys, _ in prefixes))
    if len(prefixes) > 1:
        to_prefixes = [pad(some, (0, longest - some.shape[-1])) for some in to_prefixes]
    scores = torch.cat((torch.cat(to_prefixes), *(query @ keys.mT for keys, _ in blocks)), dim=-1)
    scores[..., longest + cache.length + 1 :] = -torch.inf  # mask the unused positions of the last block
    if cache.masked is not None:
        scores[..., : cache.masked.shape[-1]].masked_fill_(cache.masked, -torch.inf)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    to_prefix, *to_blocks = torch.split(weights, [longest] + [SUFFIX_BLOCK] * len(blocks), dim=-1)
    out = torch.cat(by_group(to_prefix, (values for _, values in prefixes)))
    for to_block, (_, values) in zip(to_blocks, blocks, strict=True):
        out = out + to_block @ values
    return out.reshape(n, 1, kv_heads * group, -1), None
