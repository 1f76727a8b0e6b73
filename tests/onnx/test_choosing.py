"""The functions around a list of keys, against the operators of torch in float64."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor

from mla_compile.kernels import alike, reference
from mla_compile.kernels.call import IndexCall
from mla_compile.onnx.choosing import Alike, IndexScoresSignature, alike_function, index_function
from mla_compile.onnx.op import ALIKE, ALIKE_INPUTS, DOMAIN, INDEX, INDEX_INPUTS

TYPES = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.float64: TensorProto.DOUBLE}
TYPES |= {torch.int32: TensorProto.INT32, torch.int64: TensorProto.INT64}


def run(
    kind: str, names: tuple[str, ...], given: dict[str, Tensor], output: int, body: onnx.FunctionProto, **attributes
) -> Tensor:
    inputs = [n if n in given else "" for n in names[: max(names.index(n) for n in given) + 1]]
    node = helper.make_node(kind, inputs, ["y"], domain=DOMAIN, **attributes)
    values = [helper.make_tensor_value_info(n, TYPES[t.dtype], [None] * t.dim()) for n, t in given.items()]
    graph = helper.make_graph(
        [node], "one", values, [helper.make_tensor_value_info("y", output, [None] * (3 if kind == INDEX else 4))]
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, functions=[body], opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {n: t.numpy() for n, t in given.items()})
    return torch.from_numpy(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize(("S", "T"), [(1, 37), (4, 5), (3, 1)])
@pytest.mark.parametrize("scale", [0.3, -0.7])
def test_scores_of_an_indexer(dtype, S, T, scale):
    generator = torch.Generator().manual_seed(1)
    given = {
        "query": torch.randn(2, S, 5, 12, generator=generator).to(dtype),
        "keys": 10 * torch.randn(2, T, 12, generator=generator).to(dtype),
        "weights": torch.randn(2, S, 5, generator=generator),
    }
    wide = TensorProto.DOUBLE if dtype == torch.float64 else TensorProto.FLOAT
    got = run(INDEX, INDEX_INPUTS, given, wide, index_function(IndexScoresSignature(12, wide), 21), scale=scale)
    scale = float(np.float32(scale))  # ONNX keeps attributes in float32
    expected = reference.index_scores(IndexCall(*(t.double() for t in given.values()), scale))
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (got - expected).abs().max() < (1e-12 if dtype == torch.float64 else 1e-6) * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("heads", [0, 1, 3], ids=["no mask", "one mask", "masks of heads"])
@pytest.mark.parametrize("used", [None, 9])
def test_rows_that_see_no_key_weigh_all_alike(dtype, hidden, heads, used):
    generator = torch.Generator().manual_seed(2)
    B, S, H, T, width, lowest = 2, 3, 3, 9, 6, -1e29
    out = torch.randn(B, S, H, width, generator=generator).to(dtype)
    lse = torch.randn(B, S, H, generator=generator)
    if hidden:
        lse[1, 2] = -1e30
        lse[0, 1, 2] = -3e38
    rows = torch.randn(B, T + (0 if used is None else 4), width, generator=generator).to(dtype)
    rows[:, T:] = torch.nan
    given, fill = {"out": out, "lse": lse, "values": rows}, 0.0
    if heads:
        fill = torch.finfo(dtype).min
        mask = torch.zeros(B, heads, S, T, dtype=dtype).masked_fill(
            torch.rand(B, heads, S, T, generator=generator) < 0.6, fill
        )
        mask[1, :, 2] = fill
        mask[1, 0, 2, 3] = fill / 2  # the greatest of a row that is hidden
        listed = torch.rand(B, S, T, generator=generator).argsort(-1)[..., :4].int()
        listed[0, 1, 2], listed[1, 2, 0], listed[1, 2, 1] = -1, 3, T + 8
        given |= {"mask": mask, "indices": listed}
    numbers = (given["mask"], given["indices"], fill) if heads else ()
    expected = alike.weigh_alike(out, lse, rows[:, :T], lowest, *numbers).double()
    if used is not None:
        given["used"] = torch.tensor([used])
    kind = TYPES[dtype]
    body = alike_function(Alike(kind, kind if heads else None, used is not None), 21)
    got = run(ALIKE, ALIKE_INPUTS, given, kind, body, lowest=lowest, **({"fill": fill} if heads else {}))
    assert (got.double() - expected).abs().max() <= (1e-6 if dtype == torch.float32 else 1e-3)
    assert torch.equal(got, out) is not hidden
