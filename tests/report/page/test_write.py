"""The page as a file: whole or as it was."""

from __future__ import annotations

import os

import pytest

import mla_compile
from mla_compile.errors import InputError, OptionError
from tests.support.explaining import call
from tests.support.toy import Toy, decode_inputs


def test_a_file_is_whole_or_as_it_was(tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    report = mla_compile.explain(Toy(), *decode_inputs(cached=300))
    report.to_html(target, title="one", dtype="fp8")
    before = target.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to("page.html")
    report.to_html(link, title="one", dtype="fp8")
    assert link.is_symlink()
    link.unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match=r"page.html cannot be written: No space left"):
        report.to_html(target, title="two")
    assert target.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(OptionError, match="did you mean 'bf16'"):
        report.to_html(target, dtype="bf61")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("missing/page.html", "is not a directory to write"),
        (".", "is a directory, expected the name"),
        (os.devnull, "is not an ordinary file"),
    ],
)
def test_a_path_that_cannot_be_written_is_found_first(explained_models, path, text):
    done = call("nowhere.json", "--html", path)  # the model would be an error too, later
    assert done.exit_code == 2, done.output
    assert text in done.output
    assert len([line for line in done.output.splitlines() if line.startswith("error:")]) == 1
