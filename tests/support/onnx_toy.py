"""Tiny model directories, built by hand as export writes them, and the same model in numpy.

No attention: a token's logits are a chaotic function of three sums over everything before it. One runs over rows of a
cache whose tokens are axis 1, one over a cache whose tokens are axis 2, and one is a state of fixed size. Rows depend
on the token and on its position. A row that is lost, doubled, masked wrongly or at a wrong position changes the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from mla_compile.onnx.manifest import Cache, FileEntry, Manifest

VOCAB, WIDTH = 37, 12
TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def weights(width: int = WIDTH) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    return {
        "embed": random.standard_normal((VOCAB, width)).astype(np.float32),
        "mix": (0.8 * random.standard_normal((2 * width + 2, 29))).astype(np.float32),
        "head": random.standard_normal((29, VOCAB)).astype(np.float32),
    }


def caches(dtype: str = "float32", width: int = WIDTH) -> tuple[Cache, ...]:
    return (
        Cache("past_latent.0", "present_latent.0", 1, ("batch", None, width), dtype, True),
        Cache("past_rope.0", "present_rope.0", 2, ("batch", 1, None, 2), dtype, True),
        Cache("past_state.0", "present_state.0", None, ("batch", width), "float32", False),
    )


class _Nodes:
    """Nodes of a graph, one per call; constants by value."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, op: str, *inputs: str | np.ndarray, to: str = "", **attributes: Any) -> str:
        names = [value if isinstance(value, str) else self._constant(value) for value in inputs]
        name = to or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, names, [name], **attributes))
        return name

    def _constant(self, value: np.ndarray) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return name


