"""The native library of the ONNX operator in a CUDA session of ONNX Runtime: right first, then how fast.

    python -m benchmarks.gpu.onnx_native --out FILE.json     builds the library for this card where none is there
    python -m benchmarks.gpu.onnx_native --dry-run           no GPU: the CPU kernel, tiny sizes

Compared with it are the function of standard operators that stands in the file, and what ONNX Runtime has of its own:
``com.microsoft::PagedAttention`` with a latent cache, which also appends the new row. A session has several attention
nodes with a cache each, so that no cache is left in the L2 from the node before; times are of one node, of a run that
ONNX Runtime replays from its CUDA graph, waited for by the host. Needs onnxruntime-gpu and onnx; says so where not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmarks.common  # noqa: F401  (sets the environment, so before torch)

import torch  # isort: skip
from torch import Tensor

from benchmarks.common import Times
from benchmarks.gpu import common
from benchmarks.gpu.common import Case, Row, Run, SkipError, Store
from benchmarks.gpu.timing import Clock
from mla_compile.errors import MlaCompileError
from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall

L, R, PAGE, NODES, ROUNDS = 512, 64, 64, 4, 30
SCALE = 192**-0.5
SOURCES = ("mla_compile", "mla_compile/kernels/tuned.json", "benchmarks/gpu/onnx_native.py")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # largest error over the largest value
SHAPES = ((1, 4096, 128), (1, 32768, 16), (8, 4096, 16), (32, 4096, 16), (32, 4096, 128), (1, 131072, 128))
_TYPES = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.bool: 9, torch.float16: 10, torch.bfloat16: 16}


@dataclass(frozen=True)
class Shape:
    """One batch of decode steps: B requests of T tokens, S queries of H heads."""

    B: int
    T: int
    H: int
    S: int = 1
    dtype: torch.dtype = torch.bfloat16
    query: torch.dtype = torch.float32
    mask: str | None = None  # "tokens": bool [B,1,1,T]; "rows": bool [B,1,S,T]; "added": [B,1,S,T]
    lens: bool = False
    sinks: bool = False
    causal: bool = False

    def __str__(self) -> str:
        name = f"B={self.B} T={self.T} H={self.H} S={self.S} {str(self.dtype).removeprefix('torch.')}"
        flags = (
            self.mask and f"mask {self.mask}",
            self.lens and "lens",
            self.sinks and "sinks",
            self.causal and "causal",
        )
        query = "" if self.query == self.dtype else f" {str(self.query).removeprefix('torch.')} query"
        return " ".join([name + query, *filter(None, flags)])


def _onnx() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise SkipError(f"{error.name} is not installed: pip install onnx onnxruntime-gpu") from error
    return onnx, onnxruntime


def providers(device: torch.device, graphs: bool) -> list[Any]:
    """What sessions run on; :class:`SkipError` where this onnxruntime has no CUDA."""
    _, ort = _onnx()
    if device.type != "cuda":
        return ["CPUExecutionProvider"]
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise SkipError(f"onnxruntime {ort.__version__} has no CUDAExecutionProvider: pip install onnxruntime-gpu")
    return [("CUDAExecutionProvider", {"enable_cuda_graph": int(graphs)})]


def library(device: torch.device) -> Path:
    """The library that is there and fits the card, or one built now for it alone."""
    from mla_compile.onnx import build, native

    arch = "sm_90"
    if device.type == "cuda":
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    path = native.find()
    if path is None or arch not in native.inspect(path).manifest["archs"]:
        dtypes = ("bfloat16", "float16", "float32") if device.type == "cuda" else ("float32",)
        path = build.build_library(
            archs=(arch,), dims=(build.NodeWidths(L, R),), dtypes=dtypes, jobs=common.os.cpu_count() or 1
        )
    return path


def inputs(shape: Shape, device: torch.device, node: int = 0) -> dict[str, Tensor]:
    """The tensors of one node."""
    g = torch.Generator(device).manual_seed(node)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=g, device=device)

    B, S, H, T = shape.B, shape.S, shape.H, shape.T
    found = {"query": normal(B, S, H, L + R).to(shape.query)}
    found |= {"latent": normal(B, T, L).to(shape.dtype), "rope": normal(B, T, R).to(shape.dtype)}
    if shape.mask:
        seen = torch.rand((B, 1, 1 if shape.mask == "tokens" else S, T), generator=g, device=device) > 0.3
        found["mask"] = seen if shape.mask != "added" else torch.where(seen, 0.5, -torch.inf).to(shape.dtype)
    if shape.lens:
        found["seq_lens"] = torch.linspace(0, T, B, device=device).long()
    if shape.sinks:
        found["sinks"] = normal(H)
    return found


def model(shape: Shape, nodes: int, function: bool) -> bytes:
    """``nodes`` attention nodes with inputs of their own; ``function``: with the body that exported files have."""
    onnx, _ = _onnx()
    helper, names = onnx.helper, ("query", "latent", "rope", "mask", "seq_lens", "sinks")
    given = inputs(Shape(**{**shape.__dict__, "B": 1, "T": 1}), torch.device("cpu"))
    attributes = {"scale": SCALE, **({"causal": 1} if shape.causal else {})}
    made, taken, given_out = [], [], []
    for i in range(nodes):
        own = [f"{name}{i}" if name in given else "" for name in names]
        while not own[-1]:
            own.pop()
        made.append(helper.make_node("DecodeAttention", own, [f"out{i}"], domain="mla_compile", **attributes))
        widths = {"latent": L, "rope": R, "query": L + R}
        for name, x in given.items():
            sizes = [None] * (x.dim() - 1) + [widths.get(name)]
            taken.append(helper.make_tensor_value_info(f"{name}{i}", _TYPES[x.dtype], sizes))
        given_out.append(helper.make_tensor_value_info(f"out{i}", _TYPES[shape.query], [None, None, None, L]))
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("mla_compile", 1)]
    functions = []
    if function:
        from mla_compile.onnx.function import Signature
        from mla_compile.onnx.function import function as body

        signature = Signature(
            query_dtype=_TYPES[shape.query], dtype=_TYPES[shape.dtype], La=L, Lb=R,
            mask=_TYPES[given["mask"].dtype] if "mask" in given else None, seq_lens=shape.lens, sinks=shape.sinks,
            causal=shape.causal,
        )  # fmt: skip
        functions = [body(signature, 21)]
    graph = helper.make_graph(made, "attention", taken, given_out)
    return bytes(
        helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions).SerializeToString()
    )


class Bound:
    """A session over tensors of torch: a call runs it and waits."""

    def __init__(
        self, serialized: bytes, given: dict[str, Tensor], out: dict[str, Tensor], device: torch.device, graphs: bool,
        registered: Path | None = None,
    ) -> None:  # fmt: skip
        _, ort = _onnx()
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if registered is not None:
            options.register_custom_ops_library(str(registered))
        self.session = ort.InferenceSession(serialized, options, providers=providers(device, graphs))
        wanted = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        if wanted not in self.session.get_providers():
            raise SkipError(f"{wanted} did not start: the CUDA libraries of this onnxruntime are missing")
        self.bound, self.kept = self.session.io_binding(), (given, out)
        for bind, tensors in ((self.bound.bind_input, given), (self.bound.bind_output, out)):
            for name, x in tensors.items():
                place = "cpu" if x.device.type == "cpu" else "cuda"
                bind(name, place, x.device.index or 0, _TYPES[x.dtype], list(x.shape), x.data_ptr())

    def __call__(self) -> None:
        """Run, and wait."""
        self.session.run_with_iobinding(self.bound)
        self.bound.synchronize_outputs()


def ours(shape: Shape, device: torch.device, nodes: int, *, registered: Path | None, graphs: bool) -> Bound:
    """Our operator; without a library its function."""
    given = {f"{name}{i}": x for i in range(nodes) for name, x in inputs(shape, device, i).items()}
    sizes = (shape.B, shape.S, shape.H, L)
    out = {f"out{i}": torch.full(sizes, torch.nan, dtype=shape.query, device=device) for i in range(nodes)}
    return Bound(model(shape, nodes, registered is None), given, out, device, graphs, registered)


def paged(shape: Shape, device: torch.device, nodes: int, graphs: bool) -> Bound:
    """ONNX Runtime's own operator over the same tokens in pages, the last of which it appends."""
    onnx, ort = _onnx()
    if tuple(map(int, ort.__version__.split(".")[:2])) < (1, 29):
        raise SkipError(f"onnxruntime {ort.__version__} has no latent PagedAttention, 1.29 is the first")
    if shape.dtype == torch.float32:
        raise SkipError("PagedAttention takes half precision only")
    helper, B, T, H, of = onnx.helper, shape.B, shape.T, shape.H, shape.dtype
    names = ["query", "key", "", "cache", "", "starts", "past", "table"]
    attributes = {"num_heads": H, "kv_num_heads": 1, "kv_cache_layout": "LATENT", "v_head_size": L, "scale": SCALE}
    count = torch.arange(B + 1, dtype=torch.int32, device=device)
    shared = {"starts": count, "past": torch.full_like(count[:-1], T - 1)}
    shared["table"] = torch.arange(B * (T // PAGE), dtype=torch.int32, device=device).view(B, -1)
    given, out, made = dict(shared), {}, []
    for i in range(nodes):
        x = inputs(shape, device, i)
        rows = torch.cat([x["latent"], x["rope"]], -1)
        given |= {f"query{i}": x["query"].to(of).view(B, -1), f"key{i}": rows[:, -1].contiguous()}
        given[f"cache{i}"] = rows.view(-1, PAGE, 1, L + R)
        out |= {f"out{i}": torch.empty(B, H * L, dtype=of, device=device), f"new{i}": given[f"cache{i}"]}
        own = [name and (name if name in shared else f"{name}{i}") for name in names]
        made.append(
            helper.make_node("PagedAttention", own, [f"out{i}", f"new{i}"], domain="com.microsoft", **attributes)
        )
    values = [
        [helper.make_tensor_value_info(n, _TYPES[x.dtype], list(x.shape)) for n, x in some.items()]
        for some in (given, out)
    ]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    serialized = helper.make_model(helper.make_graph(made, "paged", *values), opset_imports=imports, ir_version=10)
    return Bound(serialized.SerializeToString(), given, out, device, graphs)


def error(shape: Shape, bound: Bound, device: torch.device) -> float:
    """The first node's largest error over the largest value, against the reference in float64."""
    x = inputs(shape, device)
    x["query"] = x["query"].to(shape.dtype)  # as the kernels round it
    exact = {k: v.double() if v.dtype.is_floating_point else v for k, v in x.items()}
    want, _ = reference.decode_attention(DecodeCall(**exact, scale=SCALE, causal=shape.causal))
    got = bound.kept[1]["out0"].view(want.shape).double()
    return float((got - want).abs().max() / want.abs().max())


def correct(shape: Shape, device: torch.device, registered: Path) -> Row:
    """One node, three runs (the second is captured, the third replayed), each from a poisoned result."""
    bound = ours(shape, device, 1, registered=registered, graphs=device.type == "cuda")
    worst = 0.0
    for _ in range(3):
        bound.kept[1]["out0"].fill_(torch.nan)
        if device.type == "cuda":
            torch.cuda.synchronize()
        bound()
        worst = max(worst, error(shape, bound, device))
    if not worst <= TOLERANCE[shape.dtype]:
        raise AssertionError(f"relative error {worst:.2e}, at most {TOLERANCE[shape.dtype]:.0e}")
    return {"error": worst}


def timed(shape: Shape, device: torch.device, registered: Path) -> Row:
    """Microseconds of a node: ours, the function and ONNX Runtime's own, in turns."""
    clock, graphs, row = Clock(device), device.type == "cuda", {}
    made: dict[str, Callable[[], Bound]] = {
        "native": lambda: ours(shape, device, NODES, registered=registered, graphs=graphs),
        "function": lambda: ours(shape, device, NODES, registered=None, graphs=graphs),
        "paged": lambda: paged(shape, device, NODES, graphs),
    }
    calls: dict[str, Bound] = {}
    for name, make in made.items():
        try:
            calls[name] = make()
            for _ in range(3):
                calls[name]()
            row[f"{name} error"] = error(shape, calls[name], device)
        except SkipError as reason:
            calls.pop(name, None)
            row[name] = f"skipped: {reason}"
        except Exception as problem:  # noqa: BLE001  (ONNX Runtime raises its own kinds; the others are still timed)
            calls.pop(name, None)
            row[name] = f"failed: {str(problem)[:200]}"
    for name, seconds in clock.wall({n: c.__call__ for n, c in calls.items()}, ROUNDS, 3.0).items():
        row[name] = {k: 1e6 * v / NODES for k, v in Times.of(seconds).__dict__.items() if isinstance(v, float)}
    row["bytes"] = shape.B * shape.T * (L + R) * shape.dtype.itemsize
    return row


def cases(run: Run) -> Iterator[Case]:
    """The library, every dtype, mask and feature once, then times."""
    device = run.device

    def built() -> Row:
        providers(device, False)
        try:
            return {"library": str(library(device))}
        except MlaCompileError as reason:
            raise SkipError(str(reason)) from reason

    def of_library(call: Callable[[Shape, torch.device, Path], Row], shape: Shape) -> Row:
        found = run.store.rows(run.section)["library"]
        if found["status"] != "ok":
            raise SkipError(f"no library: {found.get('reason', found.get('error'))}")
        built = Path(found["library"])  # of an earlier run, perhaps on a machine that is gone
        return call(shape, device, built if built.exists() else library(device))

    yield Case("library", built, 120.0)
    half = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,)
    plain = Shape(3, 70 if run.dry else 1500, 4 if run.dry else 24, dtype=torch.float32)
    for dtype in (*half, torch.float32):
        for change in (
            {}, {"query": dtype}, {"H": 128}, {"B": 1, "T": 9000}, {"S": 3, "causal": True}, {"mask": "tokens"},
            {"S": 2, "mask": "rows"}, {"S": 2, "mask": "added", "causal": True}, {"lens": True, "sinks": True},
        ):  # fmt: skip
            shape = Shape(**{**plain.__dict__, "dtype": dtype, **change})
            yield Case(f"correct: {shape}", lambda shape=shape: of_library(correct, shape))  # type: ignore[misc]
    for B, T, H in SHAPES if not run.dry else ((1, 128, 2),):
        shape = Shape(B, T, H, dtype=torch.float32 if run.dry else torch.bfloat16)
        yield Case(f"time: {shape}", lambda shape=shape: of_library(timed, shape), 10.0)  # type: ignore[misc]


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 where something is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("onnx_native.json"))
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the CPU kernel and tiny sizes")
    given = parser.parse_args(arguments)
    if not (given.dry_run or torch.cuda.is_available()):
        print("there is no CUDA device; --dry-run goes through the script without one")
        return 2
    device = torch.device("cpu" if given.dry_run else "cuda", None if given.dry_run else 0)
    store = Store(given.out)
    store.data["about"] = {**common.machine(device), "run": store.run + 1}
    run = Run(store, "onnx", device, dry=given.dry_run, sources=SOURCES)
    run.cases(cases(run))
    for key, row in store.rows("onnx").items():
        facts = {k: v for k, v in row.items() if k not in ("status", "traceback", "seconds")}
        print(f"{row['status']:8} {key}  {facts}")
    print(common.counted(store.rows("onnx")))
    return int(bool(store.failures("onnx")))


if __name__ == "__main__":
    sys.exit(main())
