"""The states of a frozen model at every token of prompts and their responses, computed once and kept on disk.

A shard is a safetensors file with the states (tokens, S) of some consecutive prompts, and of all their responses, and
the model's likeliest tokens there, for who asks for these. Needs the ``train`` extra.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.core.sequences import Lazy
from infalign.core.storage import atomic_path
from infalign.models.guided import states_after
from infalign.models.logits import Logits
from infalign.models.packed import PackedBatch, StoredStates, can_pack, packed_batches, packing
from infalign.models.passes import FEW_TOKENS, TokenIds
from infalign.models.pretrained import saving
from infalign.models.top_tokens import TopTokens

PROMPTS_PER_SHARD = 16


@dataclass(frozen=True)
class StateFolder:
    """A folder of shards with a model's states after these ``layers``, and with this many ``top_tokens`` (0: none)."""

    path: Path
    layers: Sequence[int]  # with top tokens, the last one is the model's
    top_tokens: int = 0


def write_states(
    model: Any, folder: StateFolder, prompts: TokenIds, responses: TokenIds, on_progress: OnProgress
) -> None:
    """Write the states of a causal language model for prompts and their responses, K each.

    Shards that are there are kept. Raises ConfigError for a model that cannot be packed, and for too small a disk.
    """
    if not can_pack(model):
        raise ConfigError("the reference has layers without full attention, so a guide cannot read its states")
    k, responded = len(responses) // len(prompts), sum(map(len, responses))
    of_token = len(folder.layers) * model.config.hidden_size * model.dtype.itemsize
    needed = (sum(map(len, prompts)) + responded) * of_token + 8 * responded * folder.top_tokens
    needed -= sum(path.stat().st_size for path in folder.path.glob("*.safetensors"))
    folder.path.mkdir(parents=True, exist_ok=True)
    if needed > (free := disk_usage(folder.path).free):
        raise ConfigError(
            f"the reference's states need {needed / 1e9:.1f} GB, but {folder.path} has {free / 1e9:.1f} GB free; "
            "free some, lower guide.side.reads, or recompute them in each pass: use a guide on a trunk without "
            "top_tokens, or fit.lora without layers"
        )
    with torch.inference_mode(), packing(model):
        for first in range(0, len(prompts), PROMPTS_PER_SHARD):
            path = _shard(folder.path, first)
            if not path.exists():
                asked = prompts[first : first + PROMPTS_PER_SHARD]
                tensors = _compute(model, folder, asked, responses[k * first : k * (first + len(asked))])
                with saving(path), atomic_path(path) as unfinished:
                    save_file(tensors, unfinished)
            on_progress(k * min(first + PROMPTS_PER_SHARD, len(prompts)), len(responses), "states")


def stored_states(
    prompts: TokenIds, responses: TokenIds, folder: Path, *, top_tokens: bool = False
) -> Lazy[StoredStates]:
    """Return what is stored of each response, if asked with the ``top_tokens``, read from its shard on access.

    One shard is mapped at a time: mapped pages count as the process's memory for as long as their file is open.
    """
    k = len(responses) // len(prompts)

    def ends_of(rows: TokenIds, size: int) -> list[list[int]]:
        return [list(accumulate(map(len, rows[i : i + size]), initial=0)) for i in range(0, len(rows), size)]

    ends = {"prompts": ends_of(prompts, PROMPTS_PER_SHARD), "responses": ends_of(responses, k * PROMPTS_PER_SHARD)}
    opened: Any = lru_cache(1)(lambda shard: safe_open(_shard(folder, PROMPTS_PER_SHARD * shard), "pt"))

    def read(name: str, shard: int, row: int, texts: str = "responses") -> Tensor:
        begin, end = ends[texts][shard][row : row + 2]
        return opened(shard).get_slice(name)[begin:end]

    def states_of(response: int) -> StoredStates:
        shard, row = divmod(response, k * PROMPTS_PER_SHARD)
        top = TopTokens(*(read(name, shard, row) for name in TopTokens._fields)) if top_tokens else None
        return StoredStates(read("prompts", shard, row // k, "prompts"), read("responses", shard, row), top)

    return Lazy(len(responses), states_of)


def _compute(model: Any, folder: StateFolder, prompts: TokenIds, responses: TokenIds) -> dict[str, Tensor]:
    """Return the states of the prompts, each once, and of their K responses, with the top tokens at these."""
    k = len(responses) // len(prompts)
    of_prompts: dict[tuple[int, ...], Tensor] = {}
    of_responses, top = list[Tensor](), list[TopTokens]()
    asked = [prompt for prompt in prompts for _ in range(k)]
    for rows, batch in packed_batches(asked, responses, FEW_TOKENS, model, logits=False):
        of_batch = states_of(model, batch, folder.layers)[0]
        if folder.top_tokens:
            last = Logits(of_batch[batch.predictors, -model.config.hidden_size :], model.get_output_embeddings())
            top.append(TopTokens.of_parts(last, batch.targets, folder.top_tokens).to("cpu"))
        first, responded = of_batch.cpu().tensor_split([int(batch.prompt_lengths.sum())])
        distinct = dict.fromkeys(tuple(prompt) for prompt in asked[rows])
        of_prompts |= zip(distinct, torch.split(first, batch.prompt_lengths.tolist()), strict=True)
        of_responses.append(responded)
    states = [of_prompts[tuple(prompt)] for prompt in prompts]
    top_tokens = TopTokens.concatenated(top)._asdict() if top else {}
    return {"prompts": torch.cat(states), "responses": torch.cat(of_responses)} | top_tokens


def states_of(model: Any, batch: PackedBatch, layers: Sequence[int]) -> Tensor:
    """Return the states after these layers at each token, (1, N, S), of a model inside `packing`; 0: its embeddings."""
    return states_after(batch.run(model.base_model, output_hidden_states=True), layers)


def _shard(folder: Path, first_prompt: int) -> Path:
    return folder / f"from-{first_prompt}.safetensors"
