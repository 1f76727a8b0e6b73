"""Where a model comes from."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest

from mla_compile.errors import InputError
from mla_compile.models import sources
from mla_compile.models.sources import load
from tests.support import models


def test_a_saved_model_and_a_config(tmp_path):
    model = models.build("minicpm3", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "saved")
    assert type(load(str(tmp_path / "saved"))) is type(model)
    assert type(load(str(tmp_path / "saved" / "config.json"), random_weights=1)) is type(model)


def test_weights_need_room_beside_what_else_the_memory_holds(tmp_path, monkeypatch):
    model = models.build("minicpm3", num_hidden_layers=1)
    model.config.save_pretrained(tmp_path)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    for free, refused in ((1.2, True), (1.3, False)):
        monkeypatch.setattr(sources, "available_bytes", lambda free=free: int(free * size))
        with pytest.raises(InputError, match="of memory are free") if refused else nullcontext():
            load(str(tmp_path / "config.json"), random_weights=1)


@pytest.mark.parametrize("name", ["no such thing", "no such file.json", "weights.bin"])
def test_a_source_that_is_nothing(name, tmp_path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(InputError, match="neither a directory of a model") as refused:
        load(str(tmp_path / name), random_weights=1)
    assert ("there is no such file" in str(refused.value)) == ("no such" in name)


def test_a_module_of_the_current_directory_hides_others_of_its_name(tmp_path, monkeypatch):
    """As for ``python -m``. The path is as it was afterwards."""
    for folder, width in (("elsewhere", 1), ("here", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "my_model.py").write_text(
            f"import torch\ndef make(): return torch.nn.Linear({width}, 3)\n"
        )
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "here")
    before = list(sys.path)
    made = load("python:my_model:make")
    del sys.modules["my_model"]
    assert made.in_features == 2
    assert sys.path == before
