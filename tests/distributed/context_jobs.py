"""What the ranks of tests of shared caches run: as in jobs.py, every function is called on each of them."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import mla_compile
from mla_compile.dynamo.code import CodeGenerator
from mla_compile.passes.ir.collectives import received_bytes
from mla_compile.passes.ir.graph import packet
from tests.distributed.jobs import EAGER, by_heads, generated, generated_with_cache, mesh, small, until_a_rank_ends
from tests.support import models
from tests.support.recording import WAITS

STATIC = {"cache_implementation": "static", "disable_compile": True}


def context_mesh(how: str) -> DeviceMesh:
    """The ranks that share a context: all of them, or those that have the same heads of a 2 x 2 mesh."""
    if how != "grid":
        return mesh()
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tp"))["context"]


def spread(model: Any, how: str) -> tuple[Any, DeviceMesh]:
    """A model of which ranks have copies, or other heads each, and the ranks that are to share its cache."""
    over = context_mesh(how)
    if how == "grid":
        tensor_parallel = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "tp"))["tp"]
        model = by_heads(model, tensor_parallel)
    elif how == "heads":
        model = by_heads(model)
    return model, over


def with_context(model: Any, how: str, **options: Any) -> tuple[Any, Any]:
    """An optimized model whose cache is shared."""
    model, over = spread(model, how)
    return mla_compile.optimize(model, context_parallel=over, **{"strict": True, **EAGER, **options}), over


@contextlib.contextmanager
def counted(what: Callable[[FlopCounterMode], int]) -> Iterator[tuple[list[fx.Graph], list[int]]]:
    """The graphs that are compiled in here, and what a counter of FLOPs says of each of their calls."""
    graphs: list[fx.Graph] = []
    counts: list[int] = []
    honest = CodeGenerator.whole

    def whole(self: CodeGenerator, gm: fx.GraphModule, inputs: Any) -> Any:
        call = honest(self, gm, inputs)
        graphs.append(gm.graph)

        def counting(*given: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                result = call(*given)
            counts.append(what(counter))
            return result

        return counting

    with mock.patch.object(CodeGenerator, "whole", whole):
        yield graphs, counts


def _of_attention(counter: FlopCounterMode) -> int:
    return counter.get_flop_counts()["Global"].get(torch.ops.mla_compile.decode_attention, 0)


def shared_context(
    rank: int, family: str, layers: int, steps: int, how: str, heads: int, refused: bool
) -> dict[str, Any]:
    """Generates with a cache that ranks share, and with one process; then what is ``refused`` of that cache."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads}
    whole = models.build(family, **sizes)
    tokens, logits, all_rows = generated_with_cache(whole, steps)
    fast, _ = with_context(whole, how)
    with counted(FlopCounterMode.get_total_flops) as (graphs, flops):
        ours, numbers, cache = generated_with_cache(fast, steps)
    rows = [row for layer in cache.layers for row in (layer.keys, layer.values)]
    return {
        "tokens": torch.equal(ours, tokens),
        "logits": float((numbers - logits).abs().max() / logits.abs().max().clamp_min(1)),
        "codes": sorted({str(s.code) for s in fast.mla_report.sites}),
        "shown": {row.shape[-2] for row in rows},
        "values": sum(row.local[:, :, : row.sharing.owned(row.shape[-2])].numel() for row in rows) / len(cache.layers),
        # Of two steps that are 4 tokens apart, attention over these is what differs.
        "flops": (flops[-1] - flops[-5]) / 4 / 2 / len(cache.layers),
        "received": received_bytes(graphs[-1]),
        "refused": what_is_refused(rank, models.build(family, **sizes), cache, all_rows) if refused else {},
    }


