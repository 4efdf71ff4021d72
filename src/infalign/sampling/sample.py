"""K responses of a model to each of some prompts: the call, and the value that it returns."""

import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, Unpack

import pyarrow as pa

from infalign.core.errors import ConfigError, DataError
from infalign.core.progress import progress_line
from infalign.core.settings import explained
from infalign.core.storage import column_values, read_table, write_table
from infalign.data.examples import parse_example, to_table
from infalign.data.messages import prompts_of
from infalign.data.parquet import without_nulls
from infalign.models.conversations import prompt_ids
from infalign.models.policy import AnyModel, Policy, identity
from infalign.models.settings import Compute
from infalign.models.tokenizers import load_tokenizer
from infalign.sampling.prompts import Prompts, Sampler
from infalign.sampling.rollouts import read_rollouts, shard_path
from infalign.sampling.settings import KINDS, Drawing, DrawingOptions
from infalign.sampling.shared_prefix import ALTERNATIVES, SharedPrefixError

PROMPTS = "prompts.parquet"  # in a folder of rollouts, beside their shards
DRAWN_WITH = b"infalign"  # key in its schema: K, the model and the settings, as JSON

AnyPrompts = Iterable[Any]
"""Texts, conversations (lists of messages), or rows with a column ``prompt``, such as those of a ``Dataset``."""


@dataclass(frozen=True, eq=False, repr=False)
class Rollouts:
    """K responses of a model to each of P prompts, as two Arrow tables.

    ``asked`` has of each prompt prompt_id, prompt (messages), columns (the others of its row, as JSON) and token_ids;
    ``drawn`` of each response, prompt by prompt, prompt_id, index, token_ids, text, finish (``stop`` or ``length``)
    and logprob, Σ log π_ref, NaN where the engine gives none.

    >>> rollouts = sample(MODEL, ["How are you?", "Where is Oslo?"], k=4, max_new_tokens=8)
    >>> rollouts.save("rollouts")
    >>> Rollouts.load("rollouts").texts == rollouts.texts, np.shape(rollouts.texts)
    (True, (2, 4))
    """

    asked: pa.Table
    drawn: pa.Table

    def __repr__(self) -> str:
        cut_off = column_values(self.drawn, "finish").count("length") / self.drawn.num_rows
        return f"Rollouts({self.asked.num_rows:,} prompts × {self.k} responses, {100 * cut_off:.0f} % cut off)"

    @property
    def k(self) -> int:
        """How many responses each prompt has."""
        return self.drawn.num_rows // self.asked.num_rows

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts."""
        return Prompts.of(self.asked)

    @property
    def texts(self) -> list[list[str]]:
        """The texts of the responses, P × K."""
        texts = column_values(self.drawn, "text")
        return [texts[start : start + self.k] for start in range(0, len(texts), self.k)]

    def save(self, folder: str | Path) -> None:
        """Write the rollouts into a folder that is new or empty."""
        check_folder(Path(folder))
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_table(Path(folder) / PROMPTS, self.asked)
        write_table(shard_path(Path(folder), 0), self.drawn)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read what `save`, or `sample` with a ``folder``, wrote. Raises DataError for what is missing or damaged."""
        asked = read_table(Path(folder) / PROMPTS)
        if DRAWN_WITH not in (metadata := asked.schema.metadata or {}):
            raise DataError(f"{folder}/{PROMPTS} does not say how its rollouts were drawn; sample them again")
        k = json.loads(metadata[DRAWN_WITH])["k"]
        return cls(asked, read_rollouts(Path(folder), column_values(asked, "prompt_id"), k))


