"""Reading tables of rewards: which column is what, and which value is a reward."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infalign.core.errors import ConfigError, DataError
from infalign.core.spelling import listed_names
from infalign.data.files import read_rows
from infalign.data.lines import check_expansion
from infalign.data.messages import read_messages
from infalign.evaluation.reward_tables import Labels, RewardTable
from infalign.method.calibration import Array, as_rewards, not_a_number

Missing = Literal["refuse", "omit", "wrong"]
Columns = dict[str, list[str]]  # of each role
ROLES = {  # the column of the first name, or else the only one with another of the names
    "prompt": ("prompt_id", "prompt", "problem", "problem_id", "question", "question_id", "task_id", "doc_id"),
    "reward": ("reward", "score", "correct", "is_correct", "passed", "success", "acc", "accuracy", "reference_rewards"),
    "model": ("model", "model_name", "model_id", "policy", "llm", "agent"),
    "answer": ("answer",),
    "sample": ("sample", "sample_id", "sample_index", "epoch", "repeat", "trial", "attempt"),
    "judge_reward": ("judge_reward",),
    "length": ("length",),
}
NAMED = 12  # columns in a sentence
NUMBERS = ("reward", "judge_reward", "length")
RUNS = ("run", "run_id", "step", "global_step", "checkpoint")  # columns that tell apart what must not be pooled
WORDS = {"C": 1.0, "I": 0.0, "true": 1.0, "false": 0.0, "passed": 1.0, "failed": 0.0, "pass": 1.0, "fail": 0.0}
WORDS |= {"correct": 1.0, "incorrect": 0.0}


@dataclass(frozen=True, slots=True)
class Reading:
    """How a table is read: the columns that were chosen for roles, others to keep, and what a missing reward is."""

    columns: Mapping[str, str] = field(default_factory=dict)
    keep: Sequence[str] = ()
    missing: Missing = "refuse"

    def roles(self, path: Path, names: Sequence[str]) -> tuple[Columns, list[str]]:
        """Return the columns of each role in a file with columns ``names``, and notes on what was assumed or ignored.

        Several columns of rewards are samples of their row, several of models hold these models' rewards. Raises
        ConfigError for a role that does not exist, DataError where a column is absent or two could have the role.
        """
        if unknown := [role for role in self.columns if role not in ROLES]:
            raise ConfigError(f"unknown role {unknown[0]!r} of a column; known: {', '.join(ROLES)}")
        roles, notes = {name: [name] for name in self.keep}, []
        for role, (usual, *others) in ROLES.items():
            pattern = self.columns.get(role, usual)
            roles[role] = [name for name in names if fnmatchcase(name, pattern)]
            if role in self.columns or roles[role]:
                continue
            roles[role] = [name for name in names if name in others and name not in self.columns.values()]
            if role == "sample" and len(roles[role]) > 1:
                roles[role] = []
            if len(roles[role]) > 1:
                both = " and ".join(roles[role])
                raise DataError(
                    f"{path}: columns {both} could be the {role}; choose: --columns {role}={roles[role][0]}"
                )
            notes += [f"{role} is read from column {name}." for name in roles[role]]
        needed = ["prompt", *["reward"] * (len(roles["model"]) < 2), *self.keep]
        for role, chosen in {**dict.fromkeys(needed), **self.columns}.items():
            if not set(roles[role]) & set(names):
                absent = role if chosen is None else f"{chosen or 'without a name'} for {role}"
                cure = "" if chosen or role in self.keep else f"; choose one with --columns {role}=NAME"
                raise DataError(f"{path}: no column {absent}; there are {listed_names(names, NAMED) or 'none'}{cure}")
        if len(roles["model"]) > 1:  # each holds the rewards of a model
            roles["reward"] = []
        roles |= {name: [name] for name in RUNS if name in names}
        used = {name for columns in roles.values() for name in columns}
        if ignored := [name for name in names if name not in used]:
            notes.append(f"Ignored columns: {listed_names(ignored, NAMED)}.")
        return roles, notes


def read_reward_table(path: str | Path, reading: Reading | None = None) -> RewardTable:
    """Return the rewards of a .parquet, .csv, .json or .jsonl file, also compressed.

    A row is a response, or with a list of rewards or several columns of them the responses to a prompt. Prompts are
    lists of messages, text or whole numbers, compared as text: 1 and "1" are one prompt, "01" is another. Numbers keep
    the precision of the file; booleans and words such as C and I, passed and failed count as 1 and 0. The model is the
    file where no column has it. Raises DataError that names row and column for a value that is none of these, for a
    sample of a prompt that occurs twice, and for several values in a column such as ``step``, whose rows are not
    pooled.
    """
    path, reading = Path(path), reading or Reading()
    if path.suffix == ".parquet":
        try:
            return _read_columns(path, reading)
        except (OSError, pa.ArrowException, ValueError, KeyError):  # KeyError: a duplicate column
            pass  # its rows say where
    return _read_by_row(path, reading)


def _read_columns(path: Path, reading: Reading) -> RewardTable:
    """Return the rewards of a Parquet file whose columns are as they should be. Raises ValueError for others."""
    about = pq.read_metadata(path)
    check_expansion(path, 4 * about.num_rows)  # texts are read as numbers, one for each that differs
    names = about.schema.to_arrow_schema().names
    roles, notes = reading.roles(path, names)
    used = {role: columns[0] for role, columns in roles.items() if columns}
    if any(len(columns) > 1 for columns in roles.values()) or not {"prompt", "reward"} <= set(used):
        raise ValueError("not one column for each role")
    with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=list(used.values())) as file:
        table = file.read(list(dict.fromkeys(used.values())))
    ids = table[used["prompt"]]
    kind = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise ValueError(kind)
    numbers = {role: _numbers(table[used[role]], role, reading) for role in NUMBERS if role in used}
    labels = {role: Labels.of(table[name]) for role, name in used.items() if role not in NUMBERS}
    prompts = labels.pop("prompt")
    if "" in prompts.names or (prompts.codes < 0).any() or not len(prompts.codes):
        raise ValueError("rows without a prompt")
    present = {role: values for role, values in numbers.items() if values is not None}
    return checked_table(path, prompts, present, labels, notes, reading)


def _numbers(column: "pa.ChunkedArray[Any]", role: str, reading: Reading) -> Array | None:
    """Return the numbers of a column, NaN where a missing one may be, None where there is none. Raises ValueError."""
    if column.null_count == len(column) and role != "reward":
        return None
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(column.type)
    whole: Any = column.combine_chunks()
    if whole.null_count:
        whole = whole.cast(pa.float64()).fill_null(math.nan)
    values = cast(Array, np.from_dlpack(whole))  # to_numpy imports pandas
    as_rewards(values)
    allowed = np.isfinite(values) | (np.isnan(values) if role == "reward" and reading.missing != "refuse" else False)
    if not allowed.all():
        raise ValueError("not finite")
    return values


def _read_by_row(path: Path, reading: Reading) -> RewardTable:
    """Return the rewards of any file. Raises DataError, with the place, for a value that is not what it should be."""
    absent: dict[str, str] = {}
    words: set[str] = set()
    csv = path.suffix == ".csv"  # whose numbers are text
    named = islice(read_rows(path), 1) if path.suffix in (".csv", ".parquet") else read_rows(path)
    names = dict.fromkeys(name for _, row in named for name in row)  # a row of JSON may lack some
    roles, notes = reading.roles(path, list(names))
    by_role: dict[str, list[Any]] = {role: [] for role in roles if roles[role] or role in ("prompt", "reward")}
    for where, row in read_rows(path):
        asked = row.get(column := roles["prompt"][0])
        if isinstance(asked, list) and all(isinstance(turn, dict) for turn in asked):
            try:
                row = row | {column: json.dumps(read_messages(asked, column))}  # as in logs
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
        for response in _responses(row, roles):
            for role, values in by_role.items():
                name = (roles[role] or ROLES[role])[0]
                value = response.get(role)
                if value is None or value == "":
                    if role == "prompt" or (role == "reward" and reading.missing == "refuse"):
                        cure = "; score the response; pass-at-k --missing omit leaves it out" * (role == "reward")
                        has = sorted(row) if len(row) <= NAMED else f"{len(row):,} others"
                        raise DataError(f"{where}: column {name} is missing or empty; the row has {has}{cure}")
                    if role in NUMBERS[1:] and (reading.missing != "omit" or response.get("reward") not in (None, "")):
                        absent.setdefault(role, where)
                    values.append(math.nan if role in NUMBERS else None)
                    continue
                try:
                    if role in NUMBERS:
                        values.append(_number(value, csv, words, nan=role == "reward" and reading.missing != "refuse"))
                    else:
                        values.append(_prompt_text(value) if role == "prompt" else str(value))
                except ValueError as error:
                    raise DataError(f"{where}, prompt {response['prompt']!r}: {name} is {error}") from None
    numbers = {role: np.array(by_role.pop(role), float) for role in NUMBERS if role in by_role}
    for role, where in absent.items():
        if np.isnan(numbers[role]).all():
            del numbers[role]
        else:
            raise DataError(f"{where}: column {roles[role][0]} is missing or empty, but other rows have it")
    if words:
        notes.append(f"Words are rewards: {', '.join(f'{word} is {WORDS[word]:g}' for word in sorted(words))}.")
    labels = {role: Labels.of_texts(values) for role, values in by_role.items()}
    return checked_table(path, labels.pop("prompt"), numbers, labels, notes, reading)


def _responses(row: Mapping[str, Any], roles: Columns) -> Iterator[dict[str, Any]]:
    """Yield what each response of a row has in each role; lists as long as that of rewards have a value for each."""
    one = {role: row.get(columns[0]) for role, columns in roles.items() if columns}
    several = [("model", name) for name in roles["model"]] if len(roles["model"]) > 1 else []
    for role, name in several or [("reward", name) for name in roles["reward"]] or [("reward", "reward")]:
        response = one | {"reward": row.get(name)} | ({"model": name} if role == "model" else {})
        rewards = response["reward"]
        if (isinstance(rewards, list) or len(roles["reward"]) > 1) and not isinstance(response.get("sample"), list):
            response["sample"] = None  # it numbers the row
        if not isinstance(rewards, list):
            yield response
            continue
        if not rewards:
            yield response | {"reward": None}
        lists = {role: value for role, value in response.items() if isinstance(value, list)}
        for i in range(len(rewards)):
            yield response | {role: value[i] for role, value in lists.items() if len(value) == len(rewards)}


def checked_table(
    path: str | Path,
    prompts: Labels,
    numbers: Mapping[str, Array],
    columns: Mapping[str, Labels],
    notes: Sequence[str],
    reading: Reading,
) -> RewardTable:
    """Return the table of what was read, in which NaN is a missing reward.

    Raises DataError for a missing reward, unless ``reading`` says what to do with it, and for rows that are not pooled.
    """
    columns, missing = dict(columns), np.isnan(numbers["reward"])
    models = columns.pop("model", None) or Labels(np.zeros(missing.size, np.int32), [Path(path).stem])
    if models.codes.min(initial=0) < 0:
        raise DataError(f"{path}: row {int(models.codes.argmin())} has no model, but others have one")
    table = RewardTable(str(path), prompts, models, dict(numbers), columns, tuple(notes))
    if missing.any():
        said = f"{int(missing.sum()):,} of {missing.size:,} samples have no reward"
        if reading.missing == "refuse":
            first, errors = int(missing.argmax()), columns.get("error")
            because = f" ({errors.names[errors.codes[first]]})" if errors and errors.codes[first] >= 0 else ""
            raise DataError(
                f"{path}: {said}, first one of prompt {prompts.names[prompts.codes[first]]!r}{because}; leave them out "
                f"with --missing omit, or count them as wrong with --missing wrong. {' '.join(notes)}".rstrip()
            )
        if reading.missing == "omit":
            if missing.all():
                raise DataError(f"{path}: no sample has a reward. {' '.join(notes)}".rstrip())
            table = replace(table.take(~missing), notes=(*notes, f"{said} and are left out."))
        else:
            filled = {**numbers, "reward": np.where(missing, 0.0, numbers["reward"])}
            table = replace(table, numbers=filled, notes=(*notes, f"{said} and count as wrong."))
    key = table.models.codes.astype(np.int64) * len(table.prompts.names) + table.prompts.codes
    for name in (*RUNS, "sample"):
        if name not in table.columns or name in (*reading.keep, *reading.columns.values()):
            continue
        labels = table.columns[name]
        pairs = key * (len(labels.names) + 1) + labels.codes
        distinct, first, counts = np.unique(pairs, return_index=True, return_counts=True)
        if name == "sample" and counts.max() > 1 and labels.codes[row := first[counts.argmax()]] >= 0:
            prompt, sample = table.prompts.names[table.prompts.codes[row]], labels.names[labels.codes[row]]
            raise DataError(
                f"{path}: prompt {prompt!r} has sample {sample} more than once; if the file holds several runs, name "
                "the column that tells them apart, --columns model=NAME"
            )
        if name != "sample" and distinct.size > np.unique(key).size:
            raise DataError(
                f"{path}: column {name} has several values for a prompt, which are not pooled; keep the rows of one, "
                f"or take each as a model, --columns model={name}"
            )
    return table


def _number(value: Any, csv: bool, words: set[str], *, nan: bool) -> float:
    """Return a reward as a number, and collect the ``words`` that are read as one. Raises ValueError for others."""
    if isinstance(value, str) and (word := value if value in WORDS else value.lower()) in WORDS:
        words.add(word)
        return WORDS[word]
    if isinstance(value, bool):
        return float(value)
    try:
        if isinstance(value, str) and (not csv or "_" in value):
            raise ValueError
        number = int(value) if isinstance(value, str) and value.strip().lstrip("+-").isdecimal() else value
        reward = float(number)
    except OverflowError:  # whole numbers in JSON can be arbitrarily large
        reward = math.inf
    except (TypeError, ValueError):
        percent = isinstance(value, str) and value.strip().endswith("%")
        raise ValueError(f"{value!r}; it must be a number{', such as 0.85 for 85%' if percent else ''}") from None
    if not math.isfinite(reward) and not (nan and math.isnan(reward)):
        raise ValueError(f"{reward}, which cannot be ranked; score the response again")
    if isinstance(number, int) and abs(number) > 2**53 and (problem := not_a_number(number)):
        raise ValueError(problem.removeprefix("found "))
    return reward


def _prompt_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"of type {type(value).__name__}; it must be text, a whole number or a list of messages")
    return str(value)
