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


def beside_a_mask(shape, dtype):
    """The op's arguments, with hidden rows of every kind."""
    generator = torch.Generator().manual_seed(3)
    out, lse, values = given(dtype=dtype)
    low = torch.finfo(dtype).min
    numbers = torch.tensor([low, low, low / 2, -torch.inf], dtype=dtype)
    mask = numbers[torch.randint(4, (*shape, 7), generator=generator)]
    indices = torch.randint(-1, 8, (3, 2, 4), generator=generator, dtype=torch.int32)  # 7 names no key, as -1
    lse[0], lse[2, 1] = -torch.inf, low
    return out, lse, values, -1e29, mask, indices, low


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4, 2), (1, 1, 1), (3, 1, 2)], ids=str)
def test_beside_a_mask_the_greatest_number_decides(shape, dtype):
    """Compared with a softmax of the numbers in float64, written out."""
    out, lse, values, _, mask, indices, low = beside_a_mask(shape, dtype)
    whole = torch.full((3, 4, 2, 7), low, dtype=torch.float64)
    for b in range(3):
        for s in range(2):
            for t in indices[b, s].tolist():
                if 0 <= t < 7:
                    whole[b, :, s, t] = mask.expand(3, 4, 2, 7)[b, :, s, t].double()
    want = torch.einsum("bhst,btv->bshv", whole.softmax(-1), values.double())
    want = torch.where((lse <= -1e29)[..., None], want, out.double())
    found = OP(*beside_a_mask(shape, dtype))
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.singly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3, 4, 2), (1, 1, 1), (3, 1, 2)], ids=str)
def test_opcheck_beside_a_mask(shape, dtype):
    torch.library.opcheck(OP.default, beside_a_mask(shape, dtype))


def test_a_mask_is_looked_at_where_a_row_is_hidden_only():
    out, lse, values = given()
    mask, indices = torch.full((3, 1, 2, 7), torch.nan), torch.zeros(3, 2, 1, dtype=torch.int32)
    assert torch.equal(OP(out, lse, values, -1e29, mask, indices, LOW), out)


@pytest.mark.parametrize(
    ("mask", "indices", "text"),
    [
        ((3, 1, 2, 7), None, "no indices; expected both"),
        (None, (3, 2, 1), "no mask; expected both"),
        ((3, 1, 2, 6), (3, 2, 1), r"mask is .* expected floats \[3, 4, 2, 7\]"),
        ((3, 1, 2, 7), (3, 1, 1), r"indices is \[3, 1, 1\], expected \[B,S,k\]"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(mask, indices, text):
    given_mask = None if mask is None else torch.zeros(mask)
    given_indices = None if indices is None else torch.zeros(indices, dtype=torch.int32)
    with pytest.raises(InputError, match=f"weigh_alike: .*{text}"):
        OP(*given(), -1e29, given_mask, given_indices, LOW)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_what_does_not_fit_is_refused(wrong):
    arguments = list(given())
    arguments[wrong] = arguments[wrong][..., :1]
    with pytest.raises(InputError, match=r"weigh_alike: got out \[3, 2, 4, .*expected out \[B,S,H,Lv\]"):
        OP(*arguments, -1e29)
