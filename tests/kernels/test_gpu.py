"""What needs a CUDA device: the ops against the reference, and small models through torch.compile(backend="mla").

Skipped without one. benchmarks/gpu/run_all.py runs these after its own, larger matrix of checks.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_compile.backend import reports
from mla_compile.dynamo.compiler import Compiler
from mla_compile.errors import InputError
from mla_compile.kernels import decode, launch, reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import Device
from mla_compile.kernels.plan import Plan, plan
from mla_compile.options import Options
from tests.support import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}  # relative, in the 2-norm
L, R = 128, 32


def rand(*size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(size))
    return torch.randn(*size, generator=generator, device="cuda").to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    error = (got.double() - want).norm() / want.norm()
    assert error <= tolerance, f"relative error {float(error):.2e}, allowed {tolerance:.0e}"


def exact(query: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, **how: Any) -> Any:
    """The reference in float64."""
    return reference.decode_attention(DecodeCall(query.double(), latent.double(), rope.double(), scale=0.1, **how))


# The ops.


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("S", "H"), [(1, 3), (2, 16), (1, 40), (3, 64)])
def test_op_agrees_with_the_reference(dtype, S, H):
    B, T = 3, 517
    query, latent, rope = rand(B, S, H, L + R, dtype=dtype), rand(B, T, L, dtype=dtype), rand(B, T, R, dtype=dtype)
    out, lse = torch.ops.mla_compile.decode_attention(query, latent, rope, scale=0.1, causal=True)
    want, want_lse = exact(query, latent, rope, causal=True)
    close(out, want, TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32


def test_paged_op_agrees_with_the_reference():
    B, H, page = 4, 16, 64
    lens = torch.tensor([0, 1, 200, 256], dtype=torch.int32, device="cuda")
    pages = rand(20, page, L + R)
    table = torch.randperm(20, device="cuda")[:16].int().reshape(B, 4)
    query = rand(B, 1, H, L + R)
    out, lse = torch.ops.mla_compile.paged_decode_attention(
        query, pages[..., :L], pages[..., L:], table, lens, scale=0.1, causal=True
    )
    rows = pages[table.long()].reshape(B, -1, L + R)
    want, _ = exact(query, rows[..., :L], rows[..., L:], seq_lens=lens, causal=True)
    close(out, want, TOLERANCE[torch.bfloat16])
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize(("latent", "rope"), [(L, R), (512, 64)])
def test_layers_share_the_tiles_of_a_mask(latent, rope):
    """The wider rows are for Hopper's kernel where there is one."""
    mask = torch.zeros(3, 1, 1, 517, dtype=torch.bool, device="cuda")
    for b, (first, last) in enumerate([(0, 517), (130, 300), (500, 501)]):
        mask[b, ..., first:last] = True
    sizes = (3, 1, 64, latent + rope), (3, 517, latent), (3, 517, rope)
    layers = [[rand(*size, seed=seed) for size in sizes] for seed in (1, 2)]
    schedule = torch.ops.mla_compile.decode_schedule(*layers[0], mask=mask, scale=0.1)
    for layer in layers:
        got = decode.decode_attention(*layer, mask=mask, schedule=schedule, scale=0.1)
        want = decode.decode_attention(*layer, mask=mask, scale=0.1)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        close(got[0], exact(*layer, mask=mask)[0], TOLERANCE[torch.bfloat16])


