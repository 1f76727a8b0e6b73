"""Failed guards in words."""

from __future__ import annotations

import pytest

from mla_compile.dynamo.causes import cause


@pytest.mark.parametrize(
    ("guard", "kind", "what"),
    [
        ("module._modules['a']._modules['0'].pos == 11", "number", "the int model.a.0.pos changes"),
        ("L['module'].pos == -1", "number", "the int model.pos changes"),
        ("len(module.toks) == 6", "length", "the length of model.toks changes"),
        ("len(module.d) != 6", "length", "the length of model.d changes"),
        ("not len(module.d)", "length", "the length of model.d changes"),
        (
            "tensor 'module._buffers['c']' size mismatch at index 1. expected 6, actual 7",
            "size",
            "axis 1 of the tensor model.c changes its size from call to call (6, then 7)",
        ),
        ("module.mode == 'aa'", "other", "the guard that failed is model.mode == 'aa'"),
        ("tensor 'kwargs['x']' dtype mismatch", "other", "the guard that failed is tensor 'kwargs['x']' dtype"),
        ("Unable to find recompilation reasons", "other", "the guard that failed is Unable to find"),
    ],
)
def test_guards_in_words(guard: str, kind: str, what: str) -> None:
    frames = 'User stack trace:\n  File "/a.py", line 3, in f\n    g(x)\n  File "/b c.py", line 5, in g\n    use(self)'
    found = cause(f"0/7: {guard}   # use(self)  # b c.py:5 in g (HINT: x)\n{frames}", {}, "module")
    assert found.kind == kind
    assert found.what.startswith(what)
    assert found.where == "/b c.py:5 in g: use(self)"
    assert cause(guard, {"module.c": "here"}).where == ("here" if kind == "size" else None)


def test_a_place_in_a_comment() -> None:
    reason = "1/6: args[1] == 9  # s.k[:B, n]=k  # x/styles.py:116 in forward (_dynamo/utils.py:4231 in run_node)"
    assert cause(reason, {}).where == "x/styles.py:116 in forward: s.k[:B, n]=k"
