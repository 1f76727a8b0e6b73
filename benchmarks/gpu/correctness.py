"""Are the kernels right on this GPU? The tolerance matrix and the features, against float64; nothing is timed before.

Every case has fresh inputs, NaN in whatever no request owns, and outputs poisoned with NaN.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases import FP8, Problem, Shape, kernels_for, left_padded, lists, poisoned, problem
from benchmarks.gpu.common import Case, Row, Run, SkipError
from benchmarks.gpu.compare import compare
from mla_compile.kernels.tuned import TABLE

MATRIX = {"B": (1, 2, 6, 64), "S": (1, 2, 4), "kv": (20, 140, 4096), "H": (1, 3, 9, 63, 64, 126, 128)}
SMALL = {"B": (1, 2), "S": (1, 2), "kv": (20, 65), "H": (3, 64)}
# Lists of k keys: less than a block of the Hopper kernel's, a whole one, a part of the last one, more than it looks up
# at a time (in one split, where there are several tokens); heads that leave its 64 rows partly empty.
LISTED = {"k": (1, 64, 100, 2048), "S": (1, 3), "H": (9, 17, 64, 80, 128)}
PACKED: dict[str, Any] = {"cache": FP8, "groups": 4}  # rows of 656 bytes: DeepSeek-V3.2's
# Seconds of a case: a new kind of kernel is compiled in 2 to 4 on one core, what is compiled already runs in a tenth.
COMPILED, KNOWN = 3.0, 0.3
SANITIZED = 200.0  # Triton 3.6 and 3.7 compile the sanitizer's checks slowly; nobody has waited for the end yet


def seed_of(key: str) -> int:
    """A seed of its own for every case."""
    return zlib.crc32(key.encode())


def checked(posed: Problem, kernel: str) -> Row:
    """One problem through one kernel, its outputs poisoned beforehand."""
    chosen = posed.plan(kernel)
    if chosen is None:
        raise SkipError(f"the plan does not take {kernel} here")
    with poisoned():
        got = posed.ours(chosen)
    not_replaced(kernel)
    return {**compare(got, posed.truth(), posed.shape.dtype), "plan": str(chosen)}


def not_replaced(kernel: str) -> None:
    """Raises where the Hopper kernel was asked for and some form of it did not compile: the library then falls back."""
    from mla_compile.kernels.hopper import runner

    if kernel != "triton" and (not runner._compiled or None in runner._compiled.values()):
        raise RuntimeError("the Hopper kernel did not compile here: the portable one ran in its place")


def matrix(run: Run) -> Iterator[Case]:
    """FlashMLA's sizes; lengths are full, varied and partly zero in turn, causal where there are more query tokens."""
    grid = SMALL if run.dry else MATRIX
    hows = itertools.cycle(("varied", "full", "zeros"))
    # Short and small first, so that a run stopped early has seen every head count.
    sizes = itertools.product(grid["kv"], grid["B"], grid["S"], grid["H"])
    for (kv, B, S, H), how in zip(sizes, hows, strict=False):
        shape = Shape(B=B, kv=kv, H=H, S=S)
        for kernel, made in kernels_for(shape, run.device, {}).items():
            key = f"{kernel}: {shape} {how}"

            def call(shape: Shape = shape, how: str = how, kernel: str = kernel, key: str = key) -> Row:
                return checked(problem(shape, run.device, seed_of(key), how=how, causal=shape.S > 1), kernel)

            # A few heads and many, a request or several, one token or two: each tile and grid once.
            first = kv == grid["kv"][-1] and S < 4 and B in (1, 6, grid["B"][-1]) and H in (3, 9, 64, 128)
            yield Case(key, call, COMPILED if first else KNOWN, first, str(made))