def shared_static(rank: int, family: str, layers: int, steps: int, how: str) -> dict[str, Any]:
    """The same with a ``StaticCache``."""
    whole = models.build(family, num_hidden_layers=layers)
    tokens, logits = generated(whole, steps, **STATIC)
    fast, _ = with_context(whole, how)
    with counted(_of_attention) as (graphs, attention), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, numbers, cache = generated_with_cache(fast, steps, **STATIC)
    rows = [row for layer in cache.layers for row in (layer.keys, layer.values)]
    return {
        "tokens": torch.equal(ours, tokens),
        "logits": float((numbers - logits).abs().max() / logits.abs().max().clamp_min(1)),
        "graphs": len(graphs),
        "waits": [node.name for node in graphs[-1].nodes if packet(node) in WAITS],
        # A write is one in place where old and new rows lie alike.
        "lie_alike": [
            len({x.meta["val"].stride() for x in node.args})
            for node in graphs[-1].nodes
            if packet(node) is torch.ops.aten.copy_ and node.args[1].target is torch.ops.aten.index_copy.default
        ],
        "length": int(cache.get_seq_length()),
        "shown": {row.shape[-2] for row in rows},
        "bytes": sum(row.local.untyped_storage().nbytes() for row in rows) / len(cache.layers),
        "flops": attention[-1] / len(cache.layers),
        "received": received_bytes(graphs[-1]),
        "said": said_in(caught),
    }


def said_in(caught: list[warnings.WarningMessage]) -> list[str]:
    """What this package warned of."""
    return [str(w.message) for w in caught if issubclass(w.category, mla_compile.MlaCompileWarning)]


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


def static_session(model: Any) -> list[torch.Tensor]:
    """What callers do to a ``StaticCache``, of odd length; the logits of each call."""
    found: list[torch.Tensor] = []

    def feed(cache: Any, *counts: int) -> None:
        """So many more tokens, call by call; the first two of the second sequence are padding."""
        for count in counts:
            ids = torch.randint(3, 180, (2, count), generator=torch.Generator().manual_seed(len(found)))
            mask = torch.ones(2, cache.get_max_length(), dtype=torch.long)
            mask[1, :2] = 0
            found.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits)

    with torch.no_grad():
        cache = transformers.StaticCache(config=model.config, max_cache_len=37)
        feed(cache, 7, 1, 1, 1)
        feed(cache, 4, 1, 3, 1)  # further pieces of the prompt
        assert cache.get_seq_length() == 19
        cache.reorder_cache(torch.tensor([0, 0]))
        feed(cache, 1, 1)
        again = copy.deepcopy(cache)
        feed(cache, 1, 1)
        feed(again, 1, 1)  # another continuation
        cache.reset()
        assert cache.get_seq_length() == 0
        feed(cache, 7, 1, 1, 4, 1)
        feed(cache, 23)  # it is full
        longer = transformers.StaticCache(config=model.config, max_cache_len=43)
        feed(longer, 7, 1, 1, 4, 1)
    return found


def cache_operations(rank: int, how: str, static: bool) -> dict[str, Any]:
    whole = small()
    session = static_session if static else cache_session
    expected = session(whole)
    fast, _ = with_context(whole, how)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = session(fast)
    off = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
    return {"off": max(off), "calls": len(off), "said": said_in(caught)}


def beyond_the_end(rank: int) -> list[str]:
    """One token more than a ``StaticCache`` of odd length has room for, with one process and with shares."""
    whole, raised = small(), []
    for model in (whole, with_context(whole, "copies")[0]):
        cache = transformers.StaticCache(config=whole.config, max_cache_len=9)
        with torch.no_grad():
            for count in (7, 1, 1):
                model(input_ids=torch.full((2, count), 5), past_key_values=cache)
            try:
                model(input_ids=torch.full((2, 1), 5), past_key_values=cache)
                raised.append("nothing")
            except (IndexError, RuntimeError) as error:
                raised.append(f"{type(error).__name__}: {error}")
    return raised


