"""The states of a frozen model at every token of prompts and their responses, computed once and kept on disk.

A shard is a safetensors file with the states (tokens, S) of some consecutive prompts, and of all their responses. Needs
the ``train`` extra.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infalign.errors import ConfigError
from infalign.models.guided import read_states
from infalign.models.packed import Packed, packed_batches, packing, packs
from infalign.progress import OnProgress
from infalign.sequences import Lazy
from infalign.storage import atomic_path, unwritable

SHARD = 16  # prompts
BATCH_TOKENS = 4096  # tokens per forward pass, which keeps the states of all layers
OPEN = 64  # shards at a time; their content is read on access

TokenLists = Sequence[Sequence[int]]


def write_states(
    model: Any, layers: Sequence[int], prompts: TokenLists, responses: TokenLists, folder: Path, on_progress: OnProgress
) -> None:
    """Write the states of a causal language model after these ``layers`` for prompts and their responses, K each.

    Shards that are there are kept. Raises ConfigError for a model that cannot be packed, and for too small a disk.
    """
    k, width = len(responses) // len(prompts), len(layers) * model.config.hidden_size
    if not packs(model):
        raise ConfigError("the reference has layers without full attention, so that no guide can read its states")
    tokens = sum(map(len, prompts)) + sum(map(len, responses))
    needed = tokens * width * model.dtype.itemsize - sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    if needed > (free := disk_usage(folder).free):
        raise ConfigError(
            f"the states of the reference need {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left; free "
            "some, or have each pass compute them anew: guide.side.stored false, or lora without layers"
        )
    with torch.inference_mode(), packing(model):
        for start in range(0, len(prompts), SHARD):
            path = _shard(folder, start)
            if not path.exists():
                asked = [prompt for prompt in prompts[start : start + SHARD] for _ in range(k)]
                given = responses[k * start : k * start + len(asked)]
                found = _states(model, layers, asked, given, k)
                try:
                    with atomic_path(path) as unfinished:
                        save_file(found, unfinished)
                except SafetensorError as error:
                    raise unwritable(path, str(error)) from error
            on_progress(k * min(start + SHARD, len(prompts)), len(responses), "states")


def stored_states(prompts: TokenLists, responses: TokenLists, folder: Path) -> Lazy[tuple[Tensor, Tensor]]:
    """Return the states of each response's prompt and of the response itself, read from their shard on access."""
    k = len(responses) // len(prompts)
    ends = {
        name: [list(accumulate(map(len, rows[i : i + size]), initial=0)) for i in range(0, len(rows), size)]
        for name, rows, size in (("prompts", prompts, SHARD), ("responses", responses, k * SHARD))
    }
    opened: Any = lru_cache(OPEN)(lambda shard: safe_open(_shard(folder, SHARD * shard), "pt"))

    def read(name: str, shard: int, place: int) -> Tensor:
        begin, end = ends[name][shard][place : place + 2]
        found: Tensor = opened(shard).get_slice(name)[begin:end]
        return found

    def of(row: int) -> tuple[Tensor, Tensor]:
        shard, place = divmod(row, k * SHARD)
        return read("prompts", shard, place // k), read("responses", shard, place)

    return Lazy(len(responses), of)


def _states(model: Any, layers: Sequence[int], prompts: TokenLists, responses: TokenLists, k: int) -> dict[str, Tensor]:
    """Return the states of the prompts, each once, and of their K responses."""
    of_prompts: dict[tuple[int, ...], Tensor] = {}
    of_responses: list[Tensor] = []
    for rows, packed in packed_batches(prompts, responses, BATCH_TOKENS, model, logits=False):
        states = states_of(model, packed, layers)[0].cpu()
        first, responded = states.tensor_split([int(packed.prompt_lengths.sum())])
        lengths = packed.prompt_lengths.tolist()
        distinct = dict.fromkeys(tuple(prompt) for prompt in prompts[rows])
        of_prompts |= zip(distinct, torch.split(first, lengths), strict=True)
        of_responses.append(responded)
    asked = [of_prompts[tuple(prompt)] for prompt in prompts[::k]]
    return {"prompts": torch.cat(asked), "responses": torch.cat(of_responses)}


def states_of(model: Any, packed: Packed, layers: Sequence[int]) -> Tensor:
    """Return the states after these layers at each token, (1, N, S), of a model inside `packing`; 0: its embeddings."""
    found = model.base_model(
        input_ids=packed.tokens[None],
        position_ids=packed.positions,
        use_cache=False,
        output_hidden_states=True,
        packed=packed,
    )
    return read_states(found, layers)


def _shard(folder: Path, first: int) -> Path:
    return folder / f"from-{first}.safetensors"