def of_lists(run: Run) -> Iterator[Case]:
    """Lists of many lengths, over pages and in one piece, in all kernels that take them."""
    hows = itertools.cycle(("varied", "full", "zeros"))
    sizes = [(20, 1, 3)] if run.dry else list(itertools.product(*LISTED.values()))
    for (k, S, H), page, how in zip(sizes, itertools.cycle((64, None, 16, 1)), hows, strict=False):
        shape = Shape(B=3, kv=70 if run.dry else 4096, H=H, S=S, page=page)
        made = {"indices": lists(shape, k, torch.device("cpu")), "num_splits": int(S > 1)}
        for kernel, chosen in kernels_for(shape, run.device, made).items():
            key = f"{kernel}: lists of {k}, {shape} {how}"

            def call(shape: Shape = shape, how: str = how, kernel: str = kernel, key: str = key, k: int = k) -> Row:
                options = {"indices": lists(shape, k, run.device), "num_splits": int(shape.S > 1)}
                posed = problem(shape, run.device, seed_of(key), how=how, causal=shape.S > 1, **options)
                return checked(hidden_rows_of_nan(posed), kernel)

            yield Case(key, call, KNOWN, of=str(chosen))


Options = Callable[[Shape, torch.device], dict[str, Any]]


def _none(shape: Shape, device: torch.device) -> dict[str, Any]:
    return {}


def _left_padding(shape: Shape, device: torch.device) -> dict[str, Any]:
    """A boolean mask that hides b * 70 first tokens of request b, so that whole tiles are hidden."""
    return {"mask": left_padded([shape.kv - 70 * b for b in range(shape.B)], shape.kv, device)}