def several_queries(rank: int, how: str, static: bool) -> dict[str, Any]:
    """Three tokens in a call, absorbed: each query sees its own past. The last call sees no padding, only causality."""
    whole = small()
    over = [(2, 7), (2, 3), (2, 3), (2, 2)]

    def logits(model: Any, padded: bool) -> list[torch.Tensor]:
        cache, found = cache_of(model, 16 if static else None), list[torch.Tensor]()
        for seed, (B, S) in enumerate(over):
            ids = torch.randint(3, 180, (B, S), generator=torch.Generator().manual_seed(seed))
            mask = torch.ones(B, 16 if static else cache.get_seq_length() + S, dtype=torch.long)
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


def cache_that_was_there(rank: int) -> dict[str, Any]:
    """A cache that did not begin in a call of the model is right, and it is said that each rank has all of it."""
    whole = small()
    tokens, _ = generated(whole, 4)
    fast, _ = with_context(whole, "copies")
    cache = transformers.StaticCache(config=whole.config, max_cache_len=16)
    widths = [whole.config.kv_lora_rank, whole.config.qk_rope_head_dim]
    for layer in cache.layers:
        keys, values = (torch.zeros(2, 1, 0, width) for width in widths)
        layer.lazy_initialization(keys, values)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, _ = generated(fast, 4, past_key_values=cache, disable_compile=True)
    return {"tokens": torch.equal(ours, tokens), "said": said_in(caught)}


def beams(rank: int) -> list[bool]:
    """A beam search, whose caches are reordered in every step, over caches of both kinds."""
    whole = small(tie_word_embeddings=False)
    fast, _ = with_context(whole, "copies")
    found = []
    for how in ({}, STATIC):
        with torch.no_grad():
            want, ours = (
                m.generate(**models.prompt(2, 9), max_new_tokens=8, do_sample=False, num_beams=3, **how)
                for m in (whole, fast)
            )
        found.append(torch.equal(ours, want))
    return found


class ShowsRows(nn.Module):
    """Returns a view of its cache, in calls of one token or in all of them."""

    def __init__(self, model: Any, always: bool) -> None:
        super().__init__()
        self.model, self.always = model, always

    def forward(self, input_ids: torch.Tensor, past_key_values: Any) -> tuple[torch.Tensor, ...]:
        logits = self.model(input_ids=input_ids, past_key_values=past_key_values).logits
        shows = self.always or input_ids.shape[1] == 1
        return (logits, past_key_values.layers[0].keys[:, :, :9]) if shows else (logits,)


def views_of_rows(rank: int, always: bool) -> dict[str, Any]:
    """A view that is kept shows what later calls write, or there is an error."""
    whole = small()
    fast, _ = with_context(ShowsRows(whole, always), "copies")
    kept, error = [], ""
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for model in (ShowsRows(whole, always), fast):
            cache = cache_of(whole, 16)
            try:
                _, *shown = model(torch.full((2, 7), 5), cache)
                kept.append(shown)
                kept[-1] += [model(torch.full((2, 1), token), cache)[1] for token in (7, 9)]
            except mla_compile.errors.SharedCacheError as raised:
                error = str(raised)
    alike = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*kept, strict=False))
    return {"alike": alike, "error": error, "said": said_in(caught)}


def gathered_in_steps(rank: int) -> dict[str, Any]:
    """Steps whose attention is not absorbed, over a ``StaticCache`` that ranks share."""
    whole = small()
    tokens, _ = generated(whole, 4)
    fast, _ = with_context(whole, "copies", forms="expanded")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, _, cache = generated_with_cache(fast, 4, **STATIC)
    return {"tokens": torch.equal(ours, tokens), "said": said_in(caught), "held": cache.layers[0].keys.local.shape[2]}


