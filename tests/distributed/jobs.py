"""What the ranks of these tests run: every function is called on each of them, with its rank first."""

from __future__ import annotations

import copy
import datetime
import os
import pickle
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.flop_counter import FlopCounterMode
from transformers.distributed import DistributedConfig

import mla_compile
from mla_compile import backend
from mla_compile.dynamo.code import CodeGenerator
from mla_compile.passes.ir.collectives import received_bytes
from mla_compile.passes.verify import check
from tests.support import models

EAGER = {"codegen": "eager"}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def by_heads(model: nn.Module, over: DeviceMesh | None = None) -> nn.Module:
    """Each rank its heads, by a plan of ``parallelize_module``."""
    over = over or mesh()
    for module in model.modules():
        if isinstance(getattr(module, "kv_b_proj", None), nn.Linear):
            columns = [name for name, _ in module.named_children() if name in ("q_proj", "q_b_proj", "kv_b_proj")]
            plan = {**dict.fromkeys(columns, ColwiseParallel()), "o_proj": RowwiseParallel()}
            parallelize_module(module, over, plan)
    return model


def fsdp(model: Any) -> nn.Module:
    over = mesh()
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def by_transformers(model: Any, directory: str) -> nn.Module:
    """The plan that the model of transformers has itself."""
    loaded = type(model).from_pretrained(
        directory, distributed_config=DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    )
    loaded.generation_config = copy.deepcopy(model.generation_config)
    return loaded.eval().requires_grad_(False)


def small(**config: Any) -> Any:
    return models.build("deepseek_v3", num_hidden_layers=1, **config)


