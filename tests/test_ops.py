"""The ops' place in torch: schemas, fake functions, FLOPs, compilation, export, gradients."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels.call import DecodeCall, IndexCall
from mla_compile.kernels.cpu import decode as cpu
from tests.support.cpu_cases import Case, check
from tests.support.index_cases import IndexCase, close
from tests.support.paged_calls import FEATURES, PAGE, B, H, L, R, S, pages
from tests.support.tiers import also


@dataclass
class Sample:
    case: Case
    mask: Tensor | None = None
    names: list[str] = field(default_factory=lambda: ["query", "latent", "rope", "values"])

    def arguments(self) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
        tensors = self.case.tensors()
        return (*(tensors[n] for n in self.names), self.mask), {"scale": 0.3, "causal": self.case.causal}


SAMPLES = [
    Sample(Case(T=9)),
    Sample(Case(B=2, S=3, T=9, R=0, strided=True)),
    Sample(Case(T=9, Lv=5, dtype=torch.bfloat16, query_dtype=torch.float32)),
    Sample(Case(B=2, S=3, T=9, causal=True, strided=True), torch.rand(2, 1, 3, 9) < 0.7),
    Sample(Case(B=2, T=130, H=2, dtype=torch.float64), torch.randn(2, 2, 1, 1)),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: str(s.case))
def test_opcheck_of_samples(sample: Sample):
    args, kwargs = sample.arguments()
    assert set(torch.library.opcheck(ops.decode_attention, args, kwargs).values()) == {"SUCCESS"}


def op_arguments(**changed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = pages()
    cache = x["kv_pages"].nan_to_num(0.0)
    order = (x["query"], cache[..., :L], cache[..., L:], x["block_table"].clamp(min=0), x["seq_lens"])
    return order, {"scale": 0.3, **changed}


@pytest.mark.parametrize("how", FEATURES, ids=lambda how: ",".join(how) or "plain")
def test_opcheck_of_the_paged_op(how: dict[str, Any]):
    args, kwargs = op_arguments(**how)
    assert set(torch.library.opcheck(ops.paged_decode_attention, args, kwargs).values()) == {"SUCCESS"}


@pytest.mark.parametrize("how", FEATURES, ids=lambda how: ",".join(how) or "plain")
def test_opcheck_of_the_dense_op(how: dict[str, Any]):
    args = (torch.randn(2, S, H, L + R), torch.randn(2, 9, L), torch.randn(2, 9, R))
    kwargs = {"scale": 0.3, "seq_lens": torch.tensor([4, 9], dtype=torch.int32), **how}
    assert set(torch.library.opcheck(ops.decode_attention, args, kwargs).values()) == {"SUCCESS"}


@pytest.mark.parametrize("paged", [False, True])
def test_opcheck_of_the_schedule_and_of_calls_that_are_given_it(paged: bool):
    if paged:
        args, kwargs = op_arguments()
        order, table = (*args[:3], None, None, args[4]), {"block_table": args[3]}
        op, count = ops.paged_decode_attention, (2 * 146 + 3 * 4) // 2
    else:
        mask = torch.rand(2, 1, 3, 40) < 0.7
        args = order = (torch.randn(2, 3, H, L + R), torch.randn(2, 40, L), torch.randn(2, 40, R), None, mask)
        table = {}
        op, kwargs, count = ops.decode_attention, {"scale": 0.3, "causal": True}, 6 * 2 * 3
    assert set(torch.library.opcheck(ops.decode_schedule, order, {**kwargs, **table}).values()) == {"SUCCESS"}
    schedule = ops.decode_schedule(*order, **kwargs, **table)
    assert (schedule.shape, schedule.dtype) == ((count,), torch.int64)
    given = {**kwargs, "schedule": schedule}
    assert set(torch.library.opcheck(op, args, given).values()) == {"SUCCESS"}
    for got, want in zip(op(*args, **given), op(*args, **kwargs), strict=True):
        assert torch.equal(got, want)


def test_a_schedule_has_no_gradient_and_needs_none():
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    query = torch.randn(1, 1, 4, 16, requires_grad=True)
    assert not ops.decode_schedule(query, torch.randn(1, 9, 16), mask=mask, scale=0.3).requires_grad


def test_flops_of_the_paged_op():
    args, kwargs = op_arguments()
    with FlopCounterMode(display=False) as counter:
        ops.paged_decode_attention(*args, **kwargs)
    assert counter.get_total_flops() == 2 * B * S * H * 4 * PAGE * (L + R + L)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


GOOD: dict[str, Tensor] = {"query": tensor(2, 3, 4, 24), "latent": tensor(2, 9, 16), "rope": tensor(2, 9, 8)}


def test_flops_of_the_dense_op():
    with FlopCounterMode(display=False) as counter:
        ops.decode_attention(**GOOD, scale=1.0)
        ops.decode_attention(
            GOOD["query"], **{k: GOOD[k] for k in ("latent", "rope")}, values=tensor(2, 9, 5), scale=1.0
        )
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 9 * (24 + 16) + 2 * 2 * 3 * 4 * 9 * (24 + 5)


def test_fake_tensors_keep_dtype_and_symbolic_sizes():
    with torch._subclasses.FakeTensorMode():
        query, latent = torch.empty(2, 1, 4, 20), torch.empty(2, 7, 16, dtype=torch.bfloat16)
        rope, values = torch.empty(2, 7, 4, dtype=torch.bfloat16), torch.empty(2, 7, 5, dtype=torch.bfloat16)
        out, lse = ops.decode_attention(query, latent, rope, values, scale=1.0)
    assert (out.shape, out.dtype) == ((2, 1, 4, 5), torch.float32)
    assert (lse.shape, lse.dtype) == ((2, 1, 4), torch.float32)


@pytest.mark.parametrize("dynamic", [True, *also("combination", False)])
@torch.no_grad()
def test_inductor_passes_a_strided_cache_without_copying_it(dynamic: bool, monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, tuple[int, ...]]] = []
    kernel = cpu.decode_attention

    def recorded(call: DecodeCall) -> tuple[Tensor, Tensor]:
        assert call.rope is not None
        seen.extend((rows.data_ptr(), rows.stride()) for rows in (call.latent, call.rope))
        return kernel(call)

    monkeypatch.setattr(cpu, "decode_attention", recorded)

    def step(query: Tensor, cache: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        cache[:, :, 3] = rows  # written in place, as a static cache is
        out, _ = ops.decode_attention(query * 2, cache[:, 0, : keys.shape[2], :16], keys[:, 0], scale=0.3)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for T in (9, 12):
        query, cache, rows = torch.randn(2, 1, 4, 24), torch.randn(2, 1, 20, 24), torch.randn(2, 1, 24)
        keys = torch.randn(2, 1, 20, 8)[:, :, :T]
        want = step(query, cache.clone(), keys, rows)
        seen.clear()
        torch.testing.assert_close(compiled(query, cache, keys, rows), want)
        assert seen == [(cache.data_ptr(), (480, 24, 1)), (keys.data_ptr(), (160, 8, 1))]


@torch.no_grad()
def test_export_with_dynamic_tokens():
    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, latent: Tensor, mask: Tensor) -> Tensor:
            schedule = ops.decode_schedule(query, latent, mask=mask, scale=0.3)
            return ops.decode_attention(query, latent, None, None, mask, schedule=schedule, scale=0.3)[0]

    T = torch.export.Dim("T")
    inputs = (torch.randn(1, 1, 4, 16), torch.randn(1, 9, 16), torch.ones(1, 1, 1, 9, dtype=torch.bool))
    program = torch.export.export(Attend(), inputs, dynamic_shapes=({}, {1: T}, {3: T}))
    query, latent, mask = torch.randn(1, 1, 4, 16), torch.randn(1, 33, 16), torch.ones(1, 1, 1, 33, dtype=torch.bool)
    torch.testing.assert_close(program.module()(query, latent, mask), Attend()(query, latent, mask))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_refused(compiled: bool):
    query, latent = torch.randn(1, 1, 4, 16, requires_grad=True), torch.randn(1, 9, 16)

    def call(query: Tensor, latent: Tensor) -> Tensor:
        return ops.decode_attention(query, latent, scale=0.3)[0]

    run = torch.compile(call, backend="aot_eager") if compiled else call
    with pytest.raises(Exception, match="has no gradient"):
        run(query, latent)
    with torch.no_grad():
        assert not run(query, latent).requires_grad


def test_gradient_error_is_of_our_family():
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        ops.decode_attention(torch.randn(1, 1, 4, 16, requires_grad=True), torch.randn(1, 9, 16), scale=0.3)


def test_a_second_import_is_harmless():
    before = torch.ops.mla_compile.decode_attention.default
    importlib.reload(ops)
    spec = importlib.util.spec_from_file_location("another_name_for_ops", ops.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.decode_attention is before
    check(Case())


INDEXERS = [
    IndexCase(T=9).call(torch.float32),
    IndexCase(T=9, strided=True).call(torch.bfloat16),
    IndexCase(T=9, query=torch.float32).call(torch.float16),
    IndexCase(T=1, S=1, B=1).call(torch.float64),
    IndexCase(T=0).call(torch.float32),
]


@pytest.mark.parametrize("call", INDEXERS, ids=lambda call: f"{call.keys.dtype}, {call.keys.shape[1]} keys")
def test_opcheck_of_the_indexer(call: IndexCall):
    assert set(torch.library.opcheck(ops.index_scores, tuple(call)).values()) == {"SUCCESS"}


def test_flops_of_the_indexer():
    call = IndexCase(B=2, S=3, J=5, T=301, D=37).call(torch.float32)
    with FlopCounterMode(display=False) as counter:
        ops.index_scores(*call)
    assert counter.get_total_flops() == 2 * 2 * 3 * 5 * 301 * (37 + 1)


def test_the_indexer_has_no_gradient():
    call = IndexCase(T=9).call(torch.float32)
    with pytest.raises(InputError, match="mla_compile::index_scores has no gradient"):
        ops.index_scores(call.query.requires_grad_(), *call[1:])


@pytest.mark.parametrize("backend", ["aot_eager", *also("inductor", "inductor")])
@torch.no_grad()
def test_the_indexer_compiled_for_any_context(backend: str):
    def scored(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.mla_compile.index_scores(query, keys, weights, 0.3) + 1

    step = torch.compile(scored, dynamic=True, backend=backend)
    for T in (9, 301, 40):
        call = IndexCase(T=T).call(torch.float32)
        close(step(*call[:3]) - 1, call)