def test_layers_share_the_cut_of_a_ragged_batch():
    lens = torch.tensor([1, 70, 4096, 0, 900], dtype=torch.int32, device="cuda")
    table = torch.randperm(5 * 64, device="cuda").int().view(5, 64)
    layers = [(rand(5, 1, 64, 576, seed=seed), rand(5 * 64, 64, 576, seed=seed)) for seed in (1, 2)]
    query, pages = layers[0]
    schedule = torch.ops.mla_compile.decode_schedule(
        query, pages[..., :512], pages[..., 512:], seq_lens=lens, block_table=table, scale=0.1
    )
    for query, pages in layers:
        how = {"latent_width": 512, "scale": 0.1}
        got = decode.paged_decode_attention(query, pages, table, lens, schedule=schedule, **how)
        want = decode.paged_decode_attention(query, pages, table, lens, **how)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_garbage_in_hidden_rows_stays_out():
    query, latent, rope = rand(2, 1, 16, L + R), rand(2, 300, L), rand(2, 300, R)
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool, device="cuda")
    mask[0, ..., :130] = False
    mask[1, ..., 200:] = False
    clean = decode.decode_attention(query, latent, rope, None, mask, scale=0.1)
    latent[0, :130], rope[1, 200:], latent[1, 200:] = torch.nan, torch.inf, torch.nan
    for got, want in zip(decode.decode_attention(query, latent, rope, None, mask, scale=0.1), clean, strict=True):
        assert torch.equal(got, want)


