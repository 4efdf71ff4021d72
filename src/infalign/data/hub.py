"""Read rows from the Hugging Face hub, or from a local folder in its layout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from infalign.core.errors import ConfigError
from infalign.core.settings import Settings
from infalign.data.files import read_rows


class Hub(Settings):
    """A split of a data set of the hub, or of a folder in its layout."""

    id: str = Field(description="a `datasets` id, e.g. Anthropic/hh-rlhf, or a local dataset folder")
    config: str | None = Field(None, description="one of its configurations (subsets), e.g. polite")
    split: str = Field("train", description="one of its splits")
    revision: str | None = Field(None, description="a commit, branch or tag")
    data_dir: str | None = Field(None, description="a folder in the repository, e.g. harmless-base")
    data_files: str | list[str] | None = Field(
        None, description="its files, as names or patterns, e.g. data/2024-*.jsonl"
    )

    def found_in(self, folder: str | Path) -> "Hub":
        """Return this, or what ``folder`` has of it: a copy of the repository under its id."""
        copy = Path(folder) / self.id
        return self.model_copy(update={"id": str(copy)}) if copy.is_dir() else self

    @property
    def is_local(self) -> bool:
        """Whether it is a folder."""
        return Path(self.id).is_dir()


def hub_rows(hub: Hub) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of the split of a data set.

    `datasets` says which files it has; they are read as any other file is, since `datasets` would make dates and
    numbers of text. Raises ConfigError for a data set or split that cannot be loaded, and as `read_rows`.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError("reading from the hub needs the package datasets; pip install 'infalign[train]'") from error

    source = f"{hub.id}/{hub.data_dir}[{hub.split}]" if hub.data_dir else f"{hub.id}[{hub.split}]"
    try:
        builder = datasets.load_dataset_builder(
            hub.id, hub.config, data_dir=hub.data_dir, data_files=hub.data_files, revision=hub.revision
        )
        files = builder.config.data_files or {}
        if hub.split not in files:
            raise ValueError(f'Unknown split "{hub.split}". Should be one of {sorted(files)}')
        paths = datasets.DownloadManager(record_checksums=False).download(list(files[hub.split]))
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).strip().split("\n")[:2])  # the second line lists configurations
        bring = f"; without a network, bring the files: `hf download {hub.id} --repo-type dataset --local-dir {hub.id}`"
        bring = "" if hub.is_local else bring
        raise ConfigError(f"cannot load {source} ({said}); check id, config, split and data_dir{bring}") from error
    for path in paths:
        yield from read_rows(path)
