"""The native library in a real ONNX Runtime, on a CPU: its kernel there, and the interface that it was written for.

What it does with CUDA is in test_native_cuda.py, how it is built in test_build.py.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("triton")

import onnxruntime as ort
from onnx import TensorProto, helper

from mla_compile.kernels import reference
from mla_compile.kernels.call import DecodeCall
from mla_compile.onnx import build
from mla_compile.onnx.function import Signature
from mla_compile.onnx.listed import ListedSignature, listed_function
from mla_compile.onnx.op import LISTED, LISTED_INPUTS, NAME
from tests.support import onnx_native_cases
from tests.support.onnx_native_cases import SMALL

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {F32: TensorProto.FLOAT, F16: TensorProto.FLOAT16, BF16: TensorProto.BFLOAT16, torch.bool: TensorProto.BOOL}
TYPES |= {torch.int64: TensorProto.INT64, torch.float64: TensorProto.DOUBLE}
INPUTS = ("query", "latent", "rope", "mask", "seq_lens", "sinks", "values")
# Largest error over the largest value, against float64: sums in float32, and one rounding of the result.
TOLERANCE = {F32: 3e-6, F16: 6e-4, BF16: 5e-3}
LSE_TOLERANCE = 3e-6  # over 1 + |lse|


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library without machine code: what runs here is C."""
    with pytest.MonkeyPatch.context() as patch:
        return onnx_native_cases.hollow_library(tmp_path_factory.mktemp("library"), SMALL[:1], patch)


@pytest.fixture(scope="module")
def options(built: Path) -> Any:
    made = ort.SessionOptions()
    made.log_severity_level = 4
    made.register_custom_ops_library(str(built))
    return made


@dataclass(frozen=True)
class Case:
    """One call. ``mask`` is a kind and its axes, as in ``bool B1ST``."""

    B: int = 2
    S: int = 3
    H: int = 5
    C: int = 70
    T: int | None = None
    La: int = 48
    Lb: int = 16
    Lv: int | None = None
    dtype: torch.dtype = F32
    query: torch.dtype | None = None
    mask: str | None = None
    lens: tuple[int, ...] | None = None
    sinks: bool = False
    causal: int = 0
    softcap: float = 0.0
    window: int = 0
    value_width: int = 0
    lse: bool = True


def tensors(case: Case) -> dict[str, Tensor]:
    """The inputs that a case has. Rows past T, and past the lengths, hold NaN."""
    g = torch.Generator().manual_seed(1)
    T = case.C if case.T is None else case.T

    def rows(width: int) -> Tensor:
        made = torch.randn(case.B, case.C, width, generator=g).to(case.dtype)
        for b, length in enumerate(case.lens or (T,) * case.B):
            made[b, min(max(length, 0), T) :] = torch.nan
        return made

    query = torch.randn(case.B, case.S, case.H, case.La + case.Lb, generator=g).to(case.query or case.dtype)
    found = {"query": query, "latent": rows(case.La)}
    if case.Lb:
        found["rope"] = rows(case.Lb)
    if case.mask:
        kind, axes = case.mask.split()
        shape = [{"B": case.B, "H": case.H, "S": case.S, "T": T}.get(letter, 1) for letter in axes]
        seen = torch.rand(shape, generator=g) > 0.4
        seen[0, 0, 0] = kind == "lowest"  # else a query that sees no key
        added = torch.where(seen, torch.randn(shape, generator=g), -torch.inf)
        if kind == "lowest":
            added = torch.where(seen, 0.0, torch.finfo(case.dtype).min)
        found["mask"] = seen if kind == "bool" else added.to(case.dtype)
    if case.lens:
        found["seq_lens"] = torch.tensor(case.lens)
    if case.sinks:
        found["sinks"] = torch.randn(case.H, generator=g)
    if case.Lv:
        found["values"] = rows(case.Lv)
    return found


def attributes(case: Case) -> dict[str, Any]:
    given = {"causal": case.causal, "softcap": case.softcap, "window": case.window, "value_width": case.value_width}
    return {"scale": 0.25, **{name: value for name, value in given.items() if value}}