def test_static_and_growing_cache_layouts_are_taken_as_they_are():
    """A strided [B,1,T,L] view of a larger buffer gives what its contiguous copy gives."""
    query = rand(2, 1, 16, L + R)
    buffer = rand(2, 2, 400, L + R)
    latent, rope = buffer[:, :1, 10:310, :L], buffer[:, :1, 10:310, L:]
    got = decode.decode_attention(query, latent, rope, scale=0.1)
    want = decode.decode_attention(query, latent.contiguous(), rope.contiguous(), scale=0.1)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_captured_call_follows_its_inputs():
    query, latent, rope = rand(2, 1, 16, L + R), rand(2, 900, L), rand(2, 900, R)
    lens = torch.tensor([900, 900], dtype=torch.int32, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return decode.decode_attention(query, latent, rope, scale=0.1, seq_lens=lens)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = call()
    for new in ([3, 900], [0, 417]):
        lens.copy_(torch.tensor(new))
        out.fill_(float("nan"))
        graph.replay()
        want, _ = exact(query, latent, rope, seq_lens=lens)
        close(out, want, TOLERANCE[torch.bfloat16])


def test_a_call_of_a_new_length_does_not_wait_for_the_device():
    """Planning, allocating and launching leave the device alone: a synchronisation is an error here."""
    query, latent, rope = rand(2, 1, 16, L + R), rand(2, 640, L), rand(2, 640, R)
    decode.decode_attention(query, latent[:, :600], rope[:, :600], scale=0.1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in (600, 601, 602):
            decode.decode_attention(query, latent[:, :tokens], rope[:, :tokens], scale=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_plan_of_the_caller_is_used_or_refused():
    query, latent, rope = rand(2, 1, 16, L + R), rand(2, 640, L), rand(2, 640, R)
    chosen = plan(
        B=2, S=1, H=16, L=L, R=R, T=640, query_dtype=query.dtype, cache_dtype=latent.dtype,
        device=Device.of(query.device), splits=3,
    )  # fmt: skip
    want = decode.decode_attention(query, latent, rope, scale=0.1)
    got = decode.decode_attention(query, latent, rope, scale=0.1, plan=chosen)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    with pytest.raises(InputError, match="bytes of shared memory"):
        decode.decode_attention(query, latent, rope, scale=0.1, plan=Plan("triton", 64, 512, 8, 7, 1, None, 0))


def _good() -> dict[str, Any]:
    return {
        "query": rand(2, 1, 4, L + R), "kv_pages": rand(8, 16, L + R), "latent_width": L, "scale": 0.1,
        "block_table": torch.zeros(2, 4, dtype=torch.int32, device="cuda"),
        "seq_lens": torch.tensor([5, 60], dtype=torch.int32, device="cuda"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("query", lambda x: x[..., :-1]),
        ("query", lambda x: x.cpu()),
        ("query", lambda x: x.double()),
        ("query", lambda x: x.requires_grad_()),
        ("kv_pages", lambda x: x[:, :15]),
        ("kv_pages", lambda x: x.cpu()),
        ("block_table", lambda x: x.long()),
        ("block_table", lambda x: x[:1]),
        ("block_table", lambda x: x.cpu()),
        ("seq_lens", lambda x: x.long()),
        ("seq_lens", lambda x: x[:1]),
        ("latent_width", lambda x: L + R + 1),
    ],
)
def test_bad_input_is_an_error_before_any_launch(monkeypatch, name, spoil):
    arguments = _good()
    arguments[name] = spoil(arguments[name])

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was launched")

    monkeypatch.setattr(launch, "_bind", never)
    with pytest.raises(InputError):
        decode.paged_decode_attention(**arguments)


def test_lengths_beyond_the_table_are_found_when_asked_for():
    arguments = _good()
    arguments["seq_lens"][1] = 65
    with pytest.raises(InputError, match="seq_lens"):
        decode.paged_decode_attention(**arguments, check=True)


# Models.


def _decoded(model: Any, inputs: dict[str, torch.Tensor], cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    return models.greedy(model, inputs, steps=12, cache=cache)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_a_model_decodes_the_same_tokens_without_a_graph_break(name, cache):
    model = models.build(name).to("cuda")
    inputs = {key: value.to("cuda") for key, value in models.prompt().items()}
    backend = Compiler(Options.parse({"forms": "absorbed"}))
    with torch.no_grad():
        want, want_logits = _decoded(model, inputs, cache)
        torch._dynamo.utils.counters.clear()
        model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
        got, logits = _decoded(model, inputs, cache)
    assert torch.equal(got, want)
    torch.testing.assert_close(logits, want_logits, rtol=2e-3, atol=2e-3)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0
    assert backend.reports
    assert all(report.absorbed for report in backend.reports)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_static_cache_step_by_name_and_mode(mode):
    """backend="mla" through the registry, one step at a time on a StaticCache, with and without CUDA graphs."""
    from transformers import StaticCache

    model = models.build("deepseek_v3", dtype=torch.bfloat16).to("cuda")
    ids = torch.randint(3, 180, (2, 24), generator=torch.Generator().manual_seed(0)).cuda()
    step = torch.compile(model, backend="mla" if _installed() else _mla(), mode=mode, fullgraph=True)
    found = []
    with torch.no_grad():
        for call in (model, step):
            cache = StaticCache(config=model.config, max_cache_len=512)
            model(input_ids=ids[:, :16], past_key_values=cache, use_cache=True)
            logits = []
            for t in range(16, 24):
                torch.compiler.cudagraph_mark_step_begin()
                out = call(
                    input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True,
                    position_ids=torch.full((2, 1), t, device="cuda"),
                )  # fmt: skip
                logits.append(out.logits.float().clone())
            found.append(torch.cat(logits, 1))
    want, got = found
    assert (got - want).abs().max() <= 8e-2 * want.abs().max()
    assert any(report.absorbed for report in reports())


@pytest.mark.parametrize("recorded", [True, False])
def test_many_users_over_pages(recorded):
    """Continuous batching: tokens of ``generate()``, steps replayed from CUDA graphs or launched one by one."""
    pytest.importorskip("transformers.generation.continuous_batching.utils")
    import mla_compile
    from tests.support import serving

    model = models.build("minicpm3", tie_word_embeddings=False).to("cuda")
    fast = mla_compile.continuous_batching(model)
    ids = serving.prompts((21, 5, 33, 7))
    with torch.no_grad():
        whole = [model.generate(torch.tensor([one]).cuda(), max_new_tokens=12, do_sample=False) for one in ids]
    got = serving.tokens(fast, ids, use_cuda_graph=recorded)
    assert got == [out[0, len(one) :].tolist() for out, one in zip(whole, ids, strict=True)]
    decode = next(graph for graph in fast.mla_batching.graphs if graph.name == "decode")
    assert (decode.replayed is not None and decode.replayed.count == len(decode.buckets)) is recorded


def _installed() -> bool:
    return "mla" in torch.compiler.list_backends(exclude_tags=())


def _mla() -> Any:
    from mla_compile.backend import mla

    return mla


def test_importing_the_package_does_not_touch_the_gpu():
    code = "import torch, mla_compile; print(torch.cuda.is_initialized())"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
