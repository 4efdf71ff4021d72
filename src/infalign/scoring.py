"""Reward sources: a transformers classifier, any Python function or a server; rewards are checked and kept here.

`RemoteReward` needs the ``serve`` extra.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from infalign.calibration import Array
from infalign.config import is_hub_id
from infalign.data import MESSAGES, Message, prompt_id, read_table, write_table
from infalign.errors import ConfigError, DataError, PartialError
from infalign.likelihood import length_batches, right_padded
from infalign.pretrained import conversation_ids, why_unloadable
from infalign.remote import may_pass, post, quoted
from infalign.reward import ask, not_a_number

if TYPE_CHECKING:
    import httpx2
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONNECT_SECONDS = 10.0
CHECKED_AGAIN = 4  # stored rewards that a server must still give
ROUNDING = 1e-4  # of the largest of them
MADE_BY = b"reward"  # in the schema of a shard: what gave its rewards


class RewardFunction(Protocol):
    """Gives each response to its prompt a finite number; higher is better."""

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> Sequence[float]:
        """Return one reward for each row, in the order of the rows."""


class ClassifierReward:
    """The output of a transformers sequence classifier with one output, read as TRL's ``RewardTrainer`` trains it.

    The conversation and the response, as an assistant turn, are rendered with the tokenizer's chat template.
    ``batch_tokens`` bounds the padded tokens of a forward pass. No row is cut: one longer than ``max_length`` or than
    the model's context is a DataError. The reward of a row does not depend on the rows that it is scored with.

    If the model's configuration names no padding token, the tokenizer's padding or EOS token is written into it, since
    the classifier reads its output at the last token that is not padding.
    Raises ConfigError if the model has several outputs or the tokenizer has no chat template, padding or EOS token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int = 16384,
        max_length: int | None = None,
    ) -> None:
        name = model.config.name_or_path or type(model).__name__
        config = model.config.get_text_config()
        if model.config.num_labels != 1:
            raise ConfigError(f"{name} has {model.config.num_labels} outputs; a reward model has one (num_labels=1)")
        if tokenizer.chat_template is None:
            raise ConfigError(f"the tokenizer of {name} has no chat template; save it with the one used in training")
        if config.pad_token_id is None:
            config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if config.pad_token_id is None:
            raise ConfigError(f"the tokenizer of {name} has neither a padding nor an EOS token; set its pad_token")
        limits = (max_length, getattr(config, "max_position_embeddings", None))
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.max_length = min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_tokens: int = 16384,
        max_length: int | None = None,
    ) -> ClassifierReward:
        """Load a model folder, or a model of the hub, with safetensors weights and a tokenizer; its code is never run.

        Raises ConfigError if the folder is missing or unreadable, or if any weight is absent from the checkpoint: the
        head of a language model that is no classifier would be random.
        """
        from safetensors import SafetensorError
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        if not Path(path).is_dir() and not is_hub_id(str(path)):
            raise ConfigError(f"reward model {path}: there is no such folder")
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(
                f"reward model {path} cannot be loaded as safetensors without own code: {why_unloadable(error)}"
            ) from error
        if found["missing_keys"]:
            raise ConfigError(
                f"reward model {path} is no trained classifier: {', '.join(sorted(found['missing_keys']))} is not in "
                "the checkpoint and would be random; train it first, for example with TRL's RewardTrainer"
            )
        return cls(model.to(device), tokenizer, batch_tokens=batch_tokens, max_length=max_length)

    def tokenize(self, prompts: list[list[Message]], responses: list[str]) -> list[list[int]]:
        """Return the token ids of each conversation with its response, the same as the reward was trained on.

        Special tokens that a prompt or a response spells are text (`pretrained.conversation_ids`).
        """
        return [
            conversation_ids(
                self.tokenizer, [*prompt, {"role": "assistant", "content": response}], add_generation_prompt=False
            )
            for prompt, response in zip(prompts, responses, strict=True)
        ]

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row, computed in the model's precision; DataError if a row is too long."""
        import torch

        token_ids = self.tokenize(prompts, responses)
        for prompt, ids in zip(prompts, token_ids, strict=True):
            if self.max_length is not None and len(ids) > self.max_length:
                raise DataError(
                    f"prompt {prompt_id(prompt)}: the conversation with its response has {len(ids)} tokens and the "
                    f"reward model reads {self.max_length}; drop the prompt or generate shorter responses"
                )
        pad_id = self.model.config.get_text_config().pad_token_id
        self.model.eval()
        # Each text once: rounding depends on the batch, and equal texts must tie.
        distinct = list({tuple(ids): ids for ids in token_ids}.values())
        rewards: dict[tuple[int, ...], float] = {}
        for rows in length_batches([len(ids) for ids in distinct], self.batch_tokens):
            # Always padded on the right, whatever the tokenizer's side: so positions are those of the row alone.
            input_ids = right_padded([distinct[row] for row in rows], pad_id, self.model.device)
            attention_mask = right_padded([[1] * len(distinct[row]) for row in rows], 0, self.model.device)
            with torch.inference_mode():
                logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
            for row, reward in zip(rows, logits.squeeze(-1).float().tolist(), strict=True):
                rewards[tuple(distinct[row])] = reward
        return [rewards[tuple(ids)] for ids in token_ids]


