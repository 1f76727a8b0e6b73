"""Folders that are written whole or not at all."""

import os
from pathlib import Path

import pytest

from mla_compile.core.files import new_folder
from mla_compile.errors import TargetError
from mla_compile.saved import folder as saved


def fails_while_writing(target: Path) -> None:
    with new_folder(target) as stage:
        (stage / "a").write_text("second")
        raise RuntimeError


def test_what_was_there_stays_until_the_new_folder_is_whole(tmp_path: Path):
    target = tmp_path / "made" / "folder"
    with new_folder(target) as stage:
        (stage / "a").write_text("first")
        assert not target.exists()
    with pytest.raises(RuntimeError):
        fails_while_writing(target)
    assert (target / "a").read_text() == "first"
    with new_folder(target) as stage:
        (stage / "b").write_text("third")
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


def test_a_folder_that_cannot_be_written_is_a_target_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(TargetError, match=r"file/folder cannot be written: "),
        new_folder(tmp_path / "file/folder"),
    ):
        pass


def test_saved_code_may_be_written_by_its_owner_alone_and_takes_nobodys_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = os.umask(0o002)  # with which a group may write to what is made
    try:
        saved.write(tmp_path / "one", {}, {"code": b"1"})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o022 for path in (tmp_path / "one", *(tmp_path / "one").iterdir())} == {0}
    with pytest.raises(TargetError, match="exists already"):
        saved.write(tmp_path / "one", {}, {"code": b"2"})
    real = saved.new_folder

    def slow(*given):
        (tmp_path / "two").mkdir()
        (tmp_path / "two" / "of another process").write_text("")
        return real(*given)

    monkeypatch.setattr(saved, "new_folder", slow)
    with pytest.raises(TargetError, match="exists already"):
        saved.write(tmp_path / "two", {}, {"code": b"2"})
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["of another process"]