def sample(
    model: AnyModel,
    prompts: AnyPrompts,
    k: int = 32,
    *,
    seed: int = 0,
    folder: str | Path | None = None,
    **drawing: Unpack[DrawingOptions],
) -> Rollouts:
    """Draw ``k`` responses to each prompt, at temperature 1 without truncation.

    ``model`` is a folder, a hub id, a loaded transformers model or ``(model, tokenizer)``. ``prompts`` are texts (one
    turn of the user), lists of messages, or rows with a column ``prompt``, whose other columns reach a reward. A
    response depends on ``seed``, its prompt and its number alone. ``drawing`` are ``max_new_tokens``, 64 by default,
    and ``engine``: the URL of an OpenAI-compatible server, such as vLLM, or the settings of a recipe's
    ``rollout.engine``; by default the model draws in this process, with a warning if that is slow. A ``folder`` keeps
    responses as they come: the same call continues after a stop, and a larger ``k`` or more prompts add to it.

    Raises ConfigError for a model that cannot be sampled, as a loaded one by a server, and a folder with anything else,
    DataError for a prompt that occurs twice, that the chat template cannot render or that the model has no room for.

    >>> sample(MODEL, [{"prompt": "What is 2 + 2?", "answer": "4"}], k=2, max_new_tokens=8).prompts.columns
    ['{"answer": "4"}']
    """
    if k < 1:
        raise ConfigError(f"k must be at least 1, found {k}")
    settings = read_drawing(drawing)
    engine, longest = settings.engine, settings.max_new_tokens
    name = model[0] if isinstance(model, tuple) else model
    if not engine.is_local and not isinstance(name, str | Path):
        raise ConfigError(
            "a server draws with the weights that it has loaded; instead of a loaded model give the folder or hub id "
            "that it serves"
        )
    source: Any = Policy.of(model) if engine.is_local else str(name)
    given = source if engine.is_local else model
    tokenizer, asked = given[1] if isinstance(given, tuple) else load_tokenizer(source), read_prompts(prompts)
    tools = [json.loads(columns).get("tools") for columns in column_values(asked, "columns")]
    ids = prompt_ids(tokenizer, prompts_of(asked), tools)
    asked = asked.append_column("token_ids", pa.array(ids, pa.list_(pa.int32())))
    drawn_with: dict[str, Any] = {"max_new_tokens": longest, "seed": seed, "engine": engine.model_dump()}
    with (
        nullcontext(folder) if folder is not None else TemporaryDirectory() as place,
        progress_line("sample") as report,
    ):
        path = Path(place)
        if folder is not None:
            drawn_with["model"] = identity(model)
            check_folder(path, drawn_with)
            check_tokens(path, asked)
        path.mkdir(parents=True, exist_ok=True)
        about = json.dumps({"k": k, "drawn_with": drawn_with})
        write_table(path / PROMPTS, asked.replace_schema_metadata({DRAWN_WITH: about}))
        sampler = Sampler(source, engine, longest, Compute())
        draw = partial(Sampler.draw, prompts=Prompts.of(asked), k=k, folder=path, seed=seed, on_progress=report)
        try:
            draw(sampler)
        except SharedPrefixError as error:
            if "engine" in drawing:
                raise
            why = str(error).removesuffix(ALTERNATIVES)
            warnings.warn(f"{why}; responses are drawn with transformers' generate, which is slower", stacklevel=2)
            draw(replace(sampler, engine=KINDS["transformers"](kind="transformers")))
        return Rollouts.load(path)


def read_drawing(drawing: Mapping[str, Any]) -> Drawing:
    """Return the settings of `sample`, where a URL is that of a server. Raises ConfigError for what is none."""
    engine = drawing.get("engine")
    server = {"engine": {"kind": "server", "url": engine}} if isinstance(engine, str) else {}
    with explained("sample"):
        return Drawing.model_validate({**drawing, **server})


def read_prompts(prompts: AnyPrompts) -> pa.Table:
    """Return prompts as the table `Rollouts.asked`, without token ids. Raises DataError for what is no prompt."""
    examples = [parse_example(row, f"prompt {place}") for place, row in enumerate(prompt_rows(prompts))]
    if not examples:
        raise DataError("there are no prompts; give at least one")
    table = to_table(examples).select(["prompt", "columns"])
    return table.add_column(0, "prompt_id", pa.array([e.prompt_id for e in examples], pa.string()))


def prompt_rows(prompts: AnyPrompts) -> list[Any]:
    """Return prompts as rows, texts and conversations as their ``prompt``. Raises DataError for what is no list."""
    if isinstance(prompts, str | Mapping) or hasattr(prompts, "iterrows"):
        raise DataError(
            "prompts are a list of texts, of conversations or of rows (of a DataFrame: to_dict('records'); of a "
            "DatasetDict: one of its splits)"
        )
    rows = (one if isinstance(one, Mapping) else {"prompt": one} for one in prompts)
    return [{name: without_nulls(value) for name, value in row.items()} for row in rows]


def check_tokens(folder: Path, asked: pa.Table) -> None:
    """Raise ConfigError if a folder has rollouts of a prompt that is rendered otherwise now."""
    columns = ("prompt_id", "token_ids")
    before = read_table(folder / PROMPTS, [*columns]).to_pydict() if (folder / PROMPTS).is_file() else {}
    known = dict(zip(*(before.get(name, ()) for name in columns), strict=True))
    if any(known.get(one, ids) != ids for one, ids in zip(*(asked[n].to_pylist() for n in columns), strict=True)):
        raise ConfigError(f"{folder} has rollouts with another chat template or other tools; choose a new folder")


def check_folder(folder: Path, drawn_with: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError unless a folder is new or empty, or holds rollouts that were ``drawn_with`` the same."""
    if drawn_with is not None and (folder / PROMPTS).is_file():
        metadata = read_table(folder / PROMPTS, []).schema.metadata or {}
        before = json.loads(metadata.get(DRAWN_WITH, b"{}")).get("drawn_with", {})
        if other := next((name for name, value in drawn_with.items() if before.get(name) != value), None):
            raise ConfigError(
                f"{folder} has rollouts with another {other}, {before.get(other)} instead of {drawn_with[other]}; "
                "choose a new folder"
            )
    elif folder.is_file() or (folder.is_dir() and any(not one.name.startswith(".") for one in folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder; choose a new one")
