"""Calls of the Hopper kernel's own source on the CPU (tests/support/gluon_machine.py), compared with the reference.

Unused cache rows are NaN and unused table slots name no page.
"""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.merge import merge
from tests.support import schedules
from tests.support.gluon_machine import load
from tests.support.gluon_simulator import Descriptor, Pointer, round_to

SOURCE = {
    f"mla_compile.kernels.hopper.{name}": (Path(reference.__file__).parent / "hopper" / f"{name}.py").read_text()
    for name in (
        "cluster_gluon",
        "producer_gluon",
        "rows_gluon",
        "list_producer_gluon",
        "block_gluon",
        "scores_gluon",
        "decode_gluon",
    )
}


NOWHERE = 10**6  # a page that does not exist


def problem(lens, H, S, page=0, dtype="bf16", seed=0, T=None, rope=64):
    """Random query [B,S,H,512+rope], cache with NaN wherever no request has a row, and the block table (page > 0)."""
    rng, width = np.random.default_rng(seed), 512 + rope
    query = round_to(rng.standard_normal((len(lens), S, H, width)), dtype)
    T = T or max(1, *lens)
    if not page:
        cache = np.full((len(lens), T, width), np.nan, np.float32)
        for b, n in enumerate(lens):
            cache[b, :n] = round_to(rng.standard_normal((n, width)), dtype)
        return query, cache, None
    pages = [-(-n // page) for n in lens]
    order = iter(rng.permutation(sum(pages) + 2))
    cache = np.full((sum(pages) + 2, page, width), np.nan, np.float32)
    table = np.full((len(lens), max(1, *pages) + 1), NOWHERE, np.int32)
    for b, n in enumerate(lens):
        for j in range(pages[b]):
            table[b, j] = next(order)
            rows = min(page, n - j * page)
            cache[table[b, j], :rows] = round_to(rng.standard_normal((rows, width)), dtype)
    return query, cache, table


def random_mask(lens, T, kind, seed):
    """bool [B,T] or [1,T]: runs of keys, with whole tiles that nobody sees, and one request that sees nothing."""
    rng = np.random.default_rng(seed)
    mask = np.repeat(rng.random((len(lens) if kind == "each" else 1, -(-T // 16))) < 0.5, 16, axis=1)[:, :T]
    mask &= np.repeat(rng.random((len(mask), -(-T // 64))) < 0.7, 64, axis=1)[:, :T]
    mask[:, :1] = True
    if kind == "each":
        mask[-1] = len(lens) == 1
    return mask


def tiles_of(mask, lens, reach):
    """What kernels/triton/tiles_triton.py leaves of a mask, as int32: planes [6,lists,tiles,2] of tiles of 64 keys."""
    token = np.arange(mask.shape[1])
    first = [0 if reach is None else n - reach for n in lens]
    shown = np.stack([mask[b % len(mask)] & (token < n) & (token >= first[b]) for b, n in enumerate(lens)])
    tiles = -(-shown.shape[1] // 64)
    shown = np.pad(shown, ((0, 0), (0, tiles * 64 - shown.shape[1]))).reshape(len(lens), tiles, 64)
    work = np.full((6, len(lens), tiles), -(10**9), np.int64)  # what is not read names no tile
    words = np.packbits(shown, axis=-1, bitorder="little").view(np.int64)[..., 0]
    for b, word in enumerate(words):
        (seen,) = word.nonzero()
        work[3, b, : len(seen)], work[4, b, : len(seen)], work[5, b, 0] = seen, word[seen], len(seen)
    return work


def parts_of(rows):
    """The latent and rope of rows; None in place of rope that is not there."""
    return rows[..., :512], rows[..., 512:] if rows.shape[-1] > 512 else None


def expected(query, cache, table, lens, sinks, mask, **numbers):
    """out [B,S,H,512] and lse [B,S,H] by the reference, one request at a time."""
    B, S, H, _ = query.shape
    out, lse = np.zeros((B, S, H, 512)), np.full((B, S, H), -np.inf)
    for b, n in enumerate(lens):
        if n:
            rows = cache[b] if table is None else np.concatenate(cache[table[b, : -(-n // cache.shape[1])]])
            rows = torch.from_numpy(rows[None, :n].astype(np.float64))
            q = torch.from_numpy(query[b : b + 1].astype(np.float64))
            shown = None if mask is None else torch.from_numpy(mask[b % len(mask), :n])[None, None, None]
            call = DecodeCall(q, *parts_of(rows), mask=shown, **numbers)
            o, one = reference.decode_attention(call)
            out[b], lse[b] = o[0].numpy(), one[0].numpy()
    if sinks is not None:
        with np.errstate(divide="ignore"):
            out *= (np.exp(lse) / (np.exp(lse) + np.exp(sinks)))[..., None]
    return out, lse


def merged(part, part_lse, sinks):
    """Results of one request from its pieces: part [pieces,M,512], part_lse [pieces,M] in base 2, sinks [M] or None."""
    pieces, natural = torch.from_numpy(part).double(), torch.from_numpy(part_lse).double() * math.log(2)
    sink = None if sinks is None else torch.from_numpy(sinks)
    out, lse = merge(pieces[:, None, None], natural[:, None, None], sinks=sink)
    return out[0, 0].numpy(), lse[0, 0].numpy()


def unseen(cache, table, lens, reach, step=64):
    """Makes NaN of the rows before a window; the block table where slots before its first block name no page.

    Blocks are of ``step`` rows.
    """
    shown = None if table is None else table.copy()
    for b, n in enumerate(lens):
        begin = max(n - reach, 0)
        if table is None:
            cache[b, :begin] = np.nan
            continue
        page = cache.shape[1]
        for j in range(-(-begin // page)):
            cache[table[b, j], : begin - j * page] = np.nan
        shown[b, : begin // step * step // page] = NOWHERE
    return shown


def scores(scale, softcap):
    """The kernel's two numbers for the scores."""
    base_2 = math.log2(math.e)
    if softcap:
        return {"scale": np.float32(scale / softcap), "softcap": np.float32(softcap * base_2)}
    return {"scale": np.float32(scale * base_2), "softcap": None}


def simulate(
    loaded, seed, lens, H, S=1, page=0, splits=1, least=1, partitions=0, causal=True, sinks=False, dtype="bf16", T=None,
    all_rows=False, mask=None, softcap=0.0, window=0, parts=1, held=False, ctas=1, rope=64,
):  # fmt: skip
    """Runs the kernel once and compares; raises AssertionError or SimulationError."""
    module, machine = loaded
    query, cache, table = problem(lens, H, S, page, dtype, seed, T, rope)
    B, M, scale = len(lens), S * H, 192**-0.5
    work, reach = None, window + S - 1 if window else None
    if mask is not None:
        mask = random_mask(lens, cache.shape[1], mask, seed)
        cache[~np.broadcast_to(mask, cache.shape[:2])] = np.nan
        work = tiles_of(mask, lens, reach)
    sink = np.random.default_rng(seed).standard_normal(H).astype(np.float32) if sinks else None
    box = min(64, page & -page) if page else 64
    shown = unseen(cache, table, lens, reach) if window else table
    plan = schedules.reference(lens, max(lens), partitions, reach) if partitions else None
    slots = plan.slots if plan else splits * B
    part, part_lse, out, lse = unwritten(slots, B, M)
    machine.launch(
        module.mla_seesaw, (-(-M // (64 * ctas)), partitions or splits, 1 if partitions else B), seed, ctas,
        q=Pointer(query.ravel(), dtype), stride_qb=query[0].size, stride_qs=query[0, 0].size, stride_qh=512 + rope,
        latent=Descriptor(cache[..., :512], (1, box, 256 // parts if box == 64 else 64), dtype),
        rope=Descriptor(cache[..., 512:], (1, box, 64), dtype) if rope else None,
        table=None if table is None else Pointer(shown.ravel()), table_stride=0 if table is None else table.shape[1],
        seq_lens=None if all_rows else Pointer(np.array(lens, np.int32)), sinks=Pointer(sink) if sinks else None,
        items=Pointer(plan.items.numpy().ravel()) if plan else None,
        slots=Pointer(plan.shift.numpy()) if plan else None,
        work=None if work is None else Pointer(work.view(np.int32).ravel()),
        work_b=0 if work is None else work.shape[2], plane=0 if work is None else work[0].size,
        o_part=Pointer(part), lse_part=Pointer(part_lse), out=Pointer(out, dtype), lse=Pointer(lse),
        **scores(scale, softcap), reach=reach, T=NOWHERE if page else cache.shape[1], B=B, S=S, H=H,
        least=least, PAGE=page, BOX=box, CAUSAL=causal, PARTIAL=2 if partitions else int(splits > 1), REGS=232,
        PARTS=parts, HELD=held,
    )  # fmt: skip
    want = expected(query, cache, table, lens, sink, mask, scale=scale, causal=causal, softcap=softcap, window=window)
    compare((out, lse), (part, part_lse), want, plan, splits, sink)


def unwritten(slots, B, M):
    """Flat part, part_lse, out and lse."""
    return tuple(
        np.full(n, np.nan, np.float32) for n in (max(1, slots) * M * 512, max(1, slots) * M, B * M * 512, B * M)
    )


def compare(results, parts, want, plan, splits, sink):
    """Results, merged from their parts where they are in some, with those of ``expected``."""
    want, want_lse = want
    B, S, H = want_lse.shape
    M = S * H
    out, lse = results[0].reshape(B, M, 512), results[1].reshape(B, M)
    part, part_lse = parts[0].reshape(-1, M, 512), parts[1].reshape(-1, M)
    for b in range(B):
        rows_sink = None if sink is None else np.tile(sink, S)
        if plan and plan.count[b] > 1:
            piece = slice(plan.first[b], plan.first[b] + plan.count[b])
        elif not plan and splits > 1:
            piece = slice(b, None, B)
        else:
            continue
        assert np.isnan(out[b]).all(), "a piece must not write the result"
        assert not np.isnan(part_lse[piece]).any(), "a piece is missing"
        out[b], lse[b] = merged(part[piece], part_lse[piece], rows_sink)
    want, want_lse = want.reshape(out.shape), want_lse.reshape(lse.shape)
    assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse)), "rows that see nothing"
    assert not np.isnan(out).any(), "NaN in the result"
    seen = ~np.isneginf(lse)
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) < 1e-3
    assert np.linalg.norm(out - want) <= 6e-3 * np.linalg.norm(want)  # P is rounded to bf16


CASES = {
    "one row": {"lens": [1], "H": 64},
    "empty and full block": {"lens": [0, 64], "H": 16, "page": 64},
    "ragged": {"lens": [65, 128], "H": 12},
    "17 rows": {"lens": [129, 64], "H": 17, "page": 64},
    "33 rows of three tokens": {"lens": [2, 150, 0], "H": 11, "S": 3, "partitions": 2, "page": 64, "sinks": True},
    "two row blocks": {"lens": [129, 192], "H": 128, "page": 64},
    "causal, rows of two tokens": {"lens": [447], "H": 20, "S": 2, "page": 128},
    "shorter than the query": {"lens": [1, 2], "H": 8, "S": 3, "page": 64, "splits": 2},
    "splits, some empty": {"lens": [450, 3], "H": 40, "S": 2, "page": 64, "splits": 3},
    "page 16": {"lens": [300, 17], "H": 16, "S": 2, "page": 16, "splits": 2},
    "page 32": {"lens": [161], "H": 64, "page": 32, "sinks": True},
    "page 48": {"lens": [161, 48], "H": 8, "page": 48},
    "page 96": {"lens": [200, 96], "H": 8, "page": 96, "splits": 2, "sinks": True},
    "contiguous, unused capacity": {"lens": [70, 200], "H": 12, "T": 333},
    "contiguous, whole": {"lens": [200, 200], "H": 12, "all_rows": True, "causal": False},
    "not causal": {"lens": [100], "H": 8, "S": 2, "page": 64, "causal": False},
    "fixed chunks": {"lens": [330, 70], "H": 8, "page": 64, "splits": 5, "least": 2},
    "fp16": {"lens": [100, 190], "H": 12, "S": 2, "page": 32, "dtype": "fp16"},
    "mask": {"lens": [300, 129, 70], "H": 12, "mask": "each"},
    "mask, one for all": {"lens": [300, 300], "H": 20, "mask": "all", "all_rows": True, "sinks": True},
    "mask, causal tokens, splits": {"lens": [620, 65], "H": 17, "S": 3, "mask": "each", "splits": 3},
    "mask, capacity": {"lens": [200, 3], "H": 64, "mask": "all", "T": 333},
    "soft-cap": {"lens": [300, 70], "H": 20, "softcap": 2.0, "splits": 2},
    "window of a key": {"lens": [129, 64, 1], "H": 20, "S": 2, "window": 1},
    "window inside a block": {"lens": [130, 290, 0, 3], "H": 20, "S": 3, "page": 16, "window": 9, "sinks": True},
    "window of three blocks": {"lens": [447, 100, 300], "H": 12, "page": 48, "window": 150},
    "window, not causal": {"lens": [300, 200], "H": 12, "S": 2, "window": 70, "causal": False, "softcap": 3.0},
    "window, splits": {"lens": [900, 40], "H": 33, "page": 128, "window": 330, "splits": 4},
    "window, mask": {"lens": [400, 129], "H": 12, "S": 3, "window": 90, "mask": "each"},
    "window, schedule": {"lens": [900, 64, 300, 0, 447], "H": 12, "page": 32, "window": 200, "partitions": 3},
    "window, longer than all": {"lens": [100, 70], "H": 20, "page": 64, "window": 1000},
    "schedule, odd and even": {"lens": [65, 300, 1, 128, 0, 64, 190], "H": 12, "page": 64, "partitions": 3},
    "schedule, one partition": {"lens": [1, 64, 0, 65, 129, 3], "H": 8, "S": 2, "page": 16, "partitions": 1},
    "schedule, one long request": {"lens": [20, 900, 64], "H": 64, "page": 128, "partitions": 6, "sinks": True},
    "schedule, more than blocks": {"lens": [10, 130], "H": 8, "partitions": 16, "T": 150},
}


def assert_one_place(sources, text):
    """A bug can be put into the kernel."""
    assert sum(source.count(text) for source in sources.values()) == 1, f"the kernel has changed: seed {text!r} anew"


def _hunt(run, loaded, case):
    for seed in range(60):
        run(loaded, seed, **case)


_right = set()


def assert_wrong(run, sources, text, replacement, case):
    """``run`` finds a kernel right, and wrong with a text of its sources replaced.

    Many bugs show in one case, in which the kernel itself is run once.
    """
    assert_one_place(sources, text)
    known = (run, *sources, repr(case))
    if known not in _right:
        run(load(sources), 0, **case)
        _right.add(known)
    loaded = load({name: source.replace(text, replacement) for name, source in sources.items()})
    with pytest.raises(AssertionError):  # of the comparison, or SimulationError
        _hunt(run, loaded, case)


def assert_caught(text, replacement, case):
    """A bug that is put into the kernel is caught."""
    assert_wrong(simulate, SOURCE, text, replacement, case)