def generated(model: Any, steps: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens [B,steps] and the logits [B,steps,vocabulary]."""
    with torch.no_grad():
        done = model.generate(
            **models.prompt(2, 9), max_new_tokens=steps, do_sample=False, output_logits=True,
            return_dict_in_generate=True, **more,
        )  # fmt: skip
    return done.sequences[:, -steps:], torch.stack(done.logits, 1)


def same_as_one_process(
    rank: int, family: str, how: str, directory: str | None, steps: int, door: str = "optimize"
) -> dict[str, Any]:
    """Generates with one process and with all of them; what differs, and what the report of this rank says."""
    whole = models.build(family)
    tokens, logits = generated(whole, steps)
    if how == "plan":
        model = by_transformers(whole, str(directory))
    else:
        model = by_heads(whole) if how == "heads" else fsdp(whole)
    before = len(backend.reports())
    if door == "optimize":
        fast = mla_compile.optimize(model, **EAGER)
        ours, numbers = generated(fast, steps)
        sites = fast.mla_report.sites
    else:
        model.forward = torch.compile(model.forward, backend="mla", options={**EAGER, "verify": True})
        ours, numbers = generated(model, steps)
        sites = tuple(site for report in backend.reports()[before:] for site in report.sites)
    return {
        "tokens": torch.equal(ours, tokens),
        "logits": float((numbers - logits).abs().max() / logits.abs().max().clamp_min(1)),
        "codes": sorted({str(s.code) for s in sites}),
        "absorbed": [(s.dims.H, s.decode_flops_after, s.cache_values_latent) for s in sites if s.verdict == "absorbed"],
    }


def layers_once(rank: int) -> dict[str, Any]:
    """Code for one layer of four, with its collectives, on every rank."""
    whole = models.build("minicpm3", num_hidden_layers=4)
    tokens, _ = generated(whole, 4)
    made: list[int] = []
    of_inductor = CodeGenerator.whole

    def counted(self: CodeGenerator, gm: fx.GraphModule, inputs: Any) -> Any:
        made.append(sum("all_reduce" in str(node.target) for node in gm.graph.nodes))
        return of_inductor(self, gm, inputs)

    with mock.patch.object(CodeGenerator, "whole", counted):
        ours, _ = generated(mla_compile.optimize(by_heads(whole), strict=True, verify=False), 4)
    return {"tokens": torch.equal(ours, tokens), "collectives": made}


def _reports(fast: Any) -> list[tuple[str, str]]:
    return [(str(s.code), s.reason) for s in fast.mla_report.sites]


def another_verdict(rank: int, which: int) -> dict[str, Any]:
    """Rank ``which`` finds that rewritten attentions differ from the original."""
    tokens, _ = generated(small(), 3)
    fast = mla_compile.optimize(by_heads(small()), **EAGER)
    honest = check.compare_values
    if rank == which:
        check.compare_values = lambda *_, **__: check.Check(None, "is told to differ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, _ = generated(fast, 3)
    finally:
        check.compare_values = honest
    return {"tokens": torch.equal(ours, tokens), "sites": _reports(fast)}


def a_failure(rank: int, which: int, strict: bool) -> dict[str, Any]:
    """Rank ``which`` cannot rewrite anything."""
    from mla_compile import pipeline

    tokens, _ = generated(small(), 3)
    fast = mla_compile.optimize(by_heads(small()), strict=strict, **EAGER)
    honest = pipeline.run

    def fails(*_: Any, **__: Any) -> Any:
        raise mla_compile.CaptureError("this rank has had enough")

    if rank == which:
        pipeline.run = fails
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours, _ = generated(fast, 3)
        said = [str(w.message) for w in caught if issubclass(w.category, mla_compile.MlaCompileWarning)]
        return {"tokens": torch.equal(ours, tokens), "said": said, "sites": _reports(fast)}
    except Exception as error:  # noqa: BLE001  what is raised is what the test is about
        return {"raised": str(error)}
    finally:
        pipeline.run = honest


def other_options(rank: int) -> str:
    options = {"fold": "always" if rank else "auto", **EAGER}
    fast = mla_compile.optimize(by_heads(small()), **options)
    try:
        generated(fast, 2)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def alone(rank: int, ranks: str) -> str:
    """Rank 0 compiles, and no other does."""
    model = by_heads(small())
    if rank:
        return ""
    dist.distributed_c10d._get_default_store().set_timeout(datetime.timedelta(seconds=3))
    fast = mla_compile.optimize(model, ranks=ranks, **EAGER)
    try:
        generated(fast, 1)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def dies(rank: int, which: int, after: int) -> str:
    """Rank ``which`` ends in the middle of a generation; what the others are told."""
    fast = mla_compile.optimize(by_heads(small()), **EAGER)
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1
        if rank == which and calls[0] > after:
            os._exit(1)

    fast.register_forward_pre_hook(count)
    try:
        generated(fast, after + 20)
    except Exception as error:  # noqa: BLE001  likewise
        return f"after {calls[0]}: {type(error).__name__}: {error}"
    return ""


def heads_that_cannot_be_divided(rank: int) -> str:
    fast = mla_compile.optimize(by_heads(small(num_attention_heads=3)), **EAGER)
    try:
        generated(fast, 1)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def saved(family: str, directory: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    models.build(family).save_pretrained(directory)


def context_mesh(how: str) -> DeviceMesh:
    """The ranks that share a context: all of them, or those that have the same heads of a 2 x 2 mesh."""
    if how != "grid":
        return mesh()
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tp"))["context"]


def with_context(model: Any, how: str, **options: Any) -> tuple[Any, Any]:
    """An optimized model whose cache is shared: by copies of the model, or by ranks that have other heads each."""
    over = context_mesh(how)
    if how == "grid":
        tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tp"))["tp"]
        model = by_heads(model, tensor_parallel)
    elif how == "heads":
        model = by_heads(model)
    return mla_compile.optimize(model, context_parallel=over, **{"strict": True, **EAGER, **options}), over


def shared_context(rank: int, family: str, steps: int, how: str, heads: int) -> dict[str, Any]:
    """Generates with a cache that ranks share, and with one process."""
    whole = models.build(family, num_attention_heads=heads, num_key_value_heads=heads)
    tokens, logits = generated(whole, steps)
    fast, _ = with_context(whole, how)
    cache = transformers.DynamicCache(config=fast.config)
    flops: list[int] = []
    graphs: list[fx.Graph] = []
    honest = CodeGenerator.whole

    def counted(self: CodeGenerator, gm: fx.GraphModule, inputs: Any) -> Any:
        call = honest(self, gm, inputs)
        graphs.append(gm.graph)

        def counting(*given: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = call(*given)
            flops.append(counter.get_total_flops())
            return result

        return counting

    with mock.patch.object(CodeGenerator, "whole", counted):
        ours, numbers = generated(fast, steps, past_key_values=cache)
    rows = [row for layer in cache.layers for row in (layer.keys, layer.values)]
    return {
        "tokens": torch.equal(ours, tokens),
        "logits": float((numbers - logits).abs().max() / logits.abs().max().clamp_min(1)),
        "codes": sorted({str(s.code) for s in fast.mla_report.sites}),
        "shown": {row.shape[-2] for row in rows},
        "values": sum(row.local[:, :, : row.sharing.owned(row.shape[-2])].numel() for row in rows) / len(cache.layers),
        # Of two steps that are 8 tokens apart, attention over these is what differs.
        "flops": (flops[-1] - flops[-9]) / 8 / 2 / len(cache.layers),
        "received": received_bytes(graphs[-1]),
    }


def cache_session(model: Any) -> list[torch.Tensor]:
    """What callers do to a cache between calls; the logits of each call."""
    found: list[torch.Tensor] = []
    cache = transformers.DynamicCache(config=model.config)

    def feed(seed: int, count: int) -> None:
        """``count`` more tokens; the first two of the second sequence are padding."""
        B = 2 if cache.get_seq_length() == 0 else cache.layers[0].keys.shape[0]
        ids = torch.randint(3, 180, (B, count), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(B, cache.get_seq_length() + count, dtype=torch.long)
        mask[1, :2] = 0
        found.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits)

    def several(*counts: int) -> None:
        for number, count in enumerate(counts):
            feed(len(found) + number, count)

    with torch.no_grad():
        several(7, 1, 1, 1)
        several(4, 1, 3, 1)  # further pieces of the prompt
        cache.crop(-5)
        several(1, 1)
        cache.reorder_cache(torch.tensor([1, 0]))
        several(1, 1)
        before = [(layer.keys, layer.values) for layer in cache.layers]
        several(1, 1)
        for layer, (layer.keys, layer.values) in zip(cache.layers, before, strict=True):  # another continuation
            assert layer.keys.shape[-2] == before[0][0].shape[-2]
        several(1, 1)
        cache.batch_repeat_interleave(2)
        several(1, 1)
        cache.batch_select_indices(torch.tensor([3, 0, 2]))
        cache = copy.deepcopy(cache)
        several(1, 1)
        cache.reset()
        several(7, 1, 1)
    return found


def cache_operations(rank: int, how: str) -> dict[str, Any]:
    whole = small()
    expected = cache_session(whole)
    fast, _ = with_context(whole, how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cache_session(fast)
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
    return {
        "off": max(off), "calls": len(off),
        "said": [str(w.message) for w in caught if issubclass(w.category, mla_compile.MlaCompileWarning)],
    }  # fmt: skip


def several_queries(rank: int, how: str) -> dict[str, Any]:
    """Three tokens in a call, absorbed: each query sees its own past. The last call sees no padding, only causality."""
    whole = small()
    over = [(2, 7), (2, 3), (2, 3), (2, 2)]

    def logits(model: Any, padded: bool) -> list[torch.Tensor]:
        cache, found = transformers.DynamicCache(config=model.config), list[torch.Tensor]()
        for seed, (B, S) in enumerate(over):
            ids = torch.randint(3, 180, (B, S), generator=torch.Generator().manual_seed(seed))
            mask = torch.ones(B, cache.get_seq_length() + S, dtype=torch.long)
            mask[1, :2] = 0
            given = {"attention_mask": mask} if padded else {}
            with torch.no_grad():
                found.append(model(input_ids=ids, past_key_values=cache, **given).logits)
        return found

    off, codes = [], set()
    for padded in (True, False):
        fast, _ = with_context(small(), how, forms="absorbed", dynamic=False)
        found = logits(fast, padded)
        off += [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, logits(whole, padded), strict=True)]
        codes |= {str(site.code) for site in fast.mla_report.sites}
    return {"off": max(off), "codes": sorted(codes), "messages": fast.mla_report.messages}


def heads_in_another_order(rank: int) -> dict[str, Any]:
    """Rank 1 has the heads of each layer in another order: the same model, and other queries of the same head."""
    whole = small()
    tokens, _ = generated(whole, 6)
    model = small()
    for layer in model.model.layers if rank else ():
        part = layer.self_attn
        H = model.config.num_attention_heads
        for name in ("q_b_proj", "kv_b_proj"):
            weight = getattr(part, name).weight
            weight.copy_(weight.unflatten(0, (H, -1)).flip(0).flatten(0, 1))
        part.o_proj.weight.copy_(part.o_proj.weight.unflatten(1, (H, -1)).flip(1).flatten(1, 2))
    fast, _ = with_context(model, "copies")
    ours, _ = generated(fast, 6)
    return {"tokens": torch.equal(ours, tokens), "messages": fast.mla_report.messages}


def other_caches(rank: int, implementation: str) -> dict[str, Any]:
    """A cache that is not shared is right, and it is said."""
    whole = small()
    tokens, _ = generated(whole, 4, cache_implementation=implementation, disable_compile=True)
    fast, _ = with_context(whole, "copies")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, _ = generated(fast, 4, cache_implementation=implementation, disable_compile=True)
    said = [str(w.message) for w in caught if issubclass(w.category, mla_compile.MlaCompileWarning)]
    return {"tokens": torch.equal(ours, tokens), "said": said}


def what_is_refused(rank: int) -> dict[str, str]:
    """What is raised where rows of other ranks would be needed, and for meshes that cannot share."""
    whole = small()
    fast, over = with_context(whole, "copies")
    other = mla_compile.optimize(whole, **EAGER)
    cache, all_rows = (transformers.DynamicCache(config=whole.config) for _ in range(2))
    generated(fast, 3, past_key_values=cache)
    generated(whole, 3, past_key_values=all_rows)
    rows, expected = cache.layers[0].keys, all_rows.layers[0].keys
    assert torch.allclose(rows.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    step = {"input_ids": torch.tensor([[5], [6]]), "past_key_values": cache}
    calls = {
        "read": rows.sum,
        "written": rows.zero_,
        "saved": lambda: pickle.dumps(cache),
        "array": rows.numpy,
        "last": lambda: rows[:, :, -1:],
        "original": lambda: whole(**step),
        "one rank": lambda: other(**step),
        "two axes": lambda: mla_compile.optimize(whole, context_parallel=init_device_mesh("cpu", (2, 1))),
        "not among them": lambda: mla_compile.optimize(whole, context_parallel=DeviceMesh("cpu", [1 - rank])),
        "no mesh": lambda: mla_compile.optimize(whole, context_parallel="context"),
        "alone": lambda: mla_compile.optimize(whole, context_parallel=over, ranks="alone"),
        "program": lambda: mla_compile.optimize(fx.symbolic_trace(nn.Linear(2, 2)), context_parallel=over),
        "many users": lambda: mla_compile.continuous_batching(whole, context_parallel=over),
    }
    found = {}
    for name, call in calls.items():
        try:
            with torch.no_grad():
                call()
            found[name] = ""
        except Exception as error:  # noqa: BLE001  what is raised is what the test is about
            found[name] = f"{type(error).__name__}: {error}"
    alone = mla_compile.optimize(
        whole, context_parallel=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    )
    found["one rank in the mesh"] = str(alone is not None)
    return found


def another_mesh(rank: int) -> str:
    """A cache that two and two ranks share, read by a model that all four share a cache of."""
    whole = small()
    fast, _ = with_context(whole, "grid")
    cache = transformers.DynamicCache(config=whole.config)
    generated(fast, 2, past_key_values=cache)
    four, _ = with_context(small(), "copies")
    try:
        with torch.no_grad():
            four(input_ids=torch.tensor([[5], [6]]), past_key_values=cache)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def compiled_context(rank: int, name: str) -> dict[str, Any]:
    """Steps compiled by Inductor, with and without shares, and what they are off the same model in float64."""
    dtype = getattr(torch, name)
    exact = small().to(dtype).to(torch.float64)

    def logits(model: Any) -> torch.Tensor:
        cache, found = transformers.DynamicCache(config=model.config), []
        for ids in (models.prompt(2, 9)["input_ids"], *torch.full((3, 2, 1), 7)):
            with torch.no_grad():
                found.append(model(input_ids=ids, past_key_values=cache).logits[:, -1].double())
        return torch.stack(found)

    expected = logits(exact)
    alone = logits(mla_compile.optimize(small().to(dtype), **EAGER))
    fast, _ = with_context(by_heads(small().to(dtype)), "copies", codegen="inductor")
    shared = logits(fast)
    return {
        "off": float((shared - alone).abs().max() / alone.abs().max()),
        "error": float((shared - expected).norm()), "error_alone": float((alone - expected).norm()),
    }  # fmt: skip
