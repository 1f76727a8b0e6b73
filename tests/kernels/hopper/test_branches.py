"""Jumps through a table as comparisons."""

import re

import pytest

from mla_compile.kernels.hopper import branches

PTX = """\
.visible .entry k()
{
T_0:
\t.branchtargets
\t\t$L__BB0_5,
\t\t$L__BB0_6,
\t\t$L__BB0_21;
\tmov.b32 \t%r1, 0;
\tbrx.idx \t%r392, T_0;
$L__BB0_5:
\tret;
}
"""


def test_a_jump_goes_where_its_table_says():
    text = branches.compared(PTX)
    assert "T_0" not in text
    assert "brx" not in text
    tests = re.findall(r"setp\.eq\.b32 \t(%\w+), %r392, (\d+);\n\t@(%\w+) bra \t(\S+);", text)
    assert [(a, int(i), where) for a, i, b, where in tests if a == b] == [
        ("%is", 0, "$L__BB0_5"), ("%is", 1, "$L__BB0_6")
    ]  # fmt: skip
    (last,) = re.findall(r"bra\.uni \t(\S+);", text)
    assert last == "$L__BB0_21"
    assert text.index("mov.b32") < text.index("%r392") < text.index("$L__BB0_5:")
    assert branches.compared(text) == text  # nothing else is touched


def test_the_stages_are_changed_for_as_long_as_they_are_asked_to_be():
    knobs = pytest.importorskip("triton").knobs
    before = knobs.runtime.add_stages_inspection_hook
    with branches.comparisons():
        hook = knobs.runtime.add_stages_inspection_hook
        assert hook() == hook()
        stages = {"ptx": lambda source, metadata: source + metadata, "cubin": None}
        hook(None, stages, None, None, 90)
        assert stages["ptx"](PTX, "//") == branches.compared(PTX + "//")
    assert knobs.runtime.add_stages_inspection_hook is before
    with pytest.raises(RuntimeError), branches.comparisons():
        raise RuntimeError
    assert knobs.runtime.add_stages_inspection_hook is before


def test_who_looks_at_the_stages_already_is_left_alone(monkeypatch):
    knobs = pytest.importorskip("triton").knobs

    def theirs(*_):
        return "", ""

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", theirs, raising=False)
    with branches.comparisons():
        assert knobs.runtime.add_stages_inspection_hook is theirs