def function_reward(spec: str) -> RewardFunction:
    """Import the reward function that ``spec`` names as ``package.module:function``; its module's code runs.

    Raises ConfigError that says what is missing: the colon, the module or the function.
    """
    module_name, _, function_name = spec.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), function_name]):
        raise ConfigError(f"reward function {spec!r}: write it as package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"reward function {spec!r}: cannot import {module_name} ({error}); install it or put it on PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"reward function {spec!r}: {module_name} has no function {function_name}")
    return cast(RewardFunction, function)


# Servers


@dataclass(frozen=True, slots=True)
class RemoteReward:
    """A reward model behind HTTP, with OpenRLHF's request and answer; the guide shows one of each.

    ``query`` is the prompt as ``tokenizer`` renders it for generation, and then the response; ``prompts`` is that
    without the response, and ``labels`` the prompt's id. Of the answer only ``rewards`` is read. A request holds
    ``batch`` rows and waits ``read_seconds`` for an answer; it is repeated after a broken connection, no answer, 408,
    429 and 5xx for up to ``retry_seconds``. ``api_key_env`` names the environment variable with the server's key.
    """

    url: str
    tokenizer: PreTrainedTokenizerBase
    api_key_env: str | None = None
    batch: int = 64
    read_seconds: float = 120.0
    retry_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.api_key_env is not None and not self._key:
            raise ConfigError(f"the environment variable {self.api_key_env}, which should hold the API key, is not set")

    @property
    def _key(self) -> str:
        return os.environ.get(self.api_key_env, "") if self.api_key_env else ""

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row, as the server gave it.

        Raises ConfigError if the server refuses a request, PartialError if it stays away, and DataError naming batch
        and row for an answer that does not hold one finite number for each row.
        """
        import httpx2

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = httpx2.Timeout(self.read_seconds, connect=CONNECT_SECONDS)
        rewards: list[float] = []
        with httpx2.Client(headers=headers, timeout=timeout) as client:
            for start in range(0, len(responses), self.batch):
                rows = slice(start, min(start + self.batch, len(responses)))
                rewards += self._ask(client, prompts[rows], responses[rows], start)
        return rewards

    def _ask(
        self, client: httpx2.Client, prompts: list[list[Message]], responses: list[str], first: int
    ) -> list[float]:
        """Return the rewards of one batch, which starts at row ``first``."""
        import httpx2

        name = f"{self.url} (batch {first // self.batch + 1})"
        rendered = [
            str(self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
            for prompt in prompts
        ]
        body = {
            "query": [prompt + response for prompt, response in zip(rendered, responses, strict=True)],
            "prompts": rendered,
            "labels": [prompt_id(prompt) for prompt in prompts],
        }
        try:
            answer = post(client, self.url, body, retry_seconds=self.retry_seconds)
        except httpx2.HTTPError as error:
            if isinstance(error, httpx2.HTTPStatusError):
                said = f"status {error.response.status_code}: {self._shown(error.response.text)}"
            else:
                said = f"{type(error).__name__}: {self._shown(str(error))}"
            if not may_pass(error):
                raise ConfigError(f"reward {name}: the server refused the request with {said}") from error
            raise PartialError(
                f"reward {name}: no rewards within {self.retry_seconds:.0f} s for rows {first} to "
                f"{first + len(responses) - 1} (first prompt {body['labels'][0]}), the last answer was {said}; the "
                "scores so far are kept, so start the server and run the same command again"
            ) from error
        try:
            rewards = json.loads(answer.content, parse_int=float)["rewards"]  # an integer can exceed every float
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"reward {name}: the answer is no JSON object with `rewards`, it begins {self._shown(answer.text)!r}"
            ) from error
        return _checked(rewards, prompts, first=first, name=name)

    def _shown(self, text: str) -> str:
        return quoted(text, self._key)


# Scoring


def score(
    reward: RewardFunction,
    prompts: list[list[Message]],
    responses: list[str],
    *,
    name: str,
    chunk: int = 4096,
    on_progress: Callable[[int], None] | None = None,
) -> Array:
    """Return the rewards of all rows, shape (rows,), asking for ``chunk`` rows at a time.

    ``on_progress`` is called after each chunk with the number of rows scored so far.

    Raises DataError that names the reward source (``name``), the row, counted from 0, and its prompt, if a reward is
    not a finite number (nothing is converted: True and "1" are errors), or if a chunk has the wrong number of rewards,
    and InfalignError if the reward raises an exception of its own.
    """
    if len(prompts) != len(responses):
        raise DataError(f"reward {name}: {len(prompts)} prompts do not go with {len(responses)} responses")
    rewards = np.empty(len(responses))
    for start in range(0, len(responses), chunk):
        rows = slice(start, min(start + chunk, len(responses)))
        asked = f"reward {name}, asked for rows {start} to {rows.stop - 1} (first prompt {prompt_id(prompts[start])}),"
        given = ask(reward, prompts[rows], responses[rows], name=asked)
        rewards[rows] = _checked(given, prompts[rows], first=start, name=name)
        if on_progress is not None:
            on_progress(rows.stop)
    return rewards


def _checked(values: Any, prompts: list[list[Message]], *, first: int, name: str) -> list[float]:
    """Return ``values`` if they are one finite number for each of ``prompts``, whose rows count from ``first``."""
    if not hasattr(values, "__len__") or len(values) != len(prompts):
        found = f"{len(values)} rewards" if hasattr(values, "__len__") else type(values).__name__
        raise DataError(
            f"reward {name}: returned {found} for the {len(prompts)} responses of rows {first} to "
            f"{first + len(prompts) - 1} (first prompt {prompt_id(prompts[0])}); return a list with one number each"
        )
    for row, (value, prompt) in enumerate(zip(values, prompts, strict=True), first):
        if problem := _problem(value):
            raise DataError(f"reward {name}, row {row} (prompt {prompt_id(prompt)}): {problem}")
    return list(values)


def _problem(value: object) -> str | None:
    """Return why ``value`` is no reward, and what to do; None if it is one."""
    if problem := not_a_number(value):
        return problem
    try:
        found = float(cast(float, value))
    except OverflowError:  # of an integer
        found = math.inf
    if not math.isfinite(found):
        return f"found {found}; a rank needs finite rewards, so mend the reward or drop the row"
    return None


# Storage


def score_to(
    directory: Path,
    reward: RewardFunction,
    prompts: Sequence[list[Message]],
    responses: Sequence[str],
    *,
    name: str,
    made_by: str,
    shard_responses: int = 512,
    on_progress: Callable[[int, int], None],
) -> Array:
    """Return the rewards of all rows, shape (rows,), and keep them in ``directory``/part-00000.parquet, ….

    Only what no shard has is asked for, and equal responses to one prompt are one: a run that was stopped continues,
    rows can be added, and equal responses tie. A shard holds the distinct responses to as many prompts as have
    ``shard_responses`` together, or to one, and is written whole or not at all. Shards that were not made by
    ``made_by`` are removed. Calls ``on_progress(done, all)`` with numbers of distinct responses. Raises as `score`
    does; rows then count from the start of the shard. Besides numbers only the responses to a few prompts are held.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shards = sorted(directory.glob("part-[0-9]*.parquet"))
    kept = [shard for shard in shards if _made_by(read_table(shard, [])) == made_by]
    for shard in set(shards).difference(kept):
        shard.unlink()
    stored, rows_of = _stored(kept), _rows_by_prompt(prompts)
    first = 1 + int(kept[-1].stem.removeprefix("part-")) if kept else 0
    rewards, total, done = np.full(len(responses), np.nan), 0, 0
    for identity, rows in rows_of.items():
        texts, known = [responses[row] for row in rows], stored(identity)
        rewards[rows] = [known.get(text, np.nan) for text in texts]
        total += len(set(texts))
        done += len(known.keys() & texts)
    on_progress(done, total)
    missing = (
        (identity, {row: responses[row] for row in rows[np.isnan(rewards[rows])]}) for identity, rows in rows_of.items()
    )
    for number, chosen in enumerate(_filled(missing, shard_responses), first):
        asked = [(identity, prompts[min(by_row)], text) for identity, by_row in chosen for text in _distinct(by_row)]
        ids, conversations, said = map(list, zip(*asked, strict=True))
        given = score(reward, conversations, said, name=name)
        columns = {
            "prompt_id": pa.array(ids, pa.string()),
            "prompt": pa.array(conversations, MESSAGES),
            "response": pa.array(said, pa.string()),
            "reward": pa.array(given, pa.float64()),
        }
        write_table(directory / f"part-{number:05d}.parquet", pa.table(columns, metadata={MADE_BY: made_by.encode()}))
        new = dict(zip(zip(ids, said, strict=True), given, strict=True))
        for identity, by_row in chosen:
            rewards[list(by_row)] = [new[identity, text] for text in by_row.values()]
        done += len(said)
        on_progress(done, total)
    return rewards


