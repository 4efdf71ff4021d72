"""Read rows from the Hugging Face hub, or from a local folder in its layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infalign.core.errors import ConfigError, DataError
from infalign.data.expansion import COMPRESSED, check_compressed
from infalign.data.parquet import check_declared_size


def hub_rows(
    name: str, *, split: str, data_dir: str | None = None, revision: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of one split of the data set ``name``: a hub id or a local folder.

    ``data_dir`` is a folder inside it (``harmless-base`` of ``Anthropic/hh-rlhf``); ``revision`` pins a commit of the
    hub. Rows count from 0, as ``dataset[17]`` does. Raises ConfigError for a data set or split that cannot be loaded,
    and DataError for files that cannot be read.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("reading from the hub needs the library datasets; pip install 'infalign[train]'") from error

    for file in sorted(Path(name).rglob("*")) if Path(name).is_dir() else ():
        if file.suffix == ".parquet":
            check_declared_size(file)
        elif file.suffix in COMPRESSED:
            check_compressed(file)
    source = f"{name}/{data_dir}[{split}]" if data_dir else f"{name}[{split}]"
    try:
        rows = datasets.load_dataset(name, data_dir=data_dir, split=split, revision=revision)
    except StopIteration as error:  # of datasets, where a file has no first row
        raise DataError(f"{source} holds no rows") from error
    except datasets.exceptions.DatasetGenerationError as error:
        raise DataError(f"{source}: the files cannot be read ({_first_line(error.__cause__ or error)})") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{source} cannot be loaded ({_first_line(error)}); check name, split and data_dir"
        ) from error
    for number, row in enumerate(rows):
        yield f"{source} row {number}", row


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