def model(given: dict[str, Tensor], attributes: dict[str, Any], lse: bool = True, function: bool = False) -> bytes:
    """A graph of one node, between identities so that types have to be inferred."""
    names = [name if name in given else "" for name in INPUTS]
    while not names[-1]:
        names.pop()
    out, query = ["o", "lse"][: 1 + lse], TYPES[given["query"].dtype]
    nodes = [
        helper.make_node("DecodeAttention", names, out, domain="mla_compile", **attributes),
        helper.make_node("Identity", ["o"], ["out"]),
    ]
    inputs = [helper.make_tensor_value_info(n, TYPES[x.dtype], [None] * x.dim()) for n, x in given.items()]
    outputs = [helper.make_tensor_value_info("out", query, [None] * 4)]
    outputs += [helper.make_tensor_value_info("lse", TensorProto.FLOAT, [None] * 3)] * lse
    functions = []
    if function:  # a body that is wrong on purpose: it must not be what runs
        body = [helper.make_node("Sub", ["query", "query"], ["o"])]
        imports = [helper.make_opsetid("", 21)]
        functions = [
            helper.make_function("mla_compile", "DecodeAttention", [n for n in names if n], ["o"], body, imports)
        ]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("mla_compile", 1)]
    graph = helper.make_graph(nodes, "one", inputs, outputs)
    made = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions)
    return bytes(made.SerializeToString())


def run(options: Any, given: dict[str, Tensor], case: Case, **how: Any) -> tuple[Tensor, Tensor | None]:
    serialized = model(given, attributes(case), case.lse, **how)
    session = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
    bound = session.io_binding()  # NumPy has no bfloat16: everything is bound by address
    for name, x in given.items():
        bound.bind_input(name, "cpu", 0, TYPES[x.dtype], list(x.shape), x.data_ptr())
    width = case.Lv or case.value_width or case.La
    out = torch.full((case.B, case.S, case.H, width), torch.nan, dtype=given["query"].dtype)
    lse = torch.full((case.B, case.S, case.H), torch.nan)
    for name, x in (("out", out), ("lse", lse))[: 1 + case.lse]:
        bound.bind_output(name, "cpu", 0, TYPES[x.dtype], list(x.shape), x.data_ptr())
    session.run_with_iobinding(bound)
    return out, lse if case.lse else None


def exact(given: dict[str, Tensor], case: Case) -> tuple[Tensor, Tensor]:
    x = {name: t.double() if t.dtype.is_floating_point else t for name, t in given.items()}
    T = case.C if case.T is None else case.T
    cut = {name: x[name][:, :T] for name in ("latent", "rope", "values") if name in x}
    values = cut.get("values")
    if case.value_width:
        values = torch.cat([cut[n] for n in ("latent", "rope") if n in cut], -1)[..., : case.value_width]
    return reference.decode_attention(DecodeCall(
        x["query"], cut["latent"], cut.get("rope"), values, x.get("mask"), scale=0.25, causal=bool(case.causal),
        seq_lens=x.get("seq_lens"), sinks=x.get("sinks"), softcap=case.softcap, window=case.window,
    ))  # fmt: skip


