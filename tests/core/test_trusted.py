"""What compiled code is loaded from: nobody else may have written it, and it is whole."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from mla_compile.core import trusted
from mla_compile.core.trusted import NotWholeError, distrust, is_whole, load, seal
from mla_compile.errors import ModelFileError
from mla_compile.onnx import native as onnx_native


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "kernels.so").write_bytes(bytes(2000))
    return folder / "kernels.so"


def test_what_only_this_user_can_have_written(library: Path) -> None:
    assert distrust(library) is None
    assert distrust(library.with_name("not there yet.so")) is None


@pytest.mark.parametrize("mode", [0o777, 0o702])
@pytest.mark.parametrize("up", [0, 1, 2])
def test_a_file_or_a_folder_above_it_that_everybody_may_write_to(library: Path, up: int, mode: int) -> None:
    one = [library, *library.parents][up]
    one.chmod(mode)
    assert distrust(library) == f"everybody may write to {one}"
    if up:
        one.chmod(mode | 0o1000)  # sticky, as /tmp is: nobody can replace what is there
        assert distrust(library) is None


def test_a_group_counts_as_others_unless_nobody_else_is_in_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.parent.chmod(0o770)
    monkeypatch.setattr(trusted, "_private", lambda group: True)
    assert distrust(library) is None
    monkeypatch.setattr(trusted, "_private", lambda group: False)
    assert f"may write to {library.parent}" in distrust(library)


def test_a_folder_of_another_user(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    if os.getuid() == 0:  # what belongs to root is everybody's to run
        os.chown(library.parent, 12345, -1)
    assert "belongs to " in distrust(library)
    with pytest.raises(ModelFileError, match="is not loaded, because"):
        onnx_native.inspect(library)


def test_a_file_that_was_cut_short_or_changed_is_not_whole(library: Path) -> None:
    assert not is_whole(library), "nobody sealed it"
    seal(library)
    assert is_whole(library)
    library.write_bytes(bytes(1999))
    assert not is_whole(library)
    library.write_bytes(bytes(1999) + b"1")
    assert not is_whole(library)
    assert sorted(path.name for path in library.parent.iterdir()) == ["kernels.so", "kernels.so.sha256"]


def test_a_library_is_loaded_if_it_is_whole_and_nobody_elses(tmp_path):
    library = tmp_path / "one.so"
    shutil.copy(torch._C.__file__, library)
    with pytest.raises(NotWholeError, match=re.escape(str(library))):
        load(library, built_since=time.time() + 60)
    assert load(library, built_since=0)  # which seals it
    assert load(library, built_since=time.time() + 60)
    content = library.read_bytes()
    library.unlink()  # it is mapped
    library.write_bytes(content[: len(content) // 2])
    with pytest.raises(NotWholeError):
        load(library, built_since=time.time() + 60)
    library.chmod(0o777)
    with pytest.raises(PermissionError, match=r"everybody may write to .*; have it in a folder of your own"):
        load(library, built_since=0)
