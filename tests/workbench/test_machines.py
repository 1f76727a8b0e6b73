"""The machines that ``plan`` knows."""

from __future__ import annotations

import pytest

from mla_compile.workbench.machines import machine


@pytest.mark.parametrize("name", ["h200", "h100", "a100", "b200", "cpu"])
def test_every_machine_has_figures_and_says_where_they_are_from(name):
    known = machine(name)
    assert known.source
    assert known.memory_bytes > 1e10
    assert known.peak("fp8") >= known.peak("bf16") >= known.peak("fp32")