CASES = {
    "plain": Case(),
    "one token": Case(S=1),
    "many rows": Case(S=31, H=9, C=200, causal=1),
    "causal": Case(causal=1),
    "window": Case(window=20),
    "window, causal": Case(window=9, causal=1),
    "softcap": Case(softcap=2.5),
    "sinks": Case(sinks=True, lens=(0, 70)),
    "lengths": Case(lens=(33, 0), causal=1),
    "lengths out of range": Case(lens=(700, -3)),
    "bool mask": Case(mask="bool BHST"),
    "bool mask of tokens": Case(mask="bool B11T", causal=1),
    "bool mask of heads": Case(mask="bool BH1T"),
    "added mask": Case(mask="added 1HST"),
    "lowest mask": Case(mask="lowest B1ST"),
    "unused capacity": Case(mask="bool B1ST", C=90, T=61),
    "unused capacity, lengths": Case(mask="bool 111T", C=90, T=61, lens=(5, 90)),
    "no rope": Case(Lb=0),
    "odd widths": Case(La=37, Lb=3),
    "values": Case(Lv=24, mask="bool B1ST"),
    "halves": Case(La=32, Lb=32, value_width=50),
    "fewer columns": Case(value_width=20),
    "no lse": Case(lse=False),
    "everything": Case(
        mask="added BHST", lens=(70, 41), sinks=True, causal=1, softcap=4.0, window=30, C=80, T=71, Lv=8
    ),
    "float16": Case(dtype=F16, mask="added B1ST"),
    "float16, lowest mask": Case(dtype=F16, mask="lowest B1ST"),
    "bfloat16": Case(dtype=BF16, mask="bool B1ST"),
    "float32 query, float16 rows": Case(dtype=F16, query=F32, causal=1),
    "float32 query, bfloat16 rows": Case(dtype=BF16, query=F32, mask="added B1ST"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_kernel_is_the_reference(name, options):
    case = CASES[name]
    given = tensors(case)
    out, lse = run(options, given, case)
    want, want_lse = exact(given, case)
    assert not out.isnan().any()
    assert (out.double() - want).abs().max() <= TOLERANCE[case.query or case.dtype] * want.abs().max()
    if lse is not None:
        hidden = want_lse == -torch.inf
        assert torch.equal(lse == -torch.inf, hidden)
        error = (lse.double() - want_lse).abs() / (1 + want_lse.abs())
        assert error.masked_fill(hidden, 0.0).max() <= LSE_TOLERANCE


def test_half_precision_is_rounded_to_nearest_even(options):
    """One key: the result is its row, for every float16 there is; and for sums that lie between two of them."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(F16)
    every = every[~every.isnan() & ~every.isinf()].view(1, 1, -1)
    case = Case(B=1, S=1, H=1, C=1, La=every.shape[-1], Lb=0, dtype=F16, lse=False)
    query = torch.zeros(1, 1, 1, every.shape[-1], dtype=F16)
    out, _ = run(options, {"query": query, "latent": every}, case)
    assert torch.equal(out.view(-1), every.view(-1))
    for dtype in (F16, BF16):
        pairs = torch.randn(1, 2, 4096).to(dtype) * torch.logspace(-7, 4, 4096).to(dtype)
        case = Case(B=1, S=1, H=1, C=2, La=4096, Lb=0, dtype=dtype, lse=False)
        out, _ = run(options, {"query": torch.zeros(1, 1, 1, 4096, dtype=dtype), "latent": pairs}, case)
        mean = (pairs[0, 0].float() * 0.5 + pairs[0, 1].float() * 0.5).to(dtype)
        assert torch.equal(out.view(-1), mean)


def test_empty_sizes(options):
    for case in (Case(B=0), Case(S=0), Case(C=0), Case(C=0, mask="bool B1ST")):
        given = {name: x.numpy() for name, x in tensors(case).items()}
        session = ort.InferenceSession(model(tensors(case), attributes(case)), options)
        out, lse = (torch.from_numpy(x) for x in session.run(None, given))
        assert torch.equal(out, torch.zeros(case.B, case.S, case.H, case.La))
        assert torch.equal(lse, torch.full((case.B, case.S, case.H), -torch.inf))


def test_the_library_takes_the_place_of_the_function(options):
    case = Case(Lb=0, lse=False)
    given = tensors(case)
    without, _ = run(ort.SessionOptions(), given, case, function=True)
    assert torch.equal(without, torch.zeros_like(without))
    out, _ = run(options, given, case, function=True)
    assert (out.double() - exact(given, case)[0]).abs().max() < 1e-5


def test_the_library_takes_the_place_of_the_function_inside_of_a_list(options):
    """Lists are gathered by standard operators, around the node that the library has a kernel for."""
    case = Case(S=2, lse=False, mask="bool B1ST")
    given = tensors(case)
    signature = Signature(1, 1, case.La, case.Lb, TensorProto.BOOL)
    inside = ListedSignature(signature, every=True)
    wrong = []  # bodies that are wrong on purpose
    for overload in ("", "v1"):
        body = [helper.make_node("Sub", ["query", "query"], ["out"])]
        wrong.append(helper.make_function(
            "mla_compile", NAME, INPUTS[:4], ["out"], body, [helper.make_opsetid("", 21)], ["scale"]
        ))  # fmt: skip
        wrong[-1].overload = overload
    for count in (9, 70):  # of 70 keys
        order = torch.rand(case.B, case.S, case.C, generator=torch.Generator().manual_seed(1)).argsort(-1)
        fed = given | {"indices": order[..., :count].int().contiguous()}
        node = helper.make_node(
            LISTED, [n if n in fed else "" for n in LISTED_INPUTS], ["out"], domain="mla_compile", scale=0.25
        )
        types = TYPES | {torch.int32: TensorProto.INT32}
        graph = helper.make_graph(
            [node], "one", [helper.make_tensor_value_info(n, types[x.dtype], [None] * x.dim()) for n, x in fed.items()],
            [helper.make_tensor_value_info("out", TensorProto.FLOAT, [None] * 4)],
        )  # fmt: skip
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("mla_compile", 1)]
        functions = [*wrong, listed_function(inside, ("", "v1"), 21)]
        made = helper.make_model(graph, opset_imports=imports, ir_version=10, functions=functions)
        (out,) = ort.InferenceSession(made.SerializeToString(), options).run(
            None, {n: x.numpy() for n, x in fed.items()}
        )
        want, _ = reference.decode_attention(DecodeCall(
            given["query"].double(), given["latent"].double(), given["rope"].double(), mask=given["mask"], scale=0.25,
            indices=fed["indices"],
        ))  # fmt: skip
        assert (torch.from_numpy(out).double() - want).abs().max() <= TOLERANCE[F32] * want.abs().max()


WRONG = {
    "axis 3 of query is 60, expected La+Lb = 64": {"query": torch.zeros(2, 3, 5, 60)},
    "axis 1 of rope is 69, expected C of latent = 70": {"rope": torch.zeros(2, 69, 16)},
    "axis 0 of latent is 1, expected B of query = 2": {"latent": torch.zeros(1, 70, 48)},
    "mask has 2 axes, expected 4": {"mask": torch.zeros(3, 70)},
    "axis 2 of mask is 2, expected 1 or S = 3": {"mask": torch.zeros(2, 1, 2, 70)},
    "mask is for T = 71 tokens, latent has C = 70 rows": {"mask": torch.zeros(2, 1, 3, 71)},
    "mask is int64, expected bool or float32": {"mask": torch.zeros(2, 1, 3, 70, dtype=torch.int64)},
    "axis 0 of seq_lens is 3": {"seq_lens": torch.zeros(3, dtype=torch.int64)},
    "axis 0 of sinks is 4, expected H of query = 5": {"sinks": torch.zeros(4)},
}


@pytest.mark.parametrize("text", WRONG)
def test_shapes_that_disagree_are_told(text, options):
    case = Case(lse=False)
    with pytest.raises(Exception, match=r"mla_compile\.DecodeAttention") as caught:
        run(options, {**tensors(case), **WRONG[text]}, case)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"value_width": 65}, "value_width is 65, the rows have La.Lb = 64 columns"),
        ({"value_width": 8, "values": True}, "expected one of them"),
        ({"window": -1}, "window is -1"),
        ({"softcap": -1.0}, "scale is 0.25 and softcap -1"),
        ({"scale": None}, "the attribute scale is missing"),
    ],
)
def test_attributes_that_mean_nothing_are_told(wrong, text, options):
    case = Case(lse=False, Lv=48 if wrong.pop("values", False) else None)
    given = tensors(case)
    chosen = {k: v for k, v in {**attributes(case), **wrong}.items() if v is not None}
    with pytest.raises(Exception, match=text):
        ort.InferenceSession(model(given, chosen, lse=False), options).run(
            None, {k: v.numpy() for k, v in given.items()}
        )


@pytest.mark.parametrize("change", [{"latent": torch.float64}, {"rope": F16}, {"sinks": F16}, {"seq_lens": F32}])
def test_types_that_do_not_fit_are_refused_when_a_model_is_loaded(change, options):
    case = Case(sinks=True, lens=(3, 4), lse=False)
    given = {name: x.to(change.get(name, x.dtype)) for name, x in tensors(case).items()}
    with pytest.raises(Exception, match=r"Type|type|NOT_IMPLEMENTED"):
        ort.InferenceSession(model(given, attributes(case), lse=False), options)


def test_slots_that_only_cuda_needs_are_where_a_real_onnxruntime_has_them(tmp_path):
    source, library = Path(__file__).parents[1] / "support" / "onnx_probe.c", tmp_path / "probe.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{build.SOURCES}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(library)], check=True)
    node = helper.make_node("Probe", ["x", "", "x"], ["y"], domain="probe")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2, 7])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [1])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("probe", 1)]
    made = helper.make_model(helper.make_graph([node], "one", [x], [y]), opset_imports=imports, ir_version=10)
    given = ort.SessionOptions()
    given.register_custom_ops_library(str(library))
    (reached,) = ort.InferenceSession(made.SerializeToString(), given).run(None, {"x": torch.zeros(3, 2, 7).numpy()})
    assert reached == [1]
