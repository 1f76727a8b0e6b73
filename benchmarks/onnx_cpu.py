"""The exported attention core in ONNX Runtime on one CPU thread, against what one would write by hand.

The core is what a decode step does with a cache: W_kc on the query, attention over the latent rows, W_v on the result.

* ``exported``: our export of a module that expands K and V, as ``decode.onnx`` has it
* ``expanding``: the same module's expanded graph, which is what it does without us (``prefill.onnx``)
* ``by hand``: MatMul, Softmax, MatMul written with onnx.helper, without a mask: the floor of this runtime

With ``--in-place``: a step of a buffer of 32k rows of which few are used, against a buffer that is full with as many.

    python -m benchmarks.onnx_cpu --json benchmarks/results/onnx_cpu.json
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common  # isort: skip  (it sets OpenMP variables, before torch is imported)

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import mla_compile

L, R, N, V = 512, 64, 128, 128


class Core(nn.Module):
    """One decode step of attention as models write it: K and V of every head are made from the whole cache."""

    def __init__(self, H: int) -> None:
        super().__init__()
        self.H = H
        self.up = nn.Linear(L, H * (N + V), bias=False)

    def forward(
        self, query: Tensor, latent: Tensor, rope: Tensor, mask: Tensor, past_latent: Tensor, past_rope: Tensor
    ) -> Any:
        """Takes query [B,S,H,N+R]; latent, rope [B,S,.] of the new tokens; mask bool [B,1,S,T]; past_* [B,P,.]."""
        c = torch.cat([past_latent, latent], 1)
        r = torch.cat([past_rope, rope], 1)
        B, T = c.shape[0], c.shape[1]
        k, v = self.up(c).view(B, T, self.H, N + V).transpose(1, 2).split([N, V], -1)
        k = torch.cat([k, r[:, None].expand(B, self.H, T, R)], -1)
        out = nn.functional.scaled_dot_product_attention(query.transpose(1, 2), k, v, mask, scale=(N + R) ** -0.5)
        return out.transpose(1, 2), c, r


def export(H: int, folder: Path, profile: str) -> Path:
    """The core's graphs, for any batch, number of queries and length of the past."""
    torch.manual_seed(0)
    core = Core(H).eval().requires_grad_(False)
    B, S, P = 2, 3, 7
    batch, new, past = torch.export.Dim("batch"), torch.export.Dim("new"), torch.export.Dim("past", min=0)
    example = (
        torch.randn(B, S, H, N + R), torch.randn(B, S, L), torch.randn(B, S, R),
        torch.ones(B, 1, S, P + S, dtype=torch.bool), torch.randn(B, P, L), torch.randn(B, P, R),
    )  # fmt: skip
    tokens = {0: batch, 1: new}
    auto = torch.export.Dim.AUTO
    shapes = (tokens, tokens, tokens, {0: batch, 2: new, 3: auto}, {0: batch, 1: past}, {0: batch, 1: past})
    program = torch.export.export(core, example, dynamic_shapes=shapes, strict=False)
    mla_compile.export_onnx(program, folder / profile, profile=profile, verify=False)
    weight = core.up.weight.view(H, N + V, L)
    onnx.save(by_hand(weight[:, :N].contiguous(), weight[:, N:].transpose(1, 2).contiguous(), H), folder / "hand.onnx")
    return folder