ByRow = dict[int, str]  # responses to one prompt, by row


def _filled(missing: Iterable[tuple[str, ByRow]], responses: int) -> Iterator[list[tuple[str, ByRow]]]:
    """Yield prompts with the responses to them that are missing: as many as go into one shard."""
    shard: list[tuple[str, ByRow]] = []
    filled = 0
    for identity, by_row in missing:
        if shard and filled + len(_distinct(by_row)) > responses:
            yield shard
            shard, filled = [], 0
        if by_row:
            shard.append((identity, by_row))
            filled += len(_distinct(by_row))
    if shard:
        yield shard


def _distinct(by_row: ByRow) -> list[str]:
    return list(dict.fromkeys(by_row.values()))


def _rows_by_prompt(prompts: Sequence[list[Message]]) -> dict[str, NDArray[np.intp]]:
    """Return the rows of each prompt, by its id."""
    numbers: dict[str, int] = {}
    prompt_R, before = np.empty(len(prompts), np.intp), None
    for row, prompt in enumerate(prompts):
        if prompt is not before:  # a row as a rule has the prompt of the row before it
            number, before = numbers.setdefault(prompt_id(prompt), len(numbers)), prompt
        prompt_R[row] = number
    ends = np.cumsum(np.bincount(prompt_R))
    return dict(zip(numbers, np.split(np.argsort(prompt_R, kind="stable"), ends[:-1]), strict=True))