def what_is_refused(rank: int, whole: Any, cache: Any, all_rows: Any) -> dict[str, str]:
    """What is raised where rows of other ranks would be needed, and for meshes that cannot share.

    ``cache`` is one that ranks share, and ``all_rows`` that of one process.
    """
    over, other = mesh(), mla_compile.optimize(whole, **EAGER)
    rows, expected = cache.layers[0].keys, all_rows.layers[0].keys
    assert torch.allclose(rows.full_tensor(), expected, rtol=1e-4, atol=1e-5)
    step = {"input_ids": torch.tensor([[5], [6]]), "past_key_values": cache}
    calls = {
        "read": rows.sum,
        "written": lambda: rows.fill_(1.0),
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
    generated(fast, 1, past_key_values=cache)
    four, _ = with_context(small(), "copies")
    try:
        with torch.no_grad():
            four(input_ids=torch.tensor([[5], [6]]), past_key_values=cache)
    except Exception as error:  # noqa: BLE001  likewise
        return str(error)
    return ""


def dies_sharing(rank: int, which: int, after: int) -> tuple[str, bool]:
    """Rank ``which`` ends while a cache is shared; what the others are told, and whether the rest of them works on."""
    fast, _ = with_context(small(), "copies")
    text = until_a_rank_ends(fast, rank == which, after)
    whole = small()
    expected, _ = generated(whole, 3)
    tokens, _ = generated(mla_compile.optimize(whole, **EAGER), 3)
    return text, torch.equal(tokens, expected)


def pairs_under_load(rank: int, steps: int, which: int) -> dict[str, Any]:
    """Two pairs of ranks, each with sequences of its own lengths, in turns of several generations; then one rank ends.

    The ranks of a pair have other heads each, and share the cache of their sequences.
    """
    over = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))["tp"]
    whole, pair = small(), rank // 2
    fast = mla_compile.optimize(by_heads(small(), over), context_parallel=over, strict=True, **EAGER)
    done, equal, lengths = 0, True, []
    while done < steps:
        turn = len(lengths)
        inputs = models.prompt(1 + pair, 4 + 5 * pair + 3 * turn % 11, pad=2, seed=rank // 2)
        count = min(7 + 4 * pair + turn % 3, steps - done)
        expected, ours = (models.greedy(model, inputs, count)[0] for model in (whole, fast))
        equal, done = equal and torch.equal(ours, expected), done + count
        lengths.append(inputs["input_ids"].shape[1] + count)
    codes = {str(site.code) for site in fast.mla_report.sites}
    return {"tokens": equal, "lengths": lengths, "codes": codes, "told": until_a_rank_ends(fast, rank == which, 5)}


def cache_of(model: Any, length: int | None) -> Any:
    """A cache that grows, or one of full length."""
    if length is None:
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=length)


def compiled_context(rank: int, name: str, length: int | None) -> dict[str, Any]:
    """Steps compiled by Inductor, with and without shares, and what they are off the same model in float64."""
    dtype = getattr(torch, name)
    exact = small().to(dtype).to(torch.float64)

    def logits(model: Any) -> torch.Tensor:
        cache, found = cache_of(model, length), []
        for ids in (models.prompt(2, 9)["input_ids"], *torch.full((3, 2, 1), 7)):
            with torch.no_grad():
                found.append(model(input_ids=ids, past_key_values=cache).logits[:, -1].double())
        return torch.stack(found)

    expected = logits(exact)
    alone = logits(mla_compile.optimize(small().to(dtype), **EAGER))
    fast, _ = with_context(by_heads(small().to(dtype)), "copies", codegen="inductor")
    with mock.patch.object(CodeGenerator, "whole", autospec=True, side_effect=CodeGenerator.whole) as generate:
        shared = logits(fast)
    return {
        "graphs": generate.call_count,
        "off": float((shared - alone).abs().max() / alone.abs().max()),
        "error": float((shared - expected).norm()), "error_alone": float((alone - expected).norm()),
    }  # fmt: skip


def through_the_backend(rank: int) -> dict[str, Any]:
    """The option as one of ``torch.compile``."""
    whole = small()
    tokens, _ = generated(whole, 4)
    model = by_heads(small())
    model.forward = torch.compile(model.forward, backend="mla", options={**EAGER, "context_parallel": mesh()})
    cache = transformers.DynamicCache(config=model.config)
    ours, _ = generated(model, 4, past_key_values=cache)
    return {"tokens": torch.equal(ours, tokens), "held": cache.layers[0].keys.local.shape[2]}
