"""Files that are replaced in one step, sealed folders, and hashes that are computed once."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gcpo import io

pytestmark = pytest.mark.usefixtures("outputs")


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder = tmp_path / "sealed"
    (folder / "inside").mkdir(parents=True)
    (folder / "one.txt").write_text("1")
    (folder / "inside" / "two.txt").write_text("2")
    (folder / ".hidden").write_text("not ours")
    io.seal(folder)
    return folder


def test_a_folder_is_replaced_whole_and_what_a_kill_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for left in (path, tmp_path / ".a.draft", tmp_path / ".a.old"):
        left.mkdir()
        (left / "old").write_text("")
    with io.replacing(path) as draft:
        draft.mkdir()
        (draft / "new").write_text("")
        assert (path / "old").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and [p.name for p in path.iterdir()] == ["new"]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_a_seal_is_what_sha256sum_writes(sealed: Path) -> None:
    done = subprocess.run(["sha256sum", "-c", io.SUMS], cwd=sealed, capture_output=True, text=True)
    assert done.stdout == "inside/two.txt: OK\none.txt: OK\n"


BREAKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no seal": (lambda folder: (folder / io.SUMS).unlink(), "is not complete (no SHA256SUMS)"),
    "a file less": (lambda folder: (folder / "one.txt").unlink(), "one.txt is missing"),
    "another file": (lambda folder: (folder / "one.txt").write_text("7"), "one.txt is not what was written"),
    "a file cut": (lambda folder: (folder / "inside" / "two.txt").write_text(""), "two.txt is not what was written"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_a_seal_says_what_is_wrong(how: str, sealed: Path) -> None:
    assert io.broken(sealed) is None
    change, message = BREAKS[how]
    change(sealed)
    assert message in str(io.broken(sealed))


def test_hashes_are_of_a_file_or_of_all_files_but_hidden_ones(sealed: Path) -> None:
    assert list(io.hashes(sealed)) == ["inside/two.txt", "one.txt"]
    assert io.hashes(sealed / "one.txt") == {"one.txt": hashlib.sha256(b"1").hexdigest()}


def test_a_file_is_read_again_where_it_was_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big"
    path.write_text("1")
    first = io.sha256(path)
    with monkeypatch.context() as never:
        never.setattr(io.hashlib, "file_digest", None)
        assert io.sha256(path) == first
    before = path.stat()
    path.write_text("2")  # as long, perhaps in the same tick of a coarse clock: written again, it is another file
    path.touch()
    assert io.sha256(path) == hashlib.sha256(b"2").hexdigest()
    path.write_text("3")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert io.sha256(path) == hashlib.sha256(b"3").hexdigest()
