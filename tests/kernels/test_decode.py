"""The public functions of kernels/decode.py, the two ops' place in torch, and a launch, without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mla_compile import ops
from mla_compile.errors import InputError
from mla_compile.kernels import decode, reference
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.triton import launch
from mla_compile.kernels.triton.steps import Call, scratch, steps

FP8 = torch.float8_e4m3fn
B, S, H, L, R, PAGE = 3, 2, 4, 24, 8, 16
LENS = (37, 0, 50)


def pages(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """query, kv_pages [P,page,L+R] with NaN wherever no request has a token, block_table with -1 there, seq_lens."""
    g = torch.Generator().manual_seed(0)
    table = torch.full((B, 4), -1, dtype=torch.int32)
    table[0, :3] = torch.tensor([7, 1, 4])
    table[2] = torch.tensor([0, 6, 2, 5])
    cache = torch.randn(9, PAGE, L + R, generator=g)
    used = torch.zeros(9, PAGE, dtype=torch.bool)
    for b, length in enumerate(LENS):
        for t in range(length):
            used[table[b, t // PAGE], t % PAGE] = True
    cache[~used] = torch.nan
    query = torch.randn(B, S, H, L + R, generator=g)
    return {
        "query": query.to(dtype),
        "kv_pages": cache.to(dtype),
        "block_table": table,
        "seq_lens": torch.tensor(LENS, dtype=torch.int32),
    }


def gathered(x: dict[str, Tensor]) -> Tensor:
    """[B,T,L+R]: each request's rows in order, by a loop over tokens; zeros past its length."""
    rows = torch.zeros(B, 4 * PAGE, L + R, dtype=x["kv_pages"].dtype)
    for b, length in enumerate(LENS):
        for t in range(length):
            rows[b, t] = x["kv_pages"][x["block_table"][b, t // PAGE], t % PAGE]
    return rows


FEATURES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"window": 5},
    {"softcap": 2.0, "sinks": torch.randn(H)},
    {"num_splits": 3},
    {"deterministic": True},
]


@pytest.mark.parametrize("how", FEATURES, ids=lambda how: ",".join(how) or "plain")
def test_paged_is_contiguous_of_the_gathered_rows(how: dict[str, Any]):
    x = pages()
    out, lse = decode.paged_decode_attention(**x, latent_width=L, scale=0.3, **how)
    rows = gathered(x)
    want, want_lse = decode.decode_attention(
        x["query"], rows[..., :L], rows[..., L:], scale=0.3, seq_lens=x["seq_lens"], **how
    )
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    assert not out[1].any()
    assert (lse[1] == -torch.inf).all()


def test_forms_of_a_paged_cache_agree():
    x = pages()
    want = decode.paged_decode_attention(**x, latent_width=L, scale=0.3)[0]
    cache = x.pop("kv_pages")
    for given in (cache[:, :, None], (cache[..., :L], cache[..., L:])):
        width = {} if isinstance(given, tuple) else {"latent_width": L}
        got = decode.paged_decode_attention(x["query"], given, x["block_table"], x["seq_lens"], scale=0.3, **width)[0]
        assert torch.equal(got, want)
    got = decode.paged_decode_attention(
        x["query"][..., :L], (cache[..., :L], None), x["block_table"], x["seq_lens"], scale=0.3
    )[0]
    assert got.shape == want.shape


def test_a_head_axis_is_taken_off():
    query, rows = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 9, 32)
    want = decode.decode_attention(query, rows[:, 0, :, :24], rows[:, 0, :, 24:], scale=0.3)[0]
    assert torch.equal(decode.decode_attention(query, rows[..., :24], rows[..., 24:], scale=0.3)[0], want)


def by_hand(query: Tensor, rows: Tensor, scale: float, window: int, softcap: float, sinks: Tensor) -> Tensor:
    """[S,H,L] of one causal request, one query row and one key at a time, with the sink as a key without a value."""
    T = rows.shape[0]
    out = torch.zeros(query.shape[0], query.shape[1], L, dtype=torch.float64)
    for s in range(query.shape[0]):
        own = T - query.shape[0] + s
        for h in range(query.shape[1]):
            seen = [t for t in range(T) if own - window < t <= own]
            score = torch.stack([scale * query[s, h] @ rows[t] for t in seen])
            score = torch.cat([softcap * torch.tanh(score / softcap), sinks[h : h + 1]])
            weight = torch.softmax(score, dim=0)[:-1]
            out[s, h] = sum(w * rows[t, :L] for w, t in zip(weight, seen, strict=True))
    return out


