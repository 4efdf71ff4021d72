"""Samples from the logs of other tools: a reader is a module, and a name in `READERS`.

Its ``KNOWN_BY`` are names in the first object of a file, columns, or an ending, by which it knows a log, and its
``read(path, score, note)`` yields the samples with the named score, and notes what it assumes.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infalign.core.errors import ConfigError, DataError, InfalignError, first_line
from infalign.data.files import READERS as FORMATS
from infalign.data.files import read_rows
from infalign.evaluation.reward_tables import Labels, RewardTable, joined
from infalign.evaluation.table_files import Reading, checked_table, read_reward_table
from infalign.integrations.logs.samples import ANY, Note, Sample

READERS = ("inspect_ai", "lm_eval", "verl", "trl", "verifiers", "evalplus", "garak")
_MODULES = {tool: import_module(f"{__name__}.{tool}") for tool in READERS}
HEAD = 2**14  # bytes of a JSON file among which the names in its first object are looked for


@dataclass(frozen=True, slots=True)
class Log:
    """The samples of a log as a table, and one sentence for each thing that was assumed or left out.

    Columns: prompt, model, reward (null for none), sample (its number among those of its model to its prompt); where
    there is any, answer, text and error; and, as text, fields of the log with fewer values than prompts, to group by.
    """

    rows: pa.Table
    notes: tuple[str, ...]


def read_log(path: Path, *, score: str | None = None, check: Callable[..., Any] | None = None) -> Log | None:
    """Return what a file, or all files of a folder, hold if they are logs of a tool that is known, else None.

    ``score`` names one of several scorers or metrics. ``check``, a reward function as recipes take it, scores every
    text in place of the log. Raises DataError for a log that is empty, damaged, cut off or of an unknown version, for
    two runs of one model, and for logs of two tools; ConfigError for a ``score`` that is needed or unknown, and for a
    tool's package that is needed and missing.
    """
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    known = {file: tool for file in files if file.exists() and (tool := _tool(file))}
    if len(set(known.values())) > 1:
        examples = ", ".join({tool: f"{file} ({tool})" for file, tool in known.items()}.values())
        raise DataError(f"{path} has logs of several tools: {examples}; give one of them")
    if not known:
        return None
    notes: list[str] = []
    if others := [str(file.relative_to(path)) for file in files if file not in known]:
        notes.append(f"{len(others)} of the files in {path} are no logs and are ignored, such as {others[0]}")
    samples: dict[tuple[str, str, int], Sample] = {}
    before, file_of = Counter[tuple[str, str]](), dict[tuple[str, str], Path]()
    for file, tool in known.items():
        for sample in _read(tool, file, score or (ANY if check else None), notes.append):
            of = (sample.model, sample.prompt)
            key = (*of, before[of] if sample.number is None else sample.number)
            if key in samples or (sample.number is None and file_of.setdefault(of, file) != file):
                raise DataError(
                    f"{file}: sample {key[2]} of {sample.model} for prompt {sample.prompt[:80]!r} comes a second time; "
                    "these are two runs, or rows written twice: give one run"
                )
            samples[key] = sample
            before[of] += 1
    if not samples:
        raise DataError(f"{path} holds no samples; give the log of a finished run")
    logged = list(samples.values())
    rewards = [sample.reward for sample in logged] if check is None else _scored(logged, check, notes.append)
    try:
        rows = _table(logged, rewards, [number for *_, number in samples])
    except UnicodeEncodeError as error:
        raise DataError(f"{path} has a text with half a character ({first_line(error)}); write it as UTF-8") from error
    return Log(rows, tuple(dict.fromkeys(notes)))


def read_rewards(
    *paths: str | Path,
    score: str | None = None,
    check: Callable[..., Any] | None = None,
    reading: Reading | None = None,
) -> RewardTable:
    """Return the rewards in logs of other tools (`read_log`), folders of them, and tables (`read_reward_table`).

    Models of one name in several files are one model if no prompt is in two of these files; otherwise they are told
    apart by the names of the files. Raises as both readers; ConfigError for no path.

    >>> from pathlib import Path
    >>> _ = Path("samples.csv").write_text("model,prompt_id,reward\\na,p,1\\na,q,0\\nb,p,1\\nb,q,1\\n")
    >>> [(one["model"], one["mean"]) for one in measure(read_rewards("samples.csv"), ["pass@1"])]
    [('a', 0.5), ('b', 1.0)]
    """
    if not paths:
        raise ConfigError("give the path of a log, of a folder of logs or of a table")
    reading, tables = reading or Reading(), []
    for path in map(Path, paths):
        named = reading.columns and path.name.endswith(tuple(FORMATS))  # so it is a table, whatever it looks like
        log = None if named else read_log(path, score=score, check=check)
        if log is None and path.exists() and (score or check or path.is_dir()):
            only = "give the files of tables" if path.is_dir() else "a score or checker is for these only"
            raise ConfigError(f"{path} is no log of {', '.join(READERS)}; {only}")
        tables.append(read_reward_table(path, reading) if log is None else _of_log(path, log, reading))
    return joined(tables)


def _of_log(path: Path, log: Log, reading: Reading) -> RewardTable:
    rows = log.rows
    columns = {name: Labels.of(rows[name]) for name in rows.column_names if name not in ("prompt", "reward", "text")}
    rewards = np.array([math.nan if reward is None else reward for reward in rows["reward"].to_pylist()], float)
    notes = [f"{note[0].upper() if note.split()[0].isalpha() else note[0]}{note[1:]}." for note in log.notes]
    return checked_table(path, Labels.of(rows["prompt"]), {"reward": rewards}, columns, notes, reading)


def _tool(path: Path) -> str | None:
    names = {path.suffix}
    if path.suffix == ".parquet":
        with suppress(pa.ArrowException, OSError):  # of damage, which its reader tells
            names |= set(pq.read_schema(path).names)  # a row by `read_rows` waits for a look at all texts
    if path.suffix == ".json":
        with path.open("rb") as file:
            names |= {name.decode() for name in re.findall(rb'"(\w+)"\s*:', file.read(HEAD))}
    elif len(names) == 1 and path.name.endswith(tuple(FORMATS)) and path.stat().st_size:
        names |= set(next(read_rows(path))[1])
    return next((tool for tool, reader in _MODULES.items() if any(known <= names for known in reader.KNOWN_BY)), None)


def _read(tool: str, path: Path, score: str | None, note: Note) -> Iterator[Sample]:
    try:
        yield from _MODULES[tool].read(path, score, note)
    except InfalignError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    except ImportError as error:
        raise ConfigError(f"{path} is read by the package {tool} ({error}); pip install {tool}") from error
    except Exception as error:  # whatever another tool's code raises for a damaged file
        raise DataError(
            f"{path} cannot be read as a log of {tool} ({first_line(error)}): it is damaged, cut off, or of a version "
            "that infalign does not know; write it again, or give its scores as a table"
        ) from error


def _scored(samples: Sequence[Sample], check: Callable[..., Any], note: Note) -> list[float | None]:
    from infalign.method.by_name import ByName
    from infalign.rewards.base import score

    said = [sample for sample in samples if sample.text is not None]
    prompts = [[{"role": "user", "content": s.asked}] if isinstance(s.asked, str) else s.asked for s in said]
    columns = [json.dumps(dict(sample.about), default=str) for sample in said]
    name = getattr(check, "__name__", "the checker")
    given = iter(score(ByName(check), prompts, [s.text or "" for s in said], columns=columns, name=name).tolist())
    rewards = [None if s.text is None or math.isnan(reward := next(given)) else reward for s in samples]
    same = [s.reward == reward for s, reward in zip(samples, rewards, strict=True) if None not in (s.reward, reward)]
    own = f"of its own {len(same)} scores {sum(same)} are the same"
    note(f"{name} scores {len(said)} texts in place of the log; {own}")
    return rewards


def _table(samples: Sequence[Sample], rewards: Sequence[float | None], numbers: Sequence[int]) -> pa.Table:
    columns: dict[str, Sequence[Any]] = {name: [getattr(s, name) for s in samples] for name in ("prompt", "model")}
    columns |= {"reward": rewards, "sample": numbers}
    optional = {name: [getattr(sample, name) for sample in samples] for name in ("answer", "text", "error")}
    columns |= {name: values for name, values in optional.items() if set(values) != {None}}
    prompts = len(set(columns["prompt"]))
    for name in dict.fromkeys(name for sample in samples for name in sample.about if name not in columns | optional):
        values = [sample.about.get(name) for sample in samples]
        if {type(v) for v in values} <= {str, int, float, bool, type(None)} and len(set(values)) < max(2, prompts):
            columns[name] = [None if value is None else str(value) for value in values]
    return pa.table({name: pa.array(v, pa.float64() if name == "reward" else None) for name, v in columns.items()})
