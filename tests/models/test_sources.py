"""Where a model comes from."""

from __future__ import annotations

import pytest

from mla_compile.errors import InputError
from mla_compile.models.sources import load
from tests.support import models


def test_a_saved_model_and_a_config(tmp_path):
    model = models.build("minicpm3", num_hidden_layers=1)
    model.save_pretrained(tmp_path / "saved")
    assert type(load(str(tmp_path / "saved"))) is type(model)
    assert type(load(str(tmp_path / "saved" / "config.json"), random_weights=1)) is type(model)


def test_a_source_that_is_nothing():
    with pytest.raises(InputError, match="neither a directory of a model"):
        load("no such thing")
