"""Rows of which every key is hidden by a finite number: the mean of all rows in them, and nothing else changed."""

import pytest
import torch

import mla_compile.ops  # noqa: F401  registers the op
from mla_compile.errors import InputError
from mla_compile.kernels.alike import mean_of, weigh_alike

OP = torch.ops.mla_compile.weigh_alike
LOW = torch.finfo(torch.float32).min


def given(B=3, S=2, H=4, T=7, Lv=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(B + T)
    out = torch.randn(B, S, H, Lv, generator=generator).to(dtype)
    values = torch.randn(B, T, Lv, generator=generator).to(dtype)
    lse = torch.randn(B, S, H, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    return out, lse, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_hidden_rows_get_the_mean_of_all(dtype):
    out, lse, values = given(dtype=dtype)
    lse[0, 1, 2], lse[2, :, 0], lse[2, 0, 1] = LOW, -torch.inf, -1e28
    hidden = torch.zeros(out.shape[:3], dtype=torch.bool)
    hidden[0, 1, 2] = hidden[2, :, 0] = True
    found, kept = OP(out, lse, values, -1e29), out.clone()
    assert found.dtype == dtype
    assert torch.equal(found[~hidden], out[~hidden])
    want = values.double().mean(1)[:, None, None].expand(out.shape)[hidden]
    torch.testing.assert_close(
        found[hidden].double(),
        want,
        rtol=2 * torch.finfo(dtype).eps,
        atol=1e-2 * want.abs().max() if dtype.itemsize == 2 else 1e-6,
    )
    assert torch.equal(out, kept)


def test_without_a_hidden_row_the_values_are_not_looked_at():
    out, lse, values = given()
    found = OP(out, lse, torch.full_like(values, torch.nan), -1e29)
    assert torch.equal(found, out)
    assert found.data_ptr() != out.data_ptr()


@pytest.mark.parametrize("sizes", [{"T": 0}, {"S": 0}, {"B": 0}, {"T": 1}], ids=str)
def test_empty_sizes(sizes):
    out, lse, values = given(**sizes)
    found = OP(out, torch.full_like(lse, -torch.inf), values, -1e29)
    assert torch.equal(found, mean_of(values)[:, None, None].expand(out.shape))


def test_in_a_compiled_graph_with_sizes_that_grow():
    fn = torch.compile(lambda *x: OP(*x) * 2, dynamic=True, fullgraph=True, backend="aot_eager")
    for T in (7, 9):
        out, lse, values = given(T=T)
        lse[1, 0] = LOW
        torch.testing.assert_close(fn(out, lse, values, -1e29), 2 * weigh_alike(out, lse, values, -1e29))
    torch.library.opcheck(OP.default, (*given(), -1e29))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_what_does_not_fit_is_refused(wrong):
    arguments = list(given())
    arguments[wrong] = arguments[wrong][..., :1]
    with pytest.raises(InputError, match=r"weigh_alike: got out \[3, 2, 4, .*expected out \[B,S,H,Lv\]"):
        OP(*arguments, -1e29)
