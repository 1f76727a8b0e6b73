"""The functions of standard operators against the reference in float64: every input, every feature."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.onnx.function import Signature, function
from mla_compile.onnx.listed import ListedSignature, listed_function
from mla_compile.onnx.op import ALIKE, DOMAIN, INPUTS, LISTED, LISTED_INPUTS, NAME

TYPES = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}
B, S, H, T, L, R = 2, 3, 5, 23, 16, 6


@dataclass(frozen=True)
class Case:
    mask: str | None = "bool"
    mask_shape: tuple[int, ...] = (B, 1, S, T)
    R: int = R
    spare: int = 0  # rows of the cache behind the mask's last column, filled with NaN
    lens: bool = False
    sinks: bool = False
    values: int = 0
    causal: bool = False
    softcap: float = 0.0
    window: int = 0
    value_width: int = 0
    lse: bool = False
    dtype: torch.dtype = torch.float32
    query_dtype: torch.dtype = torch.float32
    S: int = S
    listed: str = ""  # "some" keys of each query, the "best" of them, "all", or all "but one"
    ranked: bool = False  # it is known that each entry names a key


CASES = {
    "boolean mask": Case(),
    "added mask": Case(mask="float"),
    "added mask of the lowest number": Case(mask="lowest"),
    "mask of one row": Case(mask_shape=(1, 1, 1, T)),
    "mask per head": Case(mask="float", mask_shape=(B, H, S, T)),
    "no mask": Case(mask=None),
    "no rotary key": Case(R=0),
    "one query": Case(S=1, mask_shape=(B, 1, 1, T)),
    "spare rows": Case(spare=9),
    "spare rows, added mask": Case(spare=4, mask="float"),
    "lengths": Case(mask=None, lens=True),
    "lengths and mask": Case(lens=True),
    "causal": Case(mask=None, causal=True),
    "causal with lengths": Case(mask=None, causal=True, lens=True),
    "window": Case(mask=None, window=4, causal=True),
    "soft cap": Case(softcap=3.0),
    "sinks": Case(sinks=True),
    "sinks without a mask": Case(mask=None, sinks=True),
    "own values": Case(values=11),
    "halves": Case(value_width=19),
    "fewer columns": Case(value_width=7),
    "logarithm of the sum": Case(lse=True),
    "logarithm of the sum, no mask": Case(mask=None, lse=True),
    "half precision": Case(dtype=torch.float16, query_dtype=torch.float16),
    "half precision rows": Case(dtype=torch.float16, mask="float"),
    "everything": Case(
        mask="float", lens=True, causal=True, sinks=True, softcap=2.0, window=9, spare=3, lse=True, values=9
    ),
}  # fmt: skip

LISTS = {
    "some keys": Case(mask=None, listed="some"),
    "all keys": Case(listed="all"),
    "all keys, ranked": Case(listed="all", ranked=True),
    "best keys": Case(listed="best", ranked=True, lse=True),
    "all keys but one": Case(listed="but one"),
    "one query's keys": Case(S=1, mask_shape=(B, 1, 1, T), listed="some"),
    "all keys, causal": Case(mask=None, listed="all", ranked=True, causal=True, lse=True),
    "keys and boolean mask": Case(listed="some"),
    "keys and mask of one row": Case(listed="some", mask_shape=(1, 1, 1, T)),
    "keys and mask of one batch": Case(listed="some", mask="float", mask_shape=(1, 1, S, T)),
    "keys and mask per head": Case(listed="some", mask="float", mask_shape=(B, H, S, T)),
    "keys and mask per head alone": Case(listed="some", mask_shape=(1, H, 1, T)),
    "keys and added mask of the lowest number": Case(listed="some", mask="lowest", lse=True),
    "keys in spare rows": Case(listed="some", spare=9),
    "all keys in spare rows": Case(listed="all", ranked=True, spare=9),
    "keys and lengths": Case(listed="some", mask=None, lens=True, lse=True),
    "keys, causal, lengths": Case(listed="some", mask=None, lens=True, causal=True),
    "keys in a window": Case(listed="some", window=9),
    "keys, sinks, soft cap": Case(listed="some", mask=None, sinks=True, softcap=2.0),
    "keys, no rotary key": Case(listed="some", R=0),
    "keys, own values": Case(listed="some", values=11),
    "keys, halves": Case(listed="some", value_width=19),
    "keys, half precision": Case(listed="some", mask="float", dtype=torch.float16, query_dtype=torch.float16),
    "keys, half precision rows": Case(listed="some", mask="lowest", dtype=torch.float16),
    "keys and everything": Case(
        mask="float", lens=True, causal=True, sinks=True, softcap=2.0, window=15, spare=3, lse=True, values=9,
        listed="some", mask_shape=(B, 1, 1, T),
    ),
}  # fmt: skip


def tensors(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = {
        "query": (3 * normal(B, case.S, H, L + case.R)).to(case.query_dtype),
        "latent": normal(B, T + case.spare, L).to(case.dtype),
    }
    if case.R:
        given["rope"] = normal(B, T + case.spare, case.R).to(case.dtype)
    if case.mask == "bool":
        mask = torch.rand(case.mask_shape, generator=generator) < 0.6
        if case.mask_shape[0] > 1:
            mask[0, 0, 0] = False  # a query that sees nothing
        given["mask"] = mask
    elif case.mask is not None:
        hidden = torch.rand(case.mask_shape, generator=generator) < 0.4
        lowest = torch.finfo(case.dtype).min if case.mask == "lowest" else -torch.inf
        given["mask"] = normal(*case.mask_shape).to(case.dtype).masked_fill(hidden, lowest)
        if case.mask == "float":
            given["mask"][0, 0, 0] = -torch.inf
    if case.lens:
        given["seq_lens"] = torch.tensor([T, T - 8])
    if case.sinks:
        given["sinks"] = normal(H)
    if case.values:
        given["values"] = normal(B, T + case.spare, case.values).to(case.dtype)
    if case.listed:
        order = torch.rand(B, case.S, T, generator=generator).argsort(-1).int()
        given["indices"] = order[..., : 7 if case.listed in ("some", "best") else T].contiguous()
        if case.listed in ("some", "but one"):
            given["indices"][0, -1, 2] = -1
        if case.listed == "some":
            given["indices"][-1, 0, 3:] = torch.tensor([-5, T, T + 1, 2**31 - 1], dtype=torch.int32)
    for name in ("latent", "rope", "values"):
        if case.spare and name in given:
            given[name][:, T:] = float("nan")
        if case.listed in ("some", "best") and name in given:  # what no query lists is not read, but for the first row
            named = torch.stack([torch.isin(torch.arange(T + case.spare), at[at < T]) for at in given["indices"]])
            named[:, 0] = True
            given[name][~named] = float("nan")
    return given


def run(case: Case, given: dict[str, torch.Tensor]) -> list[np.ndarray]:
    signature = Signature(
        query_dtype=TYPES[case.query_dtype], dtype=TYPES[case.dtype], La=L, Lb=case.R,
        mask=None if case.mask is None else TensorProto.BOOL if case.mask == "bool" else TYPES[case.dtype],
        trimmed=case.spare > 0, seq_lens=case.lens, sinks=case.sinks, values=case.values > 0, causal=case.causal,
        softcap=case.softcap > 0, window=case.window > 0, value_width=case.value_width, lse=case.lse,
    )  # fmt: skip
    attributes = {"scale": 0.3}
    attributes |= {n: getattr(case, n) for n in ("softcap", "window", "value_width") if getattr(case, n)}
    if case.causal:
        attributes["causal"] = 1
    functions, kind, inputs = [function(signature, 21)], NAME, INPUTS[: len(signature.inputs)]
    if case.listed:
        listed, kind, inputs = ListedSignature(signature, case.ranked), LISTED, LISTED_INPUTS
        functions += [function(listed.gathered, 21, "v1"), listed_function(listed, ("", "v1"), 21)]
    names = [n if n in given else "" for n in inputs]
    node = helper.make_node(kind, names, ["out", "lse"] if case.lse else ["out"], domain=DOMAIN, **attributes)
    kinds = {n: helper.np_dtype_to_tensor_dtype(t.numpy().dtype) for n, t in given.items()}
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(n, kinds[n], [None] * t.dim()) for n, t in given.items()],
        [
            helper.make_tensor_value_info("out", TYPES[case.query_dtype], [None] * 4),
            *([helper.make_tensor_value_info("lse", TensorProto.FLOAT, [None] * 3)] if case.lse else []),
        ],
    )
    model = helper.make_model(
        graph,
        functions=functions,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )
    onnx.checker.check_model(model, full_check=True)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {n: t.numpy() for n, t in given.items()})


@pytest.mark.parametrize("name", CASES | LISTS)
def test_function_is_the_reference(name):
    case = (CASES | LISTS)[name]
    given = tensors(case)
    out, *lse = run(case, given)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
    for key in ("latent", "rope", "values"):
        if key in wide:
            wide[key] = wide[key][:, :T]
    if case.value_width:
        wide["values"] = torch.cat([wide["latent"], wide["rope"]], 2)[..., : case.value_width]
    expected, expected_lse = reference.decode_attention(DecodeCall(
        wide["query"], wide["latent"], wide.get("rope"), wide.get("values"), wide.get("mask"), scale=0.3,
        causal=case.causal, seq_lens=wide.get("seq_lens"), sinks=wide.get("sinks"), softcap=case.softcap,
        window=case.window, indices=wide.get("indices"),
    ))  # fmt: skip
    tolerance = 2e-3 if case.query_dtype == torch.float16 else 2e-6
    assert out.shape == tuple(expected.shape)
    assert np.isfinite(out).all()
    assert np.abs(out - expected.numpy()).max() < tolerance * float(expected.abs().max())
    if case.lse:
        hidden = np.isneginf(expected_lse.numpy())
        assert np.array_equal(np.isneginf(lse[0]), hidden)
        assert np.abs(lse[0][~hidden] - expected_lse.numpy()[~hidden]).max() < 1e-5


def test_several_bodies_of_one_operator_stand_in_one_file():
    """Models whose attentions differ get an overload each; runtimes pick by it."""
    import onnx_ir as ir

    from mla_compile.onnx.attach import attach_functions

    float_ = ir.TensorType(ir.DataType.FLOAT)
    query = ir.Value(name="query", type=float_, shape=ir.Shape([1, 1, 2, 8]))
    latent = ir.Value(name="latent", type=float_, shape=ir.Shape([1, "T", 8]))
    mask = ir.Value(name="mask", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1, 1, 1, "T"]))
    nodes = [
        ir.node(NAME, [query, latent], domain=DOMAIN, attributes={"scale": 0.5}),
        ir.node(NAME, [query, latent, None, mask], domain=DOMAIN, attributes={"scale": 0.5}),
    ]
    for node, name in zip(nodes, ("free", "masked"), strict=True):
        node.outputs[0].name, node.outputs[0].type = name, float_
        node.outputs[0].shape = ir.Shape([1, 1, 2, 8])
    graph = ir.Graph(
        [query, latent, mask], [n.outputs[0] for n in nodes], nodes=nodes, opset_imports={"": 21, DOMAIN: 1}, name="two"
    )
    model = ir.Model(graph, ir_version=10)
    attach_functions(model)
    assert len(model.functions) == 2
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    q, c = np.ones((1, 1, 2, 8), np.float32), np.arange(16, dtype=np.float32).reshape(1, 2, 8)
    free, masked = session.run(None, {"query": q, "latent": c, "mask": np.array([[[[True, False]]]])})
    assert np.allclose(masked[0, 0, 0], c[0, 0])
    assert not np.allclose(free, masked)


def test_positions_that_topk_found_are_known_to_differ():
    """Every other list is searched for places that name no key: a function of its own."""
    import onnx_ir as ir

    from mla_compile.onnx.attach import attach_functions

    float_, whole = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT32)
    query = ir.Value(name="query", type=float_, shape=ir.Shape([1, 1, 2, 8]))
    latent = ir.Value(name="latent", type=float_, shape=ir.Shape([1, "T", 8]))
    scores = ir.Value(name="scores", type=float_, shape=ir.Shape([1, 1, "T"]))
    count = ir.Value(name="count", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    given = ir.Value(name="given", type=whole, shape=ir.Shape([1, 1, 4]))
    best, whole_rows = (ir.node("TopK", [scores, count], num_outputs=2, attributes={"axis": n}) for n in (-1, 1))
    found = [ir.node("Cast", [node.outputs[1]], attributes={"to": ir.DataType.INT32}) for node in (best, whole_rows)]
    values = ir.node("Cast", [best.outputs[0]], attributes={"to": ir.DataType.INT32})
    lists = [*(node.outputs[0] for node in found), values.outputs[0], given]
    nodes = [ir.node(LISTED, [query, latent, *[None] * 5, one], domain=DOMAIN) for one in lists]
    graph = ir.Graph(
        [query, latent, scores, count, given], [node.outputs[0] for node in nodes],
        nodes=[best, whole_rows, *found, values, *nodes], opset_imports={"": 21, DOMAIN: 1}, name="lists",
    )  # fmt: skip
    attach_functions(ir.Model(graph, ir_version=10))
    ranked, *others = (node.overload for node in nodes)
    assert len(set(others)) == 1
    assert ranked not in others


def test_means_over_rows_have_a_function_for_each_set_of_inputs():
    import onnx_ir as ir

    from mla_compile.onnx.attach import attach_functions

    float_ = ir.TensorType(ir.DataType.FLOAT)
    out, lse, values, mask = (ir.Value(name=name, type=float_) for name in ("out", "lse", "values", "mask"))
    listed = ir.Value(name="listed", type=ir.TensorType(ir.DataType.INT32))
    nodes = [
        ir.node(ALIKE, [out, lse, values, *more], domain=DOMAIN)
        for more in ([], [mask, listed], [], [None, None, listed])
    ]
    graph = ir.Graph(
        [out, lse, values, mask, listed], [node.outputs[0] for node in nodes], nodes=nodes,
        opset_imports={"": 21, DOMAIN: 1}, name="means",
    )  # fmt: skip
    attach_functions(ir.Model(graph, ir_version=10))
    assert [node.overload for node in nodes] == ["", "v1", "", "v2"]
