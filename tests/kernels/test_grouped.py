"""Products of sorted rows with one weight for each group: against float64, by every way in which a group may run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.errors import InputError
from mla_compile.kernels import grouped, linear
from mla_compile.kernels.cpu import native

product: Callable[..., Tensor] = torch.ops.mla_compile.grouped_linear.default
BOUND = {torch.float64: 1e-14, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}

pytestmark = pytest.mark.usefixtures("kernel")


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def expected(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """In float64, from the group of every row."""
    groups = torch.bucketize(torch.arange(len(x)), ends, right=True)
    used = int(ends[-1]) if len(ends) else 0
    out = x.new_zeros(len(x), weight.shape[1], dtype=torch.float64)
    out[:used] = torch.einsum("mk,mok->mo", x[:used].double(), weight[groups[:used]].double())
    return out


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_groups_of_every_size(dtype: torch.dtype, index: torch.dtype, wide: bool):
    """Groups of no row, of one, of a few, of many; rows after the last group; weights within a larger tensor."""
    weight = seeded(7, 33, 40, dtype=dtype)
    ends = torch.tensor([0, 1, 4, 4, 24, 59, 60], dtype=index)
    for rows, own in ((60, weight), (63, weight[:, :, 2:35]), (60, weight[:, ::2])):
        x = seeded(rows, own.shape[2], dtype=dtype)
        got, want = product(x, own, ends, 4, wide=wide), expected(x, own, ends)
        assert (got.shape, got.dtype) == (want.shape, dtype)
        assert (got - want).norm() <= BOUND[dtype] * want.norm()
        assert not got[60:].any()


def test_as_torch_has_it():
    x, weight = seeded(24, 64, dtype=torch.bfloat16), seeded(3, 48, 64, dtype=torch.bfloat16)
    ends = torch.tensor([5, 5, 24], dtype=torch.int32)
    torch.testing.assert_close(product(x, weight, ends), torch._grouped_mm(x, weight.mT, ends), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_at_all(dtype: torch.dtype):
    for rows, experts, out, width in ((0, 3, 5, 8), (20, 0, 5, 8), (20, 2, 0, 8), (20, 2, 5, 0)):
        ends = torch.full((experts,), rows, dtype=torch.int32)
        got = product(seeded(rows, width, dtype=dtype), seeded(experts, out, width, dtype=dtype), ends, wide=True)
        assert got.shape == (rows, out)
        assert not got.any()


def test_which_groups_run_in_the_kernel(kernel: str, monkeypatch: pytest.MonkeyPatch):
    taken: list[int] = []
    multiply = native.few_rows_product
    monkeypatch.setattr(native, "few_rows_product", lambda *args: (taken.append(args[1].shape[1]), multiply(*args))[1])
    ends = torch.tensor([1, 4, 40, 41, 100]).int()
    for most in (0, 3, 1000):
        taken.clear()
        product(seeded(100, 16), seeded(5, 8, 16), ends, most)
        sizes = [n for n in (1, 3, 36, 1, 59) if n <= min(most, linear.MOST)]
        assert taken == (sizes if kernel == "native" else [])


def test_ends_that_do_not_fit_read_no_memory_of_others():
    x, weight = seeded(4, 8), seeded(3, 5, 8)
    for ends in ([4, 2, 9], [-3, 100, 4], [0, 0, 0]):
        assert product(x, weight, torch.tensor(ends)).shape == (4, 5)


def test_autocast_gradients_and_compiled_graphs():
    x, weight, ends = seeded(6, 16), seeded(2, 8, 16), torch.tensor([2, 6])
    want = product(x, weight, ends)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(product(x, weight, ends), want)
    with pytest.raises(InputError, match="gradient"):
        product(x.clone().requires_grad_(), weight, ends)
    with FlopCounterMode(display=False) as counted:
        product(x, weight, ends)
    assert counted.get_total_flops() == 2 * 6 * 16 * 8
    torch.library.opcheck(
        product, (x, weight, ends), test_utils=["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    )


ENDS = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("x", "weight", "ends", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 4, 5), ENDS, r"are \[2, 3\], \[2, 4, 5\], \[2\]; expected \[M,K\]"),
        (torch.ones(1, 2, 3), torch.ones(2, 4, 3), ENDS, r"\[1, 2, 3\]"),
        (torch.ones(2, 3), torch.ones(4, 3), ENDS, r"\[4, 3\]"),
        (torch.ones(2, 3), torch.ones(3, 4, 3), ENDS, r"\[2\]; expected"),
        (torch.ones(2, 3), torch.ones(2, 4, 3).double(), ENDS, "torch.float64 on cpu.*; expected x and weight of one"),
        (torch.ones(2, 3), torch.ones(2, 4, 3), ENDS.float(), "integers as ends"),
        (torch.ones(2, 3), torch.ones(2, 4, 3, device="meta"), ENDS, "one device"),
    ],
)
def test_wrong_arguments(x: Tensor, weight: Tensor, ends: Tensor, message: str):
    with pytest.raises(InputError, match=message):
        grouped.run(x, weight, ends)
