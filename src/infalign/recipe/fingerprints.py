"""Content hashes of what a recipe names outside its run directory: files, model folders, reward-function modules."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from infalign.core.errors import DataError
from infalign.core.storage import hash_file, read_record, write_record
from infalign.core.user_code import function_name, source_file
from infalign.method.procedures import own_spellings
from infalign.models.conversion import content_hash, is_convertible
from infalign.models.pretrained import model_digest
from infalign.models.tokenizers import TEMPLATES
from infalign.recipe.settings import Recipe


class Digests:
    """Hashes of files, cached in one file; a file is hashed again when its size or modification time differs.

    The time is the file system's, in nanoseconds. Only `save` writes. If the cache is damaged, all are hashed again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._kept: dict[str, list[Any]] = read_record(path) if path.is_file() else {}
        except DataError:
            self._kept = {}
        self._used: dict[str, list[Any]] = {}

    def __call__(self, file: Path) -> str:
        """Return the hash of a file's content."""
        name, state = str(file.resolve()), file.stat()
        stamp = [state.st_size, state.st_mtime_ns]
        *known, digest = self._used.get(name) or self._kept.get(name) or [None]
        if known != stamp:
            digest = hash_file(file)
        self._used[name] = [*stamp, digest]
        return str(digest)

    @property
    def files(self) -> list[Path]:
        """The files whose hashes were requested, with links resolved."""
        return [Path(name) for name in self._used]

    def save(self) -> None:
        """Write the hashes that were requested and drop the others."""
        if self._used != self._kept:
            write_record(self._path, self._used)


def settings_of(recipe: Recipe, digests: Digests) -> dict[str, Any]:
    """Return the recipe's settings; paths, reward functions and own procedures become their ``content``, a hash.

    The path of a folder or a transformation does not count. A data file, a local data set and a reward function also
    have their ``name``. The content of a function is the source of its module; modules that it imports are not
    included. A missing file has the content None; the stage that needs it raises the error. A hub id is kept as it is.
    How many requests are in flight, whether they have seeds, and where and how an engine's server runs says nothing.
    """
    settings: dict[str, Any] = recipe.model_dump(mode="json")
    folder = Path(settings["data"].pop("folder"))
    for name in ("in_flight", "seed", "url", "command", "api_key_env"):
        settings["rollout"]["engine"].pop(name, None)
    if own := own_spellings(recipe.procedure):
        settings["procedure"] = {"name": recipe.procedure.name, "own": [_of_function(spec, digests) for spec in own]}
    for source in (*settings["data"]["sources"], *settings["data"]["test"]):
        if source["path"] is not None:
            source["path"] = _content(folder / source["path"], digests) | {"name": source["path"]}
        elif source["hub"] is not None and (copy := folder / source["hub"]["id"]).is_dir():
            source["hub"] |= _folder_content(copy, digests)
    named_models = recipe.named_models
    for name in ("policy", "reward", "judge", "gold"):
        model, named = settings[name] or {}, named_models.get(name)
        model.pop("in_flight", None)
        if named is not None and is_convertible(named):
            model["model"] = {"content": content_hash(named, digests)}
        elif named is not None and Path(named).is_dir():
            model["model"] = {"content": model_digest(named, digests)}
        if function := model.get("function"):
            model["function"] = _of_function(function, digests)
    if (template := settings["policy"].pop("chat_template")) is not None:
        in_file = template not in TEMPLATES
        settings["policy"]["chat_template"] = _content(Path(template), digests) if in_file else template
    for policy in settings["policies"].values():
        if policy.get("transform", "").endswith(".json"):
            policy["transform"] = _content(Path(policy["transform"]), digests)
    return settings


def _of_function(spec: str, digests: Digests) -> dict[str, Any]:
    source = source_file(spec)
    return (_content(source, digests) if source else {"content": None}) | {"name": function_name(spec)}


def _content(file: Path, digests: Digests) -> dict[str, str | None]:
    return {"content": digests(file) if file.is_file() else None}


def _folder_content(folder: Path, digests: Digests) -> dict[str, str | None]:
    held = blake2b(digest_size=16)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        held.update(f"{file.relative_to(folder)}\0{digests(file)}\0".encode())
    return {"content": held.hexdigest()}