def _stored(shards: list[Path]) -> Callable[[str], dict[str, float]]:
    """Return a function that gives the stored rewards of a prompt, by response; few shards are held at a time."""
    shards_of: dict[str, list[Path]] = {}
    for shard in shards:
        for identity in dict.fromkeys(_listed(read_table(shard, ["prompt_id"]), "prompt_id")):
            shards_of.setdefault(identity, []).append(shard)

    @lru_cache(maxsize=4)
    def rewards(shard: Path) -> dict[str, dict[str, float]]:
        found = defaultdict[str, dict[str, float]](dict)
        table = read_table(shard, ["prompt_id", "response", "reward"])
        columns = (_listed(table, column) for column in ("prompt_id", "response", "reward"))
        for identity, text, reward in zip(*columns, strict=True):
            found[identity][text] = reward
        return found

    return lambda identity: {
        text: reward for shard in shards_of.get(identity, ()) for text, reward in rewards(shard)[identity].items()
    }


def check_unchanged(reward: RewardFunction, shards: Iterable[Path], *, name: str, made_by: str) -> None:
    """Raise DataError unless ``reward`` still gives what the first of ``shards`` by ``made_by`` has: its first 4 rows.

    A difference up to 1e-4 of the largest of these rewards is rounding. Where there is no such shard, nothing is asked.
    """
    for shard in shards:
        table = read_table(shard)
        if _made_by(table) != made_by:
            continue
        first = table.slice(0, CHECKED_AGAIN)
        prompts, texts, before = (_listed(first, column) for column in ("prompt", "response", "reward"))
        now = score(reward, prompts, texts, name=name)
        gaps = np.abs(now - before)
        if gaps.max() > ROUNDING * np.abs(before).max():
            worst = int(gaps.argmax())
            raise DataError(
                f"reward {name}: {made_by} now gives {now[worst]:g} where it gave {before[worst]:g} ({shard}, row "
                f"{worst}, prompt {prompt_id(prompts[worst])}), so it is not the reward that scored before; bring "
                "that one back (a function must always give the same), or score everything anew under another name, "
                "such as a url with ?revision=2"
            )
        return


def _listed(table: pa.Table, column: str) -> list[Any]:
    return table[column].to_pylist()


def _made_by(table: pa.Table) -> str:
    return (table.schema.metadata or {}).get(MADE_BY, b"").decode()