def test_reference_by_hand():
    g = torch.Generator().manual_seed(1)
    query, rows = torch.randn(2, 3, L + R, generator=g).double(), torch.randn(11, L + R, generator=g).double()
    sinks = torch.randn(3, generator=g).double()
    room = torch.cat([rows, torch.full((5, L + R), torch.nan).double()])[None]
    got, lse = reference.decode_attention(
        query[None], room[..., :L], room[..., L:], scale=0.4, causal=True, window=6, softcap=1.5, sinks=sinks,
        seq_lens=torch.tensor([11], dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(got[0], by_hand(query, rows, 0.4, 6, 1.5, sinks))
    without, same = reference.decode_attention(
        query[None], room[..., :L], room[..., L:], scale=0.4, causal=True, window=6, softcap=1.5,
        seq_lens=torch.tensor([11], dtype=torch.int32),
    )  # fmt: skip
    assert torch.equal(lse, same), "the sink is not in lse"
    torch.testing.assert_close(got, without * torch.sigmoid(lse - sinks)[..., None])


@pytest.mark.parametrize("form", ["tensor", "token"])
@pytest.mark.parametrize("paged", [False, True])
def test_fp8_rows_are_multiplied_by_their_scale(form: str, paged: bool):
    x = pages()
    cache = x["kv_pages"].nan_to_num(0.0).to(FP8)
    scale = torch.tensor(0.3) if form == "tensor" else torch.rand(cache.shape[:2])
    exact = cache.float() * (scale if form == "tensor" else scale[..., None])
    table, lens = x["block_table"], x["seq_lens"]
    if paged:
        got = decode.paged_decode_attention(x["query"], cache, table, lens, latent_width=L, kv_scale=scale, scale=0.3)
        want = decode.paged_decode_attention(x["query"], exact, table, lens, latent_width=L, scale=0.3)
    else:
        q = x["query"][:1].expand(9, -1, -1, -1)
        got = decode.decode_attention(q, cache[..., :L], cache[..., L:], kv_scale=scale, scale=0.3)
        want = decode.decode_attention(q, exact[..., :L], exact[..., L:], scale=0.3)
    torch.testing.assert_close(got, want)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


BAD_PAGED: list[tuple[dict[str, Any], str]] = [
    ({"query": torch.zeros(B, H, L + R)}, r"query is \[3, 4, 32\], expected \[B,S,H,L\+R\]"),
    ({"kv_pages": torch.zeros(9, PAGE, 2, L + R)}, r"expected \[P,page,width\]"),
    ({"kv_pages": torch.zeros(9, 24, L + R)}, "page size is 24, expected one of"),
    ({"kv_pages": torch.zeros(9, PAGE, 30)}, r"query is 32 wide, expected L\+R = 24\+6"),
    ({"latent_width": None}, r"latent_width is None, expected the L of kv_pages' L\+R = 32"),
    ({"latent_width": 40}, "latent_width is 40"),
    ({"kv_pages": (torch.zeros(9, PAGE, L), torch.zeros(8, PAGE, R)), "latent_width": None}, "rope_pages is"),
    ({"kv_pages": (torch.zeros(9, PAGE, L), None), "latent_width": 25}, "latent_pages are 24 wide"),
    ({"kv_pages": torch.zeros(9, PAGE, L + R, dtype=torch.float64)}, "query is torch.float32, expected torch.float64"),
    ({"kv_pages": torch.zeros(9, PAGE, L + R, device="meta")}, "latent is on meta, expected cpu"),
    ({"block_table": ints(B, 4, dtype=torch.int64)}, r"block_table is torch.int64 .* expected int32 \[B,maxpages\]"),
    ({"block_table": ints(2, 4)}, "B of block_table is 2, expected 3"),
    ({"block_table": ints(4, B).t()}, "not contiguous"),
    ({"seq_lens": ints(B, dtype=torch.int64)}, r"seq_lens is torch.int64 .* expected int32 \[B\]"),
    ({"seq_lens": ints(2)}, "B of seq_lens is 2, expected 3"),
    ({"seq_lens": torch.tensor([37, 0, 65], dtype=torch.int32)}, "seq_lens holds 65, the block table has room for 64"),
    ({"seq_lens": torch.tensor([37, -1, 50], dtype=torch.int32)}, "seq_lens holds -1"),
    (
        {"seq_lens": torch.tensor([49, 0, 50], dtype=torch.int32)},
        r"block_table\[0,3\] is -1, expected a page of \[0, 9\)",
    ),
    ({"block_table": ints(B, 4) * 9}, r"block_table\[0,0\] is 9"),
    ({"sinks": torch.zeros(5)}, "H of sinks is 5, expected 4"),
    ({"kv_scale": torch.ones(())}, "kv_scale is for an fp8 cache"),
    ({"softcap": -1.0}, "softcap is -1.0"),
    ({"window": -2}, "window is -2"),
    ({"num_splits": -1}, "num_splits is -1"),
    ({"num_splits": 2, "deterministic": True}, "give one of them"),
]


@pytest.mark.parametrize(("change", "message"), BAD_PAGED, ids=[m for _, m in BAD_PAGED])
def test_bad_paged_input(change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        decode.paged_decode_attention(**{**pages(), "latent_width": L, "scale": 0.3, **change})


DENSE = {"query": torch.zeros(2, 3, 4, 24), "latent": torch.zeros(2, 9, 16), "rope": torch.zeros(2, 9, 8)}
FP8_DENSE = {**DENSE, "latent": torch.zeros(2, 9, 16).to(FP8), "rope": torch.zeros(2, 9, 8).to(FP8)}
BAD_DENSE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (DENSE, {"seq_lens": ints(2, 1)}, r"seq_lens is torch.int32 \[2, 1\], expected int32 \[B\]"),
    (DENSE, {"seq_lens": ints(3)}, "B of seq_lens is 3, expected 2"),
    (DENSE, {"seq_lens": torch.ones(2, dtype=torch.int32, device="meta")}, "seq_lens is on meta, expected cpu"),
    (DENSE, {"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks is torch.float64"),
    (FP8_DENSE, {}, "kv_scale is missing; pass a scale"),
    (FP8_DENSE, {"kv_scale": torch.ones((), dtype=torch.float64)}, "kv_scale is torch.float64, expected float32"),
    (FP8_DENSE, {"kv_scale": torch.ones(2)}, r"kv_scale is \[2\], expected \[\] or \[B,T\]"),
    (FP8_DENSE, {"kv_scale": torch.ones(()), "values": torch.zeros(2, 9, 5).to(FP8)}, "not supported"),
    (FP8_DENSE, {"kv_scale": torch.ones(()), "query": torch.zeros(2, 3, 4, 24).double()}, "beside an fp8 cache"),
    (FP8_DENSE, {"kv_scale": torch.ones(()), "rope": torch.zeros(2, 9, 8)}, "rope is torch.float32"),
    (
        FP8_DENSE,
        {"kv_scale": torch.ones(()), "rope": torch.zeros(2, 9, 8).half(), "query": torch.zeros(2, 3, 4, 24).bfloat16()},
        "expected torch.float16 as rope",
    ),
]


@pytest.mark.parametrize(("given", "change", "message"), BAD_DENSE, ids=[m for *_, m in BAD_DENSE])
def test_bad_dense_input(given: dict[str, Tensor], change: dict[str, Any], message: str):
    for function in (decode.decode_attention, ops.decode_attention):
        with pytest.raises(InputError, match=message):
            function(**{**given, **change}, scale=0.3)


def test_gradients_are_refused():
    x = pages()
    x["query"].requires_grad_()
    for call in (
        lambda: decode.paged_decode_attention(**x, latent_width=L, scale=0.3),
        lambda: decode.decode_attention(
            DENSE["query"].clone().requires_grad_(), DENSE["latent"], DENSE["rope"], scale=1.0
        ),
        lambda: ops.paged_decode_attention(
            x["query"], x["kv_pages"][..., :L], x["kv_pages"][..., L:], x["block_table"], x["seq_lens"], scale=0.3
        ),
    ):
        with pytest.raises(InputError, match="has no gradient"):
            call()
    with torch.no_grad():
        decode.paged_decode_attention(**x, latent_width=L, scale=0.3)


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


def test_flops_of_the_paged_op():
    args, kwargs = op_arguments()
    with FlopCounterMode(display=False) as counter:
        ops.paged_decode_attention(*args, **kwargs)
    assert counter.get_total_flops() == 2 * B * S * H * 4 * PAGE * (L + R + L)


@torch.no_grad()
def test_compiled_calls_become_the_ops():
    x = pages()
    counts: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        counts.append([str(n.target) for n in gm.graph.nodes if "decode_attention" in str(n.target)])
        return gm.forward

    def paged(query: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
        return decode.paged_decode_attention(query, cache, table, lens, latent_width=L, scale=0.3, causal=True)[0]

    def dense(query: Tensor, rows: Tensor) -> Tensor:
        return decode.decode_attention(query, rows[..., :L], rows[..., L:], scale=0.3, window=4, num_splits=2)[0]

    given = (x["query"], x["kv_pages"], x["block_table"], x["seq_lens"])
    torch.testing.assert_close(torch.compile(paged, fullgraph=True, backend=backend)(*given), paged(*given))
    rows = torch.randn(B, 1, 9, L + R)
    got = torch.compile(dense, fullgraph=True, backend=backend)(x["query"], rows)
    torch.testing.assert_close(got, dense(x["query"], rows))
    assert counts == [["mla_compile.paged_decode_attention"], ["mla_compile.decode_attention"]]


def test_without_triton_one_line_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    launch.available.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mla_compile.kernels"):
        assert not launch.available()
        assert not launch.available()
    launch.available.cache_clear()
    (record,) = caplog.records
    assert "runs the reference" in record.message


# What a launch is made of. Tensors on the meta device: shapes, strides and dtypes are all it depends on.


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(**changed: Any) -> Call:
    rows = meta(8, 4096, 576)
    return Call(meta(8, 1, 16, 576), rows[..., :512], rows[..., 512:], scale=0.1)._replace(**changed)


PLAN = Plan("triton", 16, 32, 4, 3, 4, None, 0)


def constants(step: Any) -> dict[str, Any]:
    return {name: value for name, value in step.constants.items() if name.isupper()}


def test_steps_of_a_plain_call():
    pytest.importorskip("triton")
    attend, combine = steps(call(), PLAN, PRESETS["sm_90"])
    assert (attend.grid, combine.grid) == ((1, 4, 8), (128, 2, 1))
    off = (
        "WIDE",
        "NORMALIZE",
        "CAUSAL",
        "WINDOW",
        "SOFTCAP",
        "MASK_ROWS",
        "TOKEN_SCALE",
        "ROPE_SCALED",
        "DIRECT",
        "PDL",
    )
    assert not any(attend.constants[name] for name in off)
    for absent in ("values", "table", "lengths", "work", "mask", "sinks", "kv_scale"):
        assert attend.constants[absent] is None
    # The row's stride is known to the compiler, the batch's is a multiple of 16.
    assert attend.constants["latent_t"] == 576
    assert "latent_b" in attend.aligned
    fn, signature, _, attributes, options = attend.source()
    assert list(signature) == fn.arg_names
    assert signature["latent"] == "*bf16"
    assert signature["latent_b"] == "i32"
    assert options == {"num_warps": 4, "num_stages": 3}
    assert attributes[(fn.arg_names.index("latent"),)] == [["tt.divisibility", 16]]
    assert set(scratch(call(), PLAN, PRESETS["sm_90"])) == {"out", "lse", "part", "part_lse"}
    assert [s.name for s in steps(call(), replace(PLAN, splits=1), PRESETS["sm_90"])] == ["attend"]


def test_steps_tell_calls_apart():
    pytest.importorskip("triton")

    def attend(**changed: Any) -> dict[str, Any]:
        return constants(next(s for s in steps(call(**changed), PLAN, PRESETS["sm_90"]) if s.name == "attend"))

    plain = attend()
    for changed, differs in (
        ({"window": 3}, {"WINDOW"}),
        ({"softcap": 3.0}, {"SOFTCAP"}),
        ({"causal": True}, set()),  # one query token: causality hides nothing
        ({"mask": meta(8, 1, 1, 4096, dtype=torch.bool)}, set()),  # all of it is in the list
        ({"mask": meta(8, 16, 1, 4096, dtype=torch.bool)}, {"MASK_ROWS"}),
        ({"values": meta(8, 4096, 100)}, {"V", "BLOCK_V"}),
    ):
        got = attend(**changed)
        assert {name for name in got if got[name] != plain[name]} == differs, changed


@pytest.mark.parametrize("far", ["rows", "columns", "near"])
def test_offsets_are_64_bit_where_they_may_pass_2_to_the_31(far: str):
    """The kernels multiply int32 numbers where this says so; test_triton_interpreter.py runs the other case."""
    pytest.importorskip("triton")
    T = 1 << 16
    if far == "rows":
        latent = meta(1, T, 1 << 16)[..., :512]
    elif far == "columns":
        latent = meta(1, 512, 1 << 23).transpose(1, 2)
    else:
        latent = meta(1, T, (1 << 15) - 16)[..., :512]
    (attend,) = steps(Call(meta(1, 1, 16, 512), latent), replace(PLAN, splits=1), PRESETS["sm_90"])
    assert attend.constants["WIDE"] == (far != "near")


def test_fp8_goes_as_bits_where_the_gpu_cannot_convert():
    pytest.importorskip("triton")
    rows = meta(8, 4096, 576, dtype=FP8)
    fp8 = call(latent=rows[..., :512], rope=rows[..., 512:], kv_scale=meta(dtype=torch.float32))
    kinds = {name: steps(fp8, PLAN, PRESETS[name])[0].types["latent"] for name in ("sm_80", "sm_86", "sm_89", "sm_90")}
    assert kinds == {"sm_80": "*u8", "sm_86": "*u8", "sm_89": "*fp8e4nv", "sm_90": "*fp8e4nv"}


def test_scratch_depends_on_sizes_only():
    """CUDA graphs: a launch of the same shapes takes the same buffers, whatever the lengths and the mask hold."""
    mask = torch.zeros(8, 1, 1, 4096, dtype=torch.bool)
    sizes = scratch(call(mask=mask), PLAN, PRESETS["sm_90"])
    assert sizes["work"] == ((6, 8, 128), torch.int64)
    assert scratch(call(mask=mask[:1]), PLAN, PRESETS["sm_90"])["work"] == ((6, 1, 128), torch.int64)
    assert scratch(call(mask=~mask), PLAN, PRESETS["sm_90"]) == sizes


# The launch itself, with a driver that records instead of a GPU: Triton compiles for sm_90, nothing runs.


class FakeDriver:
    """As much of a driver as Triton asks for on its way to a launch; ``launched`` holds the arguments."""

    def __init__(self) -> None:
        self.launched: list[tuple[tuple[int, int, int], int, tuple[Any, ...]]] = []
        self.utils = self

    def load_binary(self, *_: Any) -> tuple[int, ...]:
        return (0, 0, 128, 0, 1024)

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, _: int) -> int:
        return 7

    def launcher_cls(self, source: Any, _: Any) -> Callable[..., None]:
        def go(x: int, y: int, z: int, stream: int, *rest: Any) -> None:
            names = source.fn.arg_names
            self.launched.append(((x, y, z), stream, dict(zip(names, rest[-len(names) :], strict=True))))

        return go


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    pytest.importorskip("triton")
    from triton.runtime.driver import driver

    fake = FakeDriver()
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(launch, "_compiled", {})
    launch.clear()
    yield fake
    launch.clear()


def small(**changed: Any) -> launch.Call:
    rows = torch.zeros(2, 300, 40, dtype=torch.bfloat16)
    given = launch.Call(torch.zeros(2, 1, 4, 40, dtype=torch.bfloat16), rows[..., :32], rows[..., 32:], scale=0.5)
    return given._replace(**changed)


def test_a_launch_passes_every_argument_in_its_place(driver: FakeDriver):
    given = small(mask=torch.ones(2, 1, 1, 300, dtype=torch.bool), sinks=torch.zeros(4))
    out, lse = launch.launch(given, lambda: None, num_splits=3)
    assert (out.shape, out.dtype, lse.shape) == ((2, 1, 4, 32), torch.bfloat16, (2, 1, 4))
    assert [grid for grid, *_ in driver.launched] == [(1, 2, 1), (2, 1, 1), (1, 3, 2), (8, 1, 1)]
    assert {stream for _, stream, _ in driver.launched} == {7}
    scan, listing, attend, combine = (arguments for *_, arguments in driver.launched)
    assert given.mask is not None
    assert given.sinks is not None
    assert (attend["query"], attend["latent"]) == (given.query.data_ptr(), given.latent.data_ptr())
    assert attend["rope"] == attend["latent"] + 64
    assert (scan["mask"], attend["mask"]) == (given.mask.data_ptr(), None)
    assert scan["work"] == listing["work"] == attend["work"]
    assert (combine["out"], combine["lse"]) == (out.data_ptr(), lse.data_ptr())
    assert (combine["part"], combine["part_lse"]) == (attend["out"], attend["lse"])
    assert (combine["sinks"], attend["sinks"]) == (given.sinks.data_ptr(), None)
    assert attend["scale"] == pytest.approx(0.5 * 1.4426950408889634)
    assert (attend["H"], attend["T"], attend["latent_b"], attend["latent_t"]) == (4, 300, 12000, 40)


def test_a_kind_of_call_is_checked_and_compiled_once(driver: FakeDriver):
    checked: list[int] = []

    def check() -> None:
        checked.append(1)

    for _ in range(3):
        launch.launch(small(), check)
    assert (len(checked), len(driver.launched)) == (1, 3)
    compiled = dict(launch._compiled)
    rows = torch.zeros(2, 301, 40, dtype=torch.bfloat16)  # a token later: planned anew, the same kernel
    launch.launch(small(latent=rows[..., :32], rope=rows[..., 32:]), check)
    assert len(checked) == 2
    launch.launch(small(causal=True), check)
    assert launch._compiled.keys() >= compiled.keys()
    launch.launch(small(query=torch.zeros(2, 1, 40, 4, dtype=torch.bfloat16).transpose(2, 3)), check)
    assert driver.launched[-1][2]["query_h"] == 40


def test_wrong_arguments_are_not_remembered(driver: FakeDriver):
    def check() -> None:
        raise InputError("no")

    for _ in range(2):
        with pytest.raises(InputError, match="no"):
            launch.launch(small(), check)
    assert not driver.launched


def test_a_triton_of_other_internals_is_used_by_its_normal_entry(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any) -> None:
        raise TypeError("ASTSource takes 7 arguments")

    given = small()
    launch.launch(given, lambda: None)
    monkeypatch.setattr(launch, "_compile", broken)
    launch.clear()
    launch.launch(given, lambda: None)
    (grid, _, bound), (normal_grid, _, normal) = driver.launched
    assert grid == normal_grid
    for name, value in bound.items():
        if name not in ("out", "lse"):
            got = normal[name]
            assert (got.data_ptr() if hasattr(got, "data_ptr") else got) == value, name


class Loaded:
    """Stands for a compiled kernel: tells which way it was launched."""

    function, packed_metadata = 7, (8,)

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments, stream: self.seen.append(("entry", grid, stream, arguments))

    def run(self, *given: Any) -> None:
        self.seen.append(("run", *given))


def test_a_bound_launch_tells_profilers_only_where_there_is_one():
    pytest.importorskip("triton")
    from triton import knobs

    from mla_compile.kernels.triton.bind import bind

    kernel = Loaded()
    go = bind(kernel, (1, 2, 3))
    go(5, [10, 11])
    knobs.runtime.launch_enter_hook.add(print)
    try:
        go(5, [10, 11])
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    direct = ("run", 1, 2, 3, 5, 7, (8,), None, None, None, 10, 11)
    assert kernel.seen == [direct, ("entry", (1, 2, 3), 5, (10, 11))]
