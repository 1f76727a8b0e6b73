"""What guards the GPU benchmarks: the comparison with the truth, and problems that punish a read out of place."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import compare, kernels_bench
from benchmarks.gpu.cases import Shape, poisoned, problem
from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall

CPU = torch.device("cpu")


def _pair() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    out = torch.randn(2, 1, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 10
    lse = torch.randn(2, 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out[1, 0, 2], lse[1, 0, 2] = 0, -torch.inf
    return (out.to(torch.bfloat16), lse.float()), (out, lse)


def test_compare_accepts_rounding():
    got, want = _pair()
    row = compare.compare(got, want, torch.bfloat16)
    assert "status" not in row, row
    assert 0 < row["out_relative"] < 5e-3


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out, lse: out[0, 0, 0].fill_(float("nan")), "32 elements of out are not finite"),
        (lambda out, lse: out[0, 0, 1].mul_(1.05), "elements of out off, by up to"),
        (lambda out, lse: out[1, 0, 2].fill_(1e-5), "a row that sees nothing is not zero"),
        (lambda out, lse: lse[0, 0, 1].add_(1e-3), "1 of 6 elements of lse off"),
        (lambda out, lse: lse[0, 0, 1].fill_(-torch.inf), "lse is minus infinity in other rows"),
        (lambda out, lse: lse[0, 0, 1].fill_(float("nan")), "1 of 6 elements of lse off"),
    ],
)
def test_compare_refuses(spoil, said):
    got, want = _pair()
    spoil(*got)
    row = compare.compare(got, want, torch.bfloat16)
    assert row["status"] == "failed"
    assert said in row["error"]


def test_compare_names_a_wrong_shape():
    got, want = _pair()
    assert "out is" in compare.compare((got[0][:1], got[1]), want, torch.bfloat16)["error"]
    assert "lse is" in compare.compare((got[0], got[1][:1]), want, torch.bfloat16)["error"]


def test_problems_hide_nan_in_all_that_no_request_owns():
    posed = problem(Shape(B=5, kv=150, H=2, L=16, R=8), CPU, seed=1, how="zeros")
    assert posed.table is not None
    rows = posed.rows(150)
    seen = torch.arange(150)[None] < posed.lens[:, None]
    assert not rows[seen].isnan().any()
    assert rows[~seen].isnan().all()
    assert posed.lens[0] == 150
    assert (posed.lens == 0).any()
    used = (posed.table >= 0).sum(1)
    assert torch.equal(used, -(-posed.lens // 64))
    own = posed.table[posed.table >= 0]
    assert len(own.unique()) == len(own)
    fresh = problem(posed.shape, CPU, seed=2)
    assert not torch.equal(fresh.query, posed.query)


def test_truth_is_the_reference_of_the_gathered_rows():
    posed = problem(Shape(B=2, kv=20, H=3, L=16, R=8, page=16), CPU, seed=3)
    rows = posed.rows(20).double()
    call = DecodeCall(posed.query.double(), rows[..., :16], rows[..., 16:], scale=posed.shape.scale)
    want = reference.decode_attention(call)
    torch.testing.assert_close(posed.truth(), want)


def test_poisoned_memory_is_nan_and_the_settings_come_back():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(7).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_costs_are_those_of_the_formulas():
    moved, flops = Shape(B=2, kv=100, H=16, S=3).cost()
    assert moved == 2 * 100 * 576 * 2 + 2 * 3 * 16 * (512 + 64 + 512) * 2
    assert flops == 2 * 2 * 3 * 16 * 100 * (576 + 512)


def test_the_grid_begins_with_what_the_targets_speak_of():
    shapes = kernels_bench.shapes(dry=False)
    assert len(shapes) == len(set(shapes)) == 125
    first = [(s.B, s.kv, s.H) for s in shapes[:6]]
    assert first[:2] == [(128, 8192, 16), (128, 8192, 128)]
    assert {B for B, _, _ in first} == {1, 32, 128}
