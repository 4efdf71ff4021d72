"""Read rows from the Hugging Face hub, or from a local folder in its layout."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from infalign.core.errors import ConfigError
from infalign.data.files import read_rows

ON_HUB = re.compile(r"hf://datasets/([^@]+)@([^/]+)/(.+)")


def hub_rows(
    name: str,
    *,
    split: str,
    config: str | None = None,
    revision: str | None = None,
    data_dir: str | None = None,
    data_files: str | list[str] | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of one split of the data set ``name``: a hub id or a local folder.

    ``config`` is one of its configurations, ``revision`` pins a commit of the hub, ``data_dir`` is a folder inside it
    (``harmless-base`` of ``Anthropic/hh-rlhf``), ``data_files`` are patterns of files. `datasets` says which files the
    split has; they are read as any other file is, since `datasets` would make dates and numbers of text. Raises
    ConfigError for a data set or split that cannot be loaded, and as `read_rows`.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("reading from the hub needs the library datasets; pip install 'infalign[train]'") from error

    source = f"{name}/{data_dir}[{split}]" if data_dir else f"{name}[{split}]"
    try:
        builder = datasets.load_dataset_builder(
            name, config, data_dir=data_dir, data_files=data_files, revision=revision
        )
        files = builder.config.data_files or {}
        if split not in files:
            raise ValueError(f'Unknown split "{split}". Should be one of {sorted(files)}')
        paths = [_fetched(file) for file in files[split]]
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"{source} cannot be loaded ({said}); check id, config, split and data_dir") from error
    for path in paths:
        yield from read_rows(path)


def _fetched(file: str) -> Path:
    """Return a file of a data set, fetched to the hub's cache if it is there."""
    if (on_hub := ON_HUB.fullmatch(file)) is None:
        return Path(file)
    from huggingface_hub import hf_hub_download

    repository, revision, path = on_hub.groups()
    return Path(hf_hub_download(repository, path, repo_type="dataset", revision=unquote(revision)))
