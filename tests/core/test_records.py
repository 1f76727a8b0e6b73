"""Records of sites: a wrong one is refused, and a location reads as words."""

from __future__ import annotations

import dataclasses

import pytest

from mla_compile.core.records import Location
from tests.support.reports import REFUSED


def test_site_refuses_an_unknown_code_or_verdict():
    with pytest.raises(ValueError, match="'nope' is not a valid Code"):
        dataclasses.replace(REFUSED, code="nope")
    with pytest.raises(ValueError, match="verdict is 'maybe', expected one of absorbed, kept, refused, not_mla"):
        dataclasses.replace(REFUSED, verdict="maybe")


def test_location_in_words():
    assert str(REFUSED.blame) == "aten.mul at deepseek_v3/modeling_deepseek_v3.py:52 in model.layers.3.self_attn"
    assert str(Location("mul_7", "aten.mul")) == "aten.mul"
    assert Location("n", "op", file="C:\\src\\models\\m.py", line=4).source == "models/m.py:4"
    assert Location("n", "op", file="m.py").source == "m.py"
    assert Location("n", "op").source is None