def _holes(shape: Shape, device: torch.device) -> dict[str, Any]:
    """A boolean mask, the same for all query rows, with holes in its tiles and three of four tiles hidden."""
    generator = torch.Generator(device).manual_seed(7)
    mask = torch.rand((shape.B, 1, 1, shape.kv), generator=generator, device=device) < 0.7
    return {"mask": mask & (torch.arange(shape.kv, device=device) // 64 % 4 == 0)}


def _additive(shape: Shape, device: torch.device) -> dict[str, Any]:
    """A random additive mask per head and query token, minus infinity in a third of the places."""
    generator = torch.Generator(device).manual_seed(5)
    size = (shape.B, shape.H, shape.S, shape.kv)
    mask = torch.randn(size, generator=generator, device=device)
    return {"mask": mask.masked_fill(torch.rand(size, generator=generator, device=device) < 0.33, -torch.inf)}


def _scales(shape: Shape, device: torch.device) -> dict[str, Any]:
    """A scale for each token, about 0.1; pages of ``problem`` are counted there, so enough for any of them."""
    generator = torch.Generator(device).manual_seed(6)
    if shape.page is None:
        return {"kv_scale": 0.05 + 0.1 * torch.rand(shape.B, shape.kv, generator=generator, device=device)}
    count = shape.B * shape.pages + 3
    return {"kv_scale": 0.05 + 0.1 * torch.rand(count, shape.page, generator=generator, device=device)}


def _lists(shape: Shape, device: torch.device) -> dict[str, Any]:
    """A list for each query token, of half the keys."""
    return {"indices": lists(shape, shape.kv // 2, device)}


def _lists_and_mask(shape: Shape, device: torch.device, *, heads: bool = False, added: bool = False) -> dict[str, Any]:
    """Lists, and a mask of what remains; one that tells heads apart has the rows gathered first."""
    mask = _additive(shape if heads else replace(shape, H=1), device)["mask"]
    return {**_lists(shape, device), "mask": mask if added else mask > 0}


def features(run: Run) -> Iterator[Case]:
    """One case for each feature and layout, for few and for many query rows."""
    kv = 70 if run.dry else 1500
    base = Shape(B=3, kv=kv, H=16, S=2)
    sinks: Options = lambda shape, device: {"sinks": torch.linspace(-2, 3, shape.H, device=device)}  # noqa: E731
    one_scale: Options = lambda shape, device: {"kv_scale": torch.tensor(0.13, device=device)}  # noqa: E731
    wanted: list[tuple[str, dict[str, Any], Options]] = [
        *((f"page {page}", {"page": page}, _none) for page in (1, 16, 32, 128)),
        *((f"{L}+{R}", {"L": L, "R": R}, _none) for L, R in ((256, 32), (256, 64), (512, 0), (320, 24), (63, 17))),
        ("contiguous", {"page": None}, _none),
        ("float16", {"dtype": torch.float16}, _none),
        ("float32", {"dtype": torch.float32}, _none),
        ("float32 contiguous", {"dtype": torch.float32, "page": None}, _none),
        ("fp8, one scale", {"cache": FP8}, one_scale),
        ("fp8, scale per token", {"cache": FP8}, _scales),
        ("fp8 contiguous, scale per token", {"cache": FP8, "page": None}, _scales),
        ("fp8, page 1, scale per token", {"cache": FP8, "page": 1}, _scales),
        ("fp8, sinks", {"cache": FP8}, lambda s, d: {**sinks(s, d), **one_scale(s, d)}),
        ("fp8, float16, one scale", {"cache": FP8, "dtype": torch.float16}, one_scale),
        ("fp8, mask with holes", {"cache": FP8, "page": None}, lambda s, d: {**_holes(s, d), **one_scale(s, d)}),
        (
            "fp8, softcap, window, scale per token",
            {"cache": FP8, "page": 16},
            lambda s, d: {**_scales(s, d), "softcap": 3.0, "window": 200},
        ),
        ("fp8, rows of 656 bytes", PACKED, _none),
        ("fp8, rows of 656 bytes, contiguous", {**PACKED, "page": None}, _none),
        ("fp8, rows of 656 bytes, page 1", {**PACKED, "page": 1}, _none),
        ("fp8, rows of 672 bytes", {**PACKED, "groups": 8}, _none),
        ("fp8, rows of 656 bytes, mask with holes", {**PACKED, "page": None}, _holes),
        (
            "fp8, rows of 656 bytes, sinks, softcap, window",
            {**PACKED, "page": 16},
            lambda s, d: {**sinks(s, d), "softcap": 3.0, "window": 200},
        ),
        ("sinks", {}, sinks),
        ("512+0, sinks, window", {"R": 0}, lambda s, d: {**sinks(s, d), "window": 128}),
        ("512+0, mask with holes", {"R": 0, "page": None}, _holes),
        ("softcap", {}, lambda *_: {"softcap": 2.5}),
        ("window", {}, lambda *_: {"window": 33}),
        ("left padding", {"page": None}, _left_padding),
        ("mask with holes", {"page": None}, _holes),
        ("additive mask", {"page": None}, _additive),
        ("many splits", {}, lambda *_: {"num_splits": 100}),
        ("one split", {}, lambda *_: {"num_splits": 1}),
        ("deterministic", {}, lambda *_: {"deterministic": True}),
        ("lists", {}, _lists),
        ("lists contiguous", {"page": None}, _lists),
        ("lists, 512+0, sinks", {"R": 0}, lambda s, d: {**_lists(s, d), **sinks(s, d)}),
        ("lists, float16", {"dtype": torch.float16}, _lists),
        ("lists, float32", {"dtype": torch.float32}, _lists),
        ("lists, fp8, scale per token", {"cache": FP8}, lambda s, d: {**_lists(s, d), **_scales(s, d)}),
        ("lists, fp8, one scale", {"cache": FP8}, lambda s, d: {**_lists(s, d), **one_scale(s, d)}),
        ("lists, fp8, rows of 656 bytes", PACKED, _lists),
        ("lists, fp8, rows of 656 bytes, page 1", {**PACKED, "page": 1}, _lists),
        ("lists, fp8, rows of 656 bytes, mask", {**PACKED, "page": None}, _lists_and_mask),
        ("lists, mask", {"page": None}, _lists_and_mask),
        ("lists, added mask", {"page": None}, lambda s, d: _lists_and_mask(s, d, added=True)),
        ("lists, mask of heads", {"page": None}, lambda s, d: _lists_and_mask(s, d, heads=True)),
        (
            "lists, sinks, softcap, window",
            {},
            lambda s, d: {**_lists(s, d), **sinks(s, d), "softcap": 3.0, "window": 9},
        ),
        ("lists, deterministic", {}, lambda s, d: {**_lists(s, d), "deterministic": True}),
        ("sinks, softcap, window", {}, lambda s, d: {**sinks(s, d), "softcap": 3.0, "window": 200}),
    ]
    heads = (3,) if run.dry else (16, 128)
    for (name, changes, options), H in itertools.product(wanted, heads):
        shape = replace(base, H=H, **changes)
        for kernel, made in kernels_for(shape, run.device, options(shape, torch.device("cpu"))).items():
            key = f"{kernel}: {name} h{H}"

            def call(shape: Shape = shape, options: Options = options, kernel: str = kernel, key: str = key) -> Row:
                made = options(shape, run.device)
                how = "full" if "mask" in made else "zeros"
                posed = problem(shape, run.device, seed_of(key), how=how, causal=shape.S > 1, **made)
                return checked(hidden_rows_of_nan(posed), kernel)

            yield Case(key, call, COMPILED, of=str(made))


def hidden_rows_of_nan(posed: Problem) -> Problem:
    """The same, with NaN in the rows that a boolean mask hides from all queries, or that none of their lists names."""
    mask, as_bytes = posed.options.get("mask"), posed.kv.itemsize == 1
    bits, nan = posed.kv.view(torch.uint8) if as_bytes else posed.kv, 0xFF if as_bytes else float("nan")
    if "indices" in posed.options:
        places = posed.places()
        named = torch.zeros(posed.kv.shape[:2].numel(), dtype=torch.bool, device=places.device)
        named[places[places >= 0].long()] = True
        bits[~named.view(posed.kv.shape[:2])] = nan
    elif mask is not None and mask.dtype == torch.bool:
        bits[~mask[:, 0, 0]] = nan
    return posed


def separate_values(run: Run) -> Row:
    """Values of another width than the latent, in a strided cache."""
    shape = Shape(B=2, kv=50 if run.dry else 700, H=9, page=None, L=128, R=32)
    posed = problem(shape, run.device, 11)
    wide = torch.randn(2, shape.kv, 96, device=run.device).to(shape.dtype)
    posed.options["values"] = wide[..., 8:88]
    return checked(posed, "triton")


def float32_query(run: Run) -> Row:
    """A float32 query beside a float16 cache, too large for float16 itself."""
    shape = Shape(B=2, kv=50 if run.dry else 700, H=9, dtype=torch.float32, cache=torch.float16)
    posed = problem(shape, run.device, 12)
    posed.query[..., 0] *= 2.0**14  # an absorbed query has such columns where the latent's are small
    posed.kv[..., 0] *= 2.0**-10
    chosen = posed.plan("triton")
    with poisoned():
        got = posed.ours(chosen)
    return compare(got, posed.truth(), torch.float16)


def large_offsets(run: Run, kernel: str = "triton", options: Options = _none) -> Row:
    """Pages that lie more than 2^31 elements from the start of the cache."""
    shape = Shape(B=2, kv=20 if run.dry else 300, H=16 if kernel == "triton" else 64)
    posed = problem(shape, run.device, 13, **options(shape, run.device))
    used = posed.kv.shape[0]
    total = used + 2 if run.dry else 2**31 // (64 * 576) + 2 + used
    if not run.dry and torch.cuda.mem_get_info()[0] < 2.5 * total * 64 * 576 * 2:
        raise SkipError("not enough free memory for a cache of more than 2^31 elements")
    pool = torch.empty(total, 64, 576, dtype=shape.dtype, device=run.device)
    pool[total - used :] = posed.kv
    assert posed.table is not None
    posed.table = torch.where(posed.table >= 0, posed.table + (total - used), posed.table)
    want = replace_pool(posed, pool)
    return checked(want, kernel)


def replace_pool(posed: Problem, pool: Tensor) -> Problem:
    """The same problem over another page pool."""
    return Problem(posed.shape, posed.query, pool, posed.table, posed.lens, posed.options)


def graph_replay(run: Run, kernel: str, options: Options = _none) -> Row:
    """Capture once, then change lengths, pages, queries and lists in place: the replay follows them."""
    if run.device.type != "cuda":
        raise SkipError("CUDA graphs need a GPU")
    shape = Shape(B=6, kv=4096, H=64)
    first = problem(shape, run.device, 14, **options(shape, run.device))
    chosen = first.plan(kernel)
    if chosen is None:
        raise SkipError(f"the plan does not take {kernel} here")
    assert first.table is not None
    first.ours(chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = first.ours(chosen)
    worst: Row = {}
    for seed, how in ((15, "varied"), (16, "zeros"), (17, "full")):
        other = problem(shape, run.device, seed, how=how, **options(shape, run.device))
        assert other.table is not None
        if "indices" in first.options:
            other.options["indices"] = other.options["indices"].roll(seed, 0)
            first.options["indices"].copy_(other.options["indices"])
        for x in got:
            x.fill_(float("nan"))
        first.query.copy_(other.query)
        first.lens.copy_(other.lens)
        first.table.copy_(other.table)
        first.kv.fill_(float("nan"))
        first.kv[: other.kv.shape[0]].copy_(other.kv)
        graph.replay()
        row = compare(got, other.truth(), shape.dtype)
        if row.get("status") == "failed":
            return {**row, "error": f"after lengths {how}: {row['error']}"}
        worst = max((worst, row), key=lambda r: r.get("out_max_error", -1.0))
    return worst


def batch_invariance(run: Run, H: int, options: Options = _none) -> Row:
    """deterministic=True: a request's bits are the same alone, in a batch, and in a larger table."""
    shape = Shape(B=5, kv=90 if run.dry else 5000, H=H)
    posed = problem(shape, run.device, 18, how="varied", deterministic=True, **options(shape, run.device))
    assert posed.table is not None
    together = posed.ours()
    for b in range(shape.B):
        table = torch.cat([posed.table[b : b + 1], torch.full_like(posed.table[b : b + 1], -1)], dim=1)
        own = {name: x[b : b + 1] if name == "indices" else x for name, x in posed.options.items()}
        alone = Problem(replace(shape, B=1), posed.query[b : b + 1], posed.kv, table, posed.lens[b : b + 1], own)
        for name, a, c in zip(("out", "lse"), together, alone.ours(), strict=True):
            if not torch.equal(a[b : b + 1], c):
                return {"status": "failed", "error": f"{name} of request {b} differs between alone and together"}
    return {}


def repeated(run: Run, kernel: str, options: Options = _none, **of: Any) -> Row:
    """The same call 50 times gives the same bits: a moving error is a race. ``of`` is the cache."""
    shape = Shape(B=4, kv=60 if run.dry else 4096, H=128, **of)
    posed = problem(shape, run.device, 19, how="varied", **options(shape, run.device))
    chosen = posed.plan(kernel)
    if chosen is None:
        raise SkipError(f"the plan does not take {kernel} here")
    first = posed.ours(chosen)
    for index in range(3 if run.dry else 50):
        again = posed.ours(chosen)
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            return {"status": "failed", "error": f"call {index + 2} differs from the first"}
    return {}


def consan(run: Run) -> Iterator[Case]:
    """The Hopper kernel under Triton's concurrency sanitizer, which stops at a race; small sizes."""

    def call(shape: Shape, options: Options, key: str) -> Row:
        if run.device.type != "cuda":
            raise SkipError("the sanitizer runs on a GPU only")
        from mla_compile.kernels import launch
        from mla_compile.kernels.hopper import runner

        runner.consan()
        launch.clear()
        made = options(shape, run.device)
        posed = problem(shape, run.device, seed_of(key), how="varied", causal=shape.S > 1, **made)
        return checked(hidden_rows_of_nan(posed), "gluon")

    plain = (Shape(B=1, kv=64, H=64), Shape(B=2, kv=200, H=64, S=2), Shape(B=1, kv=513, H=128))
    wanted: list[tuple[str, Shape, Options]] = [(str(shape), shape, _none) for shape in plain]
    few = Shape(B=2, kv=513, H=20, page=None)
    wanted.append((f"{few}, mask with holes", few, _holes))
    sparse = Shape(B=2, kv=513, H=64, S=2)
    shared = replace(sparse, R=0)
    wanted += [(f"{sparse}, lists", sparse, _lists), (str(shared), shared, _none), (f"{shared}, lists", shared, _lists)]
    converted = replace(few, cache=FP8)
    wanted.append((f"{converted}, scale per token", converted, _scales))
    packed = Shape(B=2, kv=513, H=20, **PACKED)
    wanted += [(str(packed), packed, _none), (f"{packed}, lists", packed, _lists)]
    for name, shape, options in wanted:
        key = f"gluon under ConSan: {name}"
        made = kernels_for(shape, run.device, options(shape, torch.device("cpu"))).get("gluon")
        yield Case(key, lambda s=shape, o=options, k=key: call(s, o, k), SANITIZED, of=str(made))  # type: ignore[misc]


def cases(run: Run) -> Iterator[Case]:
    """Special cases (each once) and features, then the matrix, whose first rows are the smoke test."""
    special: list[tuple[str, Callable[[], Row]]] = [
        ("triton: separate values", lambda: separate_values(run)),
        ("triton: float32 query", lambda: float32_query(run)),
        *((f"{kernel}: graph replay", lambda k=kernel: graph_replay(run, k)) for kernel in ("triton", "gluon")),  # type: ignore[misc]
        *((f"{kernel}: repeated", lambda k=kernel: repeated(run, k)) for kernel in ("triton", "gluon")),  # type: ignore[misc]
        *(
            (f"{kernel}: {name}, lists", lambda k=kernel, f=function: f(run, k, _lists))  # type: ignore[misc]
            for kernel in ("triton", "gluon")
            for name, function in (("graph replay", graph_replay), ("repeated", repeated))
        ),
        ("gluon: repeated, 512+0", lambda: repeated(run, "gluon", R=0)),
        ("gluon: repeated, 512+0, lists", lambda: repeated(run, "gluon", _lists, R=0)),
        ("gluon: repeated, fp8", lambda: repeated(run, "gluon", _scales, cache=FP8)),
        ("gluon: repeated, fp8 in rows of 656 bytes", lambda: repeated(run, "gluon", **PACKED)),
        ("gluon: repeated, fp8 in rows of 656 bytes, lists", lambda: repeated(run, "gluon", _lists, **PACKED)),
        ("triton: batch invariance, lists", lambda: batch_invariance(run, 16, _lists)),
        ("gluon: batch invariance, lists h128", lambda: batch_invariance(run, 128, _lists)),
        ("gluon: large offsets, lists", lambda: large_offsets(run, "gluon", _lists)),
        ("triton: batch invariance h16", lambda: batch_invariance(run, 16)),
        ("gluon: batch invariance h128", lambda: batch_invariance(run, 128)),
        ("triton: large offsets", lambda: large_offsets(run)),
    ]
    table = TABLE.read_text()  # these choose their tiles themselves
    for key, call in special:
        yield Case(key, call, COMPILED, "graph" in key or "repeated" in key, table)
    yield from features(run)
    yield from of_lists(run)
    # The smoke test takes the portable kernel first: the other one is the likelier to hang.
    yield from sorted(matrix(run), key=lambda case: case.first and not case.key.startswith("triton"))
