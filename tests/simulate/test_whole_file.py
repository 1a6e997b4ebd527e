"""A file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagedkv.errors import InvalidInput
from pagedkv.simulate.whole_file import write_together


def test_an_interruption_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_together({path: b"old"})
    really_write = Path.write_bytes

    def interrupted(self: Path, content: bytes) -> int:
        really_write(self, content[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_together({path: b"new content"})
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["report.html"]


def test_an_interruption_of_the_first_writing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_together({tmp_path / "report.html": b"new"})
    assert os.listdir(tmp_path) == []


def test_a_written_file_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_together({path: b"long old content"})
    write_together({path: b"new"})
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_written_file_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_bytes(b"")
    write_together({tmp_path / "ours": b"x"})
    assert (tmp_path / "ours").stat().st_mode == usual.stat().st_mode


def test_a_link_stays_a_link_to_the_new_content(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    write_together({link: b"new"})
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_what_is_no_regular_file_is_written_to_directly() -> None:
    write_together({"/dev/null": b"x"})
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["missing/report.html", "."])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput, match="cannot write") as caught:
        write_together({tmp_path / name: b"x"})
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_files_that_are_written_together_none_is_new_until_all_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"old")
    really_write = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if content == b"too much":
            raise OSError(28, "No space left on device")
        return really_write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InvalidInput, match=r"cannot write .*second: No space left on device"):
        write_together({first: b"new", second: b"too much"})
    assert first.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["first"]
    write_together({first: b"new", second: b"enough"})
    assert (first.read_bytes(), second.read_bytes()) == (b"new", b"enough")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_permissions_of_the_old_file_are_those_of_the_new_one(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_together({path: b"new"})
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == mode


def test_a_protected_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"mine")
    really_open = os.open

    def guarded(name: os.PathLike[str], flags: int, *more: int) -> int:  # root is never refused
        if name == path and flags & os.O_WRONLY:
            raise PermissionError(13, "Permission denied")
        return really_open(name, flags, *more)

    monkeypatch.setattr(os, "open", guarded)
    with pytest.raises(InvalidInput, match=r"cannot write .*a\.json: Permission denied"):
        write_together({path: b"new"})
    assert path.read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["a.json"]