def _i(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def graph(
    kind: str, profile: str, dtype: str, query: int | str, initializers: Sequence[onnx.TensorProto], width: int
) -> onnx.ModelProto:
    n, T = _Nodes(), TYPES[dtype]
    total = n("Gather", n("Shape", "attention_mask"), _i(1))
    past = n("Sub", total, n("Gather", n("Shape", "input_ids"), _i(1)))
    x = n("Gather", "embed", "input_ids")
    position = n("Unsqueeze", n("Cast", "position_ids", to_=1), _i(2))
    latent = n("Mul", x, n("Cos", n("Mul", position, np.float32(0.7))))
    rope = n("Unsqueeze", n("Sin", n("Mul", position, np.array([0.3, 1.1], np.float32))), _i(1))
    rows = {}
    for name, new, axis in (("latent", latent, 1), ("rope", rope, 2)):
        new, old, present = n("Cast", new, to_=T), f"past_{name}.0", f"present_{name}.0"
        if profile == "inplace":
            at = n("Expand", past, n("Shape", "input_ids", start=0, end=1))
            n("TensorScatter", old, new, at, to=present, axis=axis)
            used = n("Slice", present, _i(0), total, _i(axis))
        else:
            used = n("Concat", old, new, to=present, axis=axis)
        rows[name] = n("Cast", used, to_=1)
    scalar_total, scalar_past = n("Squeeze", total), n("Squeeze", past)
    t = n("Range", np.int64(0), scalar_total, np.int64(1))
    s = n("Unsqueeze", n("Range", scalar_past, scalar_total, np.int64(1)), _i(1))
    causal = n("Cast", n("LessOrEqual", t, s), to_=1)
    mask = n("Cast", "attention_mask", to_=1)
    visible = n("Mul", n("Unsqueeze", mask, _i(1)), causal)
    a = n("MatMul", visible, rows["latent"])
    b = n("MatMul", visible, n("Squeeze", rows["rope"], _i(1)))
    real = n("Unsqueeze", n("Slice", mask, past, total, _i(1)), _i(2))
    seen = n("CumSum", n("Mul", real, n("Mul", x, x)), np.int64(1))
    c = n("Add", seen, n("Unsqueeze", "past_state.0", _i(1)))
    n("Gather", c, np.int64(-1), to="present_state.0", axis=1)
    h = n("MatMul", n("Sin", n("MatMul", n("Concat", a, b, c, axis=2), "mix")), "head")
    if kind == "prefill":
        h = n("Slice", h, _i(-1), _i(1 << 40), _i(1))
    n("Cast", h, to="logits", to_=T)
    for node in n.nodes:  # `to` names the output here
        for attribute in node.attribute:
            attribute.name = "to" if attribute.name == "to_" else attribute.name

    def value(name: str, element: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, element, shape)

    tokens = "capacity" if profile == "inplace" else "past"
    inputs = [
        value("input_ids", TensorProto.INT64, ["batch", query]),
        value("attention_mask", TensorProto.INT64, ["batch", "total"]),
        value("position_ids", TensorProto.INT64, ["batch", query]),
    ]
    outputs = [value("logits", T, ["batch", 1 if kind == "prefill" else query, VOCAB])]
    for cache in caches(dtype, width):
        after = "capacity" if profile == "inplace" else "total"
        for names, name, length in ((inputs, cache.past, tokens), (outputs, cache.present, after)):
            shape = [length if size is None else size for size in cache.shape]
            names.append(value(name, TYPES[cache.dtype], shape))
    built = helper.make_graph(n.nodes, kind, inputs, outputs, [*initializers, *n.constants])
    return helper.make_model(built, ir_version=10, opset_imports=[helper.make_opsetid("", opset(profile))])


def opset(profile: str) -> int:
    return 24 if profile == "inplace" else 21


def build(
    directory: Path,
    profile: str = "portable",
    *,
    dtype: str = "float32",
    prefill: bool = False,
    decode_query: int | None = None,
    width: int = WIDTH,
    **fields: Any,
) -> Path:
    """Write a model directory; ``fields`` replace those of the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors, data = [], b""
    for name, array in weights(width).items():
        tensor = TensorProto(name=name, dims=array.shape, data_type=TensorProto.FLOAT)
        tensor.data_location = TensorProto.EXTERNAL
        data += b"\0" * (-len(data) % 64)
        entries = {"location": "weights.bin", "offset": str(len(data)), "length": str(array.nbytes)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
        data += array.tobytes()
    (directory / "weights.bin").write_bytes(data)
    graphs = {"decode": "decode.onnx"} | ({"prefill": "prefill.onnx"} if prefill else {})
    for kind, name in graphs.items():
        query = decode_query if kind == "decode" and decode_query else "query"
        onnx.save(graph(kind, profile, dtype, query, tensors, width), directory / name)
    write_manifest(
        directory,
        profile=profile,
        dtype=dtype,
        graphs=graphs,
        decode_query=decode_query,
        caches=caches(dtype, width),
        **fields,
    )
    return directory


def write_manifest(directory: Path, *, graphs: Mapping[str, str], profile: str, **fields: Any) -> None:
    files = {}
    for name in [*graphs.values(), "weights.bin"]:
        content = (directory / name).read_bytes()
        files[name] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
    given = {
        "opset": opset(profile),
        "minimum_onnxruntime": "1.20.0",
        "created_by": "tests",
        "vocab_size": VOCAB,
        "max_position": 4096,
        "eos_token_ids": (),
        "pad_token_id": 0,
        "attention": (),
        "weights_sha256": files["weights.bin"].sha256,
    }
    manifest = Manifest(graphs=graphs, profile=profile, files=files, **(given | fields))
    (directory / "mla_compile.json").write_text(manifest.to_json())


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """float32 with the values of ``dtype``."""
    if dtype != "bfloat16":
        return array.astype(dtype).astype(np.float32)
    bits = array.astype(np.float32).view(np.uint32).astype(np.uint64)
    nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return nearest_even.astype(np.uint32).view(np.float32)


def logits(tokens: Sequence[int], dtype: str = "float32", width: int = WIDTH) -> np.ndarray:
    """The model without caches, masks or graphs: float32 [len(tokens), VOCAB]."""
    w = weights(width)
    x = w["embed"][list(tokens)]
    position = np.arange(len(tokens), dtype=np.float32)[:, None]
    a = rounded(x * np.cos(position * np.float32(0.7)), dtype).cumsum(0)
    b = rounded(np.sin(position * np.array([0.3, 1.1], np.float32)), dtype).cumsum(0)
    c = (x * x).cumsum(0)
    return rounded(np.sin(np.concatenate([a, b, c], 1) @ w["mix"]) @ w["head"], dtype)


def greedy(prompt: Sequence[int], count: int, dtype: str = "float32", eos: Sequence[int] = ()) -> list[int]:
    """The tokens that follow a prompt, from the whole sequence each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(tokens, dtype)[-1].argmax()))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def edit(model: Path, change: Callable[[dict], Any]) -> None:
    """Change the manifest of a model directory."""
    path = model / "mla_compile.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def put(*keys: str | int, to: Any) -> Callable[[dict], None]:
    """A change that sets one field, given by its keys."""

    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = to

    return change
