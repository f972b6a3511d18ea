"""Files: replaced in one step, and known by their content."""

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

SUMS = "SHA256SUMS"  # as the command of that name writes and checks it


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft beside a file or folder that replaces it at the end: a kill leaves the old one or the new one.

    A draft that a kill left behind is removed first; an error removes its draft too. Only one process
    may write the path at a time.
    """
    draft, old = (path.with_name(f".{path.name}.{what}") for what in ("draft", "old"))
    _remove(draft)
    draft.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield draft
        if draft.is_dir() and path.exists():
            _remove(old)
            path.rename(old)
        draft.replace(path)
        _remove(old)
    finally:
        _remove(draft)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)  # of no file, which is left
    path.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, which one process reads again only where its size or times have changed."""
    status = path.stat()  # who sets the time of a change back changes the third
    return _sha256(path.absolute(), status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@functools.cache
def _sha256(path: Path, *_looks: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hashes(place: Path) -> dict[str, str]:
    """SHA-256 of a file, or of every file below a folder (hidden ones left out), by name."""
    if place.is_file():
        return {place.name: sha256(place)}
    names = (path.relative_to(place) for path in sorted(place.rglob("*")) if path.is_file() and path.name != SUMS)
    return {name.as_posix(): sha256(place / name) for name in names if "/." not in f"/{name.as_posix()}"}


def seal(folder: Path) -> None:
    """Write ``SHA256SUMS`` of all files of a folder: the last file of a folder that is complete."""
    write(folder / SUMS, "".join(f"{value}  {name}\n" for name, value in hashes(folder).items()))


def broken(folder: Path) -> str | None:
    """Return the first integrity error of a sealed folder (incomplete, missing or modified file), or None."""
    try:
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{folder} is not complete (no {SUMS})"
    for expected, _, name in (line.partition("  ") for line in lines):
        if not (path := folder / name).is_file() or sha256(path) != expected:
            return f"{path} is {'not what was written' if path.is_file() else 'missing'}"
    return None
