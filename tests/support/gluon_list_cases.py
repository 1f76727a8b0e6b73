"""Calls of the Hopper kernel for lists of keys on the CPU, from its own source, compared with the reference.

Rows that no query token of their request sees are NaN, unused table slots name no page, and scratch holds rubbish.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from mla_compile.kernels import reference
from mla_compile.kernels.call import TENSORS, DecodeCall
from mla_compile.kernels.hopper import steps as hopper_steps
from mla_compile.kernels.hopper.step import GluonStep
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.triton.steps import BUFFERS
from tests.support.gluon_cases import SOURCE, assert_wrong, merged, parts_of, problem, scores
from tests.support.gluon_machine import load
from tests.support.gluon_simulator import Pointer
from tests.support.lists import lists

NAME = "mla_compile.kernels.hopper.list_gluon"
LIST_SOURCE = {**SOURCE, NAME: (Path(reference.__file__).parent / "hopper" / "list_gluon.py").read_text()}


def chosen(B, S, T, k, kind, seed):
    """int32 [B,S,k]. ``kind``: mixed, full (as many keys as there are), nothing, holes (whole blocks without a key)."""
    index = lists(B, S, T, k, empty={"full": 0.0, "nothing": 1.0}.get(kind, 0.2), seed=seed)
    index = torch.nn.functional.pad(index, (0, k - index.shape[2]), value=-1)
    if kind == "holes":
        index[0, :, :64], index[-1, 0, 64:], index[-1, -1] = -1, -1, -1
    return index


class Listed(NamedTuple):
    """A call with lists on the CPU; ``cache`` has NaN in rows that nobody sees, ``call`` in float64 may have others."""

    call: DecodeCall
    query: np.ndarray
    cache: np.ndarray
    splits: int
    dtype: str


def listed(
    seed, lens, H, k, S=1, page=0, splits=1, causal=True, sinks=False, dtype="bf16", T=None, all_rows=False, mask=None,
    kind="mixed", softcap=0.0, window=0, rope=64,
):  # fmt: skip
    """A random :class:`Listed`."""
    rng = np.random.default_rng(seed)
    query, cache, table = problem(lens, H, S, page, dtype, seed, T, rope)
    B = len(lens)
    capacity = table.shape[1] * page if page else cache.shape[1]
    shown = None
    if mask is not None:
        shown = rng.random((B if "B" in mask else 1, 1, S if "S" in mask else 1, capacity)) < 0.6
    sink = rng.standard_normal(H).astype(np.float32) if sinks else None
    call = DecodeCall(
        torch.from_numpy(query).double(), *parts_of(torch.from_numpy(cache).double()), scale=192**-0.5,
        causal=causal, softcap=softcap, window=window,
        indices=chosen(B, S, max(1, *lens), k, kind, seed),
        mask=None if shown is None else torch.from_numpy(shown),
        seq_lens=None if all_rows else torch.tensor(lens, dtype=torch.int32),
        block_table=None if table is None else torch.from_numpy(table),
        sinks=None if sink is None else torch.from_numpy(sink).double(),
    )  # fmt: skip
    cache[~read(call)] = np.nan
    return Listed(call, query, cache, splits, dtype)


def launch_lists(machine, kernel, seed, given, bits, **more):
    """Runs a kernel once on a call, with the arguments that those for lists have in common, and ``more``.

    ``bits`` is what it calls the scratch for them. Results, those of ``splits`` merged, are compared with the
    reference's of the call.
    """
    call, (B, S, H, width), (_, _, k) = given.call, given.query.shape, given.call.indices.shape
    tokens, capacity, splits, shown = B * S, call.sizes.T, given.splits, call.mask
    want, want_lse = (x.numpy().reshape(tokens, H, -1) for x in reference.decode_attention(call))
    blocks = -(-k // 64)
    places = np.full(tokens * blocks * 64, 10**9, np.int32)
    words = np.random.default_rng(seed).integers(-(2**31), 2**31, tokens * blocks * 2).astype(np.int32)
    part, part_lse, out, lse = (
        np.full(n, np.nan, np.float32)
        for n in (splits * tokens * H * 512, splits * tokens * H, tokens * H * 512, tokens * H)
    )
    sink = None if call.sinks is None else call.sinks.numpy().astype(np.float32)
    table, lens = call.block_table, call.seq_lens
    machine.launch(
        kernel, (-(-H // 64) * tokens, splits, 1), seed,
        query=Pointer(given.query.ravel(), given.dtype), query_b=S * H * width, query_s=H * width, query_h=width,
        indices=Pointer(call.indices.numpy().ravel()), indices_b=S * k, indices_s=k, entries=k,
        table=None if table is None else Pointer(table.numpy().ravel()), table_b=0 if table is None else table.shape[1],
        lengths=None if lens is None else Pointer(lens.numpy()), sinks=None if sink is None else Pointer(sink),
        mask=None if shown is None else Pointer(shown.numpy().astype(np.uint8).ravel()),
        mask_b=0 if shown is None or len(shown) == 1 else shown[0].numel(),
        mask_s=0 if shown is None or shown.shape[2] == 1 else capacity, mask_t=1,
        places=Pointer(places), o_part=Pointer(part), lse_part=Pointer(part_lse), out=Pointer(out, given.dtype),
        lse=Pointer(lse), **scores(call.scale, call.softcap), T=capacity,
        reach=call.window + S - 1 if call.window else None, S=S, H=H, CAUSAL=call.causal, PARTIAL=int(splits > 1),
        **{bits: Pointer(words)}, **more,
    )  # fmt: skip
    out, lse = out.reshape(tokens, H, 512), lse.reshape(tokens, H)
    if splits > 1:
        assert np.isnan(out).all(), "a piece must not write the result"
        part, part_lse = part.reshape(splits, tokens, H, 512), part_lse.reshape(splits, tokens, H)
        assert not np.isnan(part_lse).any(), "a piece is missing"
        for token in range(tokens):
            out[token], lse[token] = merged(part[:, token], part_lse[:, token], sink)
    assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse[..., 0])), "rows that see nothing"
    assert not np.isnan(out).any(), "NaN in the result"
    seen = ~np.isneginf(lse)
    assert np.abs(lse[seen] - want_lse[..., 0][seen]).max(initial=0) < 1e-3
    assert np.linalg.norm(out - want) <= 6e-3 * np.linalg.norm(want)  # P is rounded to bf16


def beside(rows, apart):
    """A cache as the kernel is given it: (the memory, where it begins, from page to page); ``apart``: of two layers."""
    if not apart:
        return rows.ravel(), 0, rows[0].size
    pool = np.full((len(rows), 2, *rows.shape[1:]), np.nan if rows.dtype == np.float32 else 0xFF, rows.dtype)
    pool[:, 1] = rows
    return pool.ravel(), rows[0].size, 2 * rows[0].size


def simulate_lists(loaded, seed, lens, H, k, page=0, apart=False, least=1, held=False, **how):
    """Runs the kernel once and compares; raises AssertionError or SimulationError. ``apart``: pages of two layers."""
    module, machine = loaded
    given = listed(seed, lens, H, k, page=page, **how)
    flat, start, outer = beside(given.cache, apart)
    row, rope = given.cache.shape[2], None if given.call.rope is None else Pointer(flat, given.dtype, start + 512)
    launch_lists(
        machine, module.mla_seesaw_lists, seed, given, "words",
        latent=Pointer(flat, given.dtype, start), latent_b=outer, latent_t=row, rope=rope, rope_b=outer, rope_t=row,
        tokens=given.query.shape[0] * given.query.shape[1], least=least, PAGE=page if apart else 0, LIST_PAGE=page,
        REGS=232, HELD=held,
    )  # fmt: skip


def run_step(call, device, source=LIST_SOURCE, tolerance=2e-3, **constants):
    """Runs the step that a launch makes of a call, whose tensors hold its numbers, and compares; returns the step.

    ``tolerance`` is that of the logarithms.
    """
    plan = chosen_plan(call, device)
    step = next(s for s in hopper_steps.steps(call, plan, device, least=0) if isinstance(s, GluonStep))
    module, machine = load(source)
    B, S, H, _ = call.query.shape
    latent = call.latent if call.latent.dtype == torch.float8_e4m3fn else call.latent.double()
    want, want_lse = reference.decode_attention(call._replace(query=call.query.double(), latent=latent))
    tensors = dict(zip(BUFFERS, call[:TENSORS], strict=True))
    made = {}
    for name, (shape, dtype) in hopper_steps.scratch(call, plan, device).items():
        whole = dtype == torch.int32
        data = np.full(math.prod(shape), 10**9 if whole else np.nan, np.int32 if whole else np.float32)
        made[name] = Pointer(data, KINDS[dtype])
    pointers = made | {
        name: pointer_to(tensors[name], step.types[argument] == "*i32")
        for argument, name in step.buffers.items()
        if name not in made
    }
    machine.launch(getattr(module, step.fn.__name__), step.grid, 0, **step.arguments(pointers) | constants)
    if plan.splits > 1:
        part = made["part"].data.reshape(plan.splits, B * S, H, 512)
        part_lse = made["part_lse"].data.reshape(plan.splits, B * S, H)
        sink = None if call.sinks is None else call.sinks.numpy()
        pieces = [merged(part[:, token], part_lse[:, token], sink) for token in range(B * S)]
        out, lse = (np.stack(x) for x in zip(*pieces, strict=True))
    else:
        out, lse = made["out"].data, made["lse"].data
    want, want_lse = want.double().numpy().reshape(B * S, H, 512), want_lse.numpy().reshape(B * S, H)
    assert np.abs(lse.reshape(want_lse.shape) - want_lse).max() < tolerance
    assert np.linalg.norm(out.reshape(want.shape) - want) <= 8e-3 * np.linalg.norm(want)
    return step


KINDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "int32"}


def pointer_to(x, words=False):
    """Where a tensor begins, in all the memory that it is a view of; ``words``: in that memory as int32."""
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
    if words:
        return Pointer(memory.view(torch.uint8).numpy().view(np.int32), "int32", x.storage_offset() * x.itemsize // 4)
    whole = not x.is_floating_point()
    data = memory.to(torch.uint8).numpy() if x.dtype == torch.bool else (memory if whole else memory.float()).numpy()
    return Pointer(data, KINDS.get(x.dtype, "int32"), x.storage_offset())


def read(call):
    """bool, as the cache's first two axes: rows that some query token sees."""
    B, S = call.indices.shape[:2]
    rows, T = np.zeros(call.latent.shape[:2], bool), call.sizes.T
    for b in range(B):
        length = T if call.seq_lens is None else int(call.seq_lens[b])
        for s in range(S):
            for n in map(int, call.indices[b, s]):
                own = length - S + s
                if not 0 <= n < length or (call.causal and n > own) or (call.window and n <= own - call.window):
                    continue
                if call.mask is not None and not call.mask.expand(B, 1, S, T)[b, 0, s, n]:
                    continue
                page = call.latent.shape[1]
                rows[(b, n) if call.block_table is None else (call.block_table[b, n // page], n % page)] = True
    return rows


LIST_CASES = {
    "held query": {"lens": [200, 70], "H": 20, "S": 2, "k": 150, "page": 16, "held": True},
    "one entry": {"lens": [1], "H": 64, "k": 1},
    "a block": {"lens": [90], "H": 64, "k": 64, "kind": "full"},
    "two blocks, 16 heads": {"lens": [300, 70], "H": 16, "k": 100},
    "80 heads, three tokens": {"lens": [260, 3], "H": 80, "S": 3, "k": 130, "sinks": True},
    "128 heads": {"lens": [200], "H": 128, "k": 192, "kind": "full"},
    "17 heads, not causal": {"lens": [200, 90], "H": 17, "S": 2, "k": 70, "causal": False},
    "shorter than the query": {"lens": [1, 2], "H": 20, "S": 3, "k": 66},
    "more entries than keys": {"lens": [70, 30], "H": 40, "k": 200, "splits": 2},
    "nothing": {"lens": [70, 30], "H": 20, "k": 130, "kind": "nothing"},
    "an empty request": {"lens": [0, 130], "H": 20, "k": 66, "page": 16},
    "blocks without a key": {"lens": [300, 300], "H": 20, "S": 2, "k": 260, "kind": "holes"},
    "blocks without a key, splits": {"lens": [300, 300], "H": 20, "S": 2, "k": 260, "kind": "holes", "splits": 3},
    "page 16": {"lens": [300, 17], "H": 24, "S": 2, "k": 140, "page": 16, "splits": 2},
    "page 64": {"lens": [300, 129], "H": 24, "k": 200, "page": 64, "sinks": True},
    "page 64, apart": {"lens": [300, 129], "H": 64, "S": 2, "k": 100, "page": 64, "apart": True},
    "page 8, apart, splits": {"lens": [100, 129], "H": 24, "k": 270, "page": 8, "apart": True, "splits": 3},
    "unused capacity": {"lens": [70, 200], "H": 20, "k": 90, "T": 333},
    "contiguous, whole": {"lens": [200, 200], "H": 20, "k": 150, "all_rows": True},
    "many splits, some empty": {"lens": [400], "H": 33, "k": 400, "splits": 9, "least": 2, "sinks": True},
    "a list that takes two looks": {"lens": [1300], "H": 20, "k": 1100},
    "splits that take two looks": {"lens": [2300], "H": 20, "k": 2200, "splits": 2},
    "fp16": {"lens": [100, 190], "H": 24, "S": 2, "k": 100, "page": 32, "dtype": "fp16"},
    "mask": {"lens": [300, 129], "H": 24, "S": 2, "k": 150, "mask": "BS"},
    "mask, one for all": {"lens": [300, 300], "H": 24, "k": 150, "mask": "", "all_rows": True, "sinks": True},
    "soft-cap, window": {"lens": [300, 129], "H": 24, "S": 2, "k": 150, "softcap": 2.0, "window": 130},
    "no rope, sinks": {"lens": [447, 430], "H": 64, "S": 2, "k": 300, "sinks": True, "rope": 0},
    "no rope, apart, splits": {"lens": [300, 90], "H": 80, "k": 200, "page": 64, "apart": True, "splits": 2, "rope": 0},
    "no rope, an empty request, window": {"lens": [0, 300], "H": 20, "k": 150, "window": 130, "rope": 0, "sinks": True},
    "mask of tokens, splits": {"lens": [300, 290], "H": 70, "S": 2, "k": 200, "mask": "S", "splits": 2},
}


def assert_list_caught(text, replacement, case):
    """As ``assert_caught`` of tests/support/gluon_cases.py."""
    assert_wrong(simulate_lists, LIST_SOURCE, text, replacement, case)
