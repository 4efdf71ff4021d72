"""Write and read files whole or not at all: atomic writes, tables, records with a seal, hashes."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import EACCES, EDQUOT, EEXIST, EFBIG, EIO, ENOSPC, ENOTDIR, EPERM, EROFS
from functools import cache, partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from infalign.core.errors import DataError, InfalignError

UNWRITABLE = {EACCES, EDQUOT, EEXIST, EFBIG, EIO, ENOSPC, ENOTDIR, EPERM, EROFS}  # what the disk or who owns it refuses


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that replaces ``path`` when the block ends, and vanishes if it fails.

    The block creates the file, so its mode follows the umask. Readers see the old file or the whole new one, also
    after a power cut. Raises InfalignError as `writing` does.
    """
    path = Path(path)
    temporary = path.with_name(f".{uuid4().hex}-{path.name}")  # keeps the ending, from which writers infer the format
    try:
        with writing(path):
            yield temporary
            fsync(temporary)
            temporary.replace(path)
            fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise InfalignError that names ``path`` when the disk, or who owns it, does not take what the block writes."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise unwritable(path, os.strerror(error.errno)) from error


def unwritable(path: Path, why: str) -> InfalignError:
    """Return the error for a file or folder that cannot be written, with what its disk has free."""
    folder = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    disk = os.statvfs(folder)
    free = f"{disk.f_bavail * disk.f_frsize / 1e9:.1f} GB free"
    if disk.f_files and not disk.f_favail:
        free += ", but no free inodes"
    return InfalignError(
        f"cannot write {path} ({why}; {free}); the previous content is kept: free space or fix the disk, then rerun "
        "the same command"
    )


def remove(path: Path) -> None:
    """Remove a file, a folder with all that it holds, or a link, whose target stays; without any of them do nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_file(path: Path) -> str:
    """Return the hash of a file's content, 32 hexadecimal digits."""
    with path.open("rb") as file:
        return file_digest(file, partial(blake2b, digest_size=16)).hexdigest()


def inventory(path: Path, root: Path) -> dict[str, dict[str, Any]]:
    """Return size and hash of a file, or of every file in a folder, by name below ``root``, once all is on the disk."""
    return {
        file.relative_to(root).as_posix(): {"bytes": file.stat().st_size, "blake2b": hash_file(file)}
        for file in settle(path)
    }


def settle(path: Path) -> list[Path]:
    """Wait until a file, or every file in a folder, is on the disk, and return them without the hidden ones."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    files = [file for file in files if not file.name.startswith(".")]  # such as the temporary one of a killed process
    with writing(path):
        for place in sorted({path.parent, *(file.parent for file in files), *files}):
            fsync(place)
    return files


def flaws(files: Mapping[str, Mapping[str, Any]], root: Path, since: int = 0) -> Iterator[str]:
    """Yield how files differ from their `inventory`: ``model.safetensors has 10 of 90 bytes``.

    Only files whose ctime is at least ``since``, in nanoseconds, are hashed; of the others the size is compared.
    """
    for name, made in files.items():
        path = root / name
        if not path.is_file():
            yield f"{name} is {'no file' if path.exists() else 'missing'}"
        elif (state := path.stat()).st_size != made["bytes"]:
            yield f"{name} has {state.st_size} of {made['bytes']} bytes"
        elif since > max(state.st_ctime_ns, path.lstat().st_ctime_ns):
            continue
        elif _hash_once(path, state.st_ino, state.st_size, state.st_mtime_ns) != made["blake2b"]:
            yield f"{name} is damaged"


@cache
def _hash_once(path: Path, *_: int) -> str:
    """Return the hash of a file in a state that the other arguments tell."""
    return hash_file(path)


def write_record(path: str | Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object with ``blake2b``, the hash of the rest, whole or not at all."""
    write_text(path, json.dumps({**record, "blake2b": _seal(record)}, indent=1))


def read_record(path: str | Path) -> dict[str, Any]:
    """Return a JSON object that `write_record` wrote. Raises DataError for one that is damaged."""
    try:
        if Path(path).exists() and not Path(path).is_file():  # a named pipe would be read for ever
            raise ValueError("it is no file")
        record: dict[str, Any] = json.loads(Path(path).read_bytes())
        if record.pop("blake2b", None) != _seal(record):
            raise ValueError("its content does not match its hash")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and rerun the same command") from error
    return record


def _seal(record: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(record).encode(), digest_size=16).hexdigest()


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, whole or not at all; newlines stay as they are."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def write_table(path: str | Path, table: pa.Table) -> None:
    """Write ``table`` to the Parquet file ``path`` with a checksum on every page, whole or not at all."""
    with atomic_path(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", write_page_checksum=True)


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the Parquet file ``path``, or its named ``columns``, with the checksum of every page read verified.

    Raises DataError for a missing file, a damaged one and one without a column asked for.
    """
    if not Path(path).is_file():
        state = "is not a file" if Path(path).exists() else "does not exist"
        raise DataError(f"{path} {state}; rerun the step that writes it")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            absent = set(columns or ()) - set(file.schema_arrow.names)
            if absent:
                raise DataError(f"{path} has no column {sorted(absent)}; rerun the step that writes it")
            return file.read(None if columns is None else list(columns))
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and rerun the step that writes it") from error


def column_values(table: pa.Table, column: str) -> list[Any]:
    """Return the values of a column."""
    return table[column].to_pylist()
