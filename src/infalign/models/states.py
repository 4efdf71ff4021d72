"""The states of a frozen model at every token of prompts and their responses, computed once and kept on disk.

A shard is a safetensors file with the states (tokens, S) of some consecutive prompts, and of all their responses, and
what the model says of its likeliest tokens there, for who asks for these. Needs the ``train`` extra.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.core.sequences import Lazy
from infalign.core.storage import atomic_path, unwritable
from infalign.models.guided import read_states
from infalign.models.likely import Likely
from infalign.models.packed import Packed, Stored, packed_batches, packing, packs
from infalign.models.vocabulary import Logits

SHARD = 16  # prompts
BATCH_TOKENS = 4096  # tokens per forward pass, which keeps the states of all layers

TokenLists = Sequence[Sequence[int]]


def write_states(
    model: Any,
    layers: Sequence[int],
    prompts: TokenLists,
    responses: TokenLists,
    folder: Path,
    on_progress: OnProgress,
    *,
    likely: int = 0,
    others: Mapping[Path, Sequence[int]] | None = None,
) -> None:
    """Write the states of a causal language model after these ``layers`` for prompts and their responses, K each.

    With so many ``likely`` tokens at each token of the responses, if given; the last layer is then one of ``layers``.
    Shards that are there are kept, and without ``likely`` tokens they are copied from ``others``: folders of the same
    texts, with their layers. Raises ConfigError for a model that cannot be packed, and for too small a disk.
    """
    k, width = len(responses) // len(prompts), len(layers) * model.config.hidden_size
    if not packs(model):
        raise ConfigError("the reference has layers without full attention, so that no guide can read its states")
    responded = sum(map(len, responses))
    tokens = sum(map(len, prompts)) + responded
    needed = tokens * width * model.dtype.itemsize + 8 * responded * likely
    needed -= sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    if needed > (free := disk_usage(folder).free):
        raise ConfigError(
            f"the states of the reference need {needed / 1e9:.1f} GB, and {folder} has {free / 1e9:.1f} GB left; free "
            "some, or have each pass compute them anew: guide.side.stored false, a guide without likely, or lora "
            "without layers"
        )
    with torch.inference_mode(), packing(model):
        for start in range(0, len(prompts), SHARD):
            path = _shard(folder, start)
            if not path.exists():
                found = None if likely else _copied(layers, start, others or {})
                if found is None:
                    asked = [prompt for prompt in prompts[start : start + SHARD] for _ in range(k)]
                    given = responses[k * start : k * start + len(asked)]
                    found = _states(model, layers, asked, given, k, likely)
                try:
                    with atomic_path(path) as unfinished:
                        save_file(found, unfinished)
                except SafetensorError as error:
                    raise unwritable(path, str(error)) from error
            on_progress(k * min(start + SHARD, len(prompts)), len(responses), "states")


def stored_states(prompts: TokenLists, responses: TokenLists, folder: Path, *, likely: bool = False) -> Lazy[Stored]:
    """Return what is stored of each response, if asked with the ``likely`` tokens, read from its shard on access.

    One shard is mapped at a time: mapped pages count as the process's memory for as long as their file is open.
    """
    k = len(responses) // len(prompts)
    ends = {
        name: [list(accumulate(map(len, rows[i : i + size]), initial=0)) for i in range(0, len(rows), size)]
        for name, rows, size in (("prompts", prompts, SHARD), ("responses", responses, k * SHARD))
    }
    parts = Likely._fields if likely else ()
    opened: Any = lru_cache(1)(lambda shard: safe_open(_shard(folder, SHARD * shard), "pt"))

    def read(name: str, shard: int, place: int, of: str = "responses") -> Tensor:
        begin, end = ends[of][shard][place : place + 2]
        found: Tensor = opened(shard).get_slice(name)[begin:end]
        return found

    def of(row: int) -> Stored:
        shard, place = divmod(row, k * SHARD)
        said = Likely(*(read(name, shard, place) for name in parts)) if parts else None
        return Stored(read("prompts", shard, place // k, "prompts"), read("responses", shard, place), said)

    return Lazy(len(responses), of)


def _copied(layers: Sequence[int], start: int, others: Mapping[Path, Sequence[int]]) -> dict[str, Tensor] | None:
    """Return a shard's states after these layers from a folder that has them, or None."""
    for folder, of_layers in others.items():
        if {*layers} <= {*of_layers} and (path := _shard(folder, start)).exists():
            with safe_open(path, "pt") as shard:
                found = {name: shard.get_tensor(name) for name in ("prompts", "responses")}
            columns = [of_layers.index(layer) for layer in layers]
            parts = {name: states.unflatten(-1, (len(of_layers), -1)) for name, states in found.items()}
            return {name: states[:, columns].flatten(1).contiguous() for name, states in parts.items()}
    return None


def _states(
    model: Any, layers: Sequence[int], prompts: TokenLists, responses: TokenLists, k: int, likely: int
) -> dict[str, Tensor]:
    """Return the states of the prompts, each once, and of their K responses, with the ``likely`` tokens at these."""
    of_prompts: dict[tuple[int, ...], Tensor] = {}
    of_responses, said = list[Tensor](), list[Likely]()
    for rows, packed in packed_batches(prompts, responses, BATCH_TOKENS, model, logits=False):
        found = states_of(model, packed, layers)[0]
        if likely:
            last = Logits(found[packed.before, -model.config.hidden_size :], model.get_output_embeddings())
            said.append(Likely.of_parts(last, packed.targets, likely).to("cpu"))
        states = found.cpu()
        first, responded = states.tensor_split([int(packed.prompt_lengths.sum())])
        lengths = packed.prompt_lengths.tolist()
        distinct = dict.fromkeys(tuple(prompt) for prompt in prompts[rows])
        of_prompts |= zip(distinct, torch.split(first, lengths), strict=True)
        of_responses.append(responded)
    asked = [of_prompts[tuple(prompt)] for prompt in prompts[::k]]
    likely_of = Likely.joined(said)._asdict() if said else {}
    return {"prompts": torch.cat(asked), "responses": torch.cat(of_responses)} | likely_of


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