def by_hand(w_kc: Tensor, w_v: Tensor, H: int) -> onnx.ModelProto:
    """The same numbers for one query of one sequence, heads as rows, nothing else."""
    node = helper.make_node
    f32 = TensorProto.FLOAT
    initializers = [
        helper.make_tensor("w_kc", f32, [H, N, L], w_kc.numpy().tobytes(), raw=True),
        helper.make_tensor("w_v", f32, [H, L, V], w_v.numpy().tobytes(), raw=True),
        helper.make_tensor("scale", f32, [], [(N + R) ** -0.5]),
        helper.make_tensor("per_head", TensorProto.INT64, [3], [H, 1, N + R]),
        helper.make_tensor("rows", TensorProto.INT64, [3], [1, H, L]),
        helper.make_tensor("heads", TensorProto.INT64, [3], [H, 1, L]),
        helper.make_tensor("rope_rows", TensorProto.INT64, [3], [1, H, R]),
        helper.make_tensor("sizes", TensorProto.INT64, [2], [N, R]),
    ]
    nodes = [
        node("Concat", ["past_latent", "latent"], ["c"], axis=1),
        node("Concat", ["past_rope", "rope"], ["r"], axis=1),
        node("Mul", ["query", "scale"], ["scaled"]),
        node("Reshape", ["scaled", "per_head"], ["q"]),
        node("Split", ["q", "sizes"], ["q_nope", "q_rope"], axis=2),
        node("MatMul", ["q_nope", "w_kc"], ["absorbed"]),
        node("Reshape", ["absorbed", "rows"], ["q_latent"]),
        node("Reshape", ["q_rope", "rope_rows"], ["q_r"]),
        node("Transpose", ["c"], ["ct"], perm=[0, 2, 1]),
        node("Transpose", ["r"], ["rt"], perm=[0, 2, 1]),
        node("MatMul", ["q_latent", "ct"], ["a"]),
        node("MatMul", ["q_r", "rt"], ["b"]),
        node("Add", ["a", "b"], ["scores"]),
        node("Softmax", ["scores"], ["p"], axis=-1),
        node("MatMul", ["p", "c"], ["o"]),
        node("Reshape", ["o", "heads"], ["per"]),
        node("MatMul", ["per", "w_v"], ["out"]),
    ]
    info = helper.make_tensor_value_info
    inputs = [
        info("query", f32, [1, 1, H, N + R]), info("latent", f32, [1, 1, L]), info("rope", f32, [1, 1, R]),
        info("past_latent", f32, [1, "p", L]), info("past_rope", f32, [1, "p", R]),
    ]  # fmt: skip
    outputs = [info("out", f32, None), info("c", f32, None), info("r", f32, None)]
    graph = helper.make_graph(nodes, "by_hand", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


class Bound:
    """A session on one thread with its inputs and outputs bound once; in place, the caches to the same buffers."""

    def __init__(self, file: Path, feeds: dict[str, np.ndarray], in_place: bool = False) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        names = [v.name for v in self.session.get_inputs()]
        values = {n: ort.OrtValue.ortvalue_from_numpy(feeds[n]) for n in names}
        for name, value in values.items():
            self.binding.bind_ortvalue_input(name, value)
        for output in self.session.get_outputs():
            buffer = values.get(output.name.removeprefix("present_")) if in_place else None
            if buffer is not None:
                self.binding.bind_ortvalue_output(output.name, buffer)
            else:
                self.binding.bind_output(output.name)

    def __call__(self) -> Any:
        """One step."""
        self.session.run_with_iobinding(self.binding)
        return self.binding.get_outputs()[0].numpy()


def feeds_of(H: int, T: int, capacity: int | None = None) -> dict[str, np.ndarray]:
    """Random inputs of a step that sees T tokens; ``capacity``: rows of the buffers."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    rows = capacity or T - 1
    return {
        "query": normal(1, 1, H, N + R), "latent": normal(1, 1, L), "rope": normal(1, 1, R),
        "mask": np.ones((1, 1, 1, T), np.bool_), "past_latent": normal(1, rows, L), "past_rope": normal(1, rows, R),
    }  # fmt: skip


def main() -> None:
    """Measures, prints tables, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for H in asked.heads:
            folder = export(H, Path(name) / str(H), "portable")
            for T in asked.tokens:
                feeds = feeds_of(H, T)
                runs = {
                    "exported": Bound(folder / "portable" / "decode.onnx", feeds),
                    "by hand": Bound(folder / "hand.onnx", feeds),
                }
                if H * T <= 16 * 32768:  # K and V of 128 heads and 32k tokens take 5 GB and ten seconds
                    runs["expanding"] = Bound(folder / "portable" / "prefill.onnx", feeds)
                check(runs)
                rows.append({"what": f"core, {H} heads, {T} tokens"} | measured(runs, asked.rounds))
        export(16, Path(name) / "in_place", "inplace")
        file = Path(name) / "in_place" / "inplace" / "decode.onnx"
        for used in (1024, 8192, 32768):
            runs = {
                f"buffer of {capacity}": Bound(file, feeds_of(16, used, capacity), in_place=True)
                for capacity in dict.fromkeys((used, 32768))
            }
            rows.append({"what": f"in place, 16 heads, {used} tokens"} | measured(runs, asked.rounds))
    for row in rows:
        print(row["what"])
        times = row["times"]
        print(common.table([[n, t, row["ratios"].get(n, "")] for n, t in times.items()], ["", "ms", "of the first"]))
    if asked.json is not None:
        common.write(asked.json, {"machine": common.machine_without_transformers(), "threads": 1}, rows)


def measured(runs: dict[str, Bound], rounds: int) -> dict[str, Any]:
    """Times in turns, and each variant's time over the first one's."""
    seconds = common.in_turns({n: partial(common.timed, run) for n, run in runs.items()}, rounds, 60.0)
    first = next(iter(seconds.values()))
    return {
        "times": {n: common.Times.of(s) for n, s in seconds.items()},
        "ratios": {n: f"{common.median_ratio(s, first):.2f}" for n, s in seconds.items()},
    }


def check(runs: dict[str, Bound]) -> None:
    """Nothing is timed before all agree."""
    results = {name: run() for name, run in runs.items()}
    reference = results["by hand"].ravel()
    for name, result in results.items():
        error = np.abs(result.ravel() - reference).max() / np.abs(reference).max()
        if not error < 1e-4:
            raise SystemExit(f"{name} differs from the graph by hand by {error:.1e}")


if __name__ == "__main__":
    main()
