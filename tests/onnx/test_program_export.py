"""Exports of programs that somebody else traced."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.export import Dim

import mla_compile
from mla_compile import ExportError, InputError, OptionError
from tests.support.tiers import also, full
from tests.support.toy import Toy, decode_inputs
from tests.zoo import rows_of_two_memories
from tests.zoo.base import Dims


class Decode(nn.Module):
    """A decode step as somebody may write it: two heads over a latent of 8, caches in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 2 * 10, bias=False)

    def forward(self, query, new, mask, rows):
        rows = torch.cat([rows, new], 1)
        B, T, _ = rows.shape
        k, v = self.up(rows).view(B, T, 2, 10).transpose(1, 2).split([6, 4], -1)
        out = nn.functional.scaled_dot_product_attention(query, k, v, mask[:, None, None], scale=0.4)
        return out, rows


def seeded(kind=Decode):
    torch.manual_seed(3)
    return kind().eval().requires_grad_(False)


@functools.cache
def program(module=None):
    """A module and its program: of :class:`Decode`, traced once for all tests."""
    batch, past = Dim("batch"), Dim("past", min=0, max=4096)
    example = (torch.randn(2, 2, 1, 6), torch.randn(2, 1, 8), torch.ones(2, 8, dtype=torch.bool), torch.randn(2, 7, 8))
    shapes = ({0: batch}, {0: batch}, {0: batch, 1: past + 1}, {0: batch, 1: past})
    module = seeded() if module is None else module
    return module, torch.export.export(module, example, dynamic_shapes=shapes, strict=False)


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    """The directory of :func:`program`, verified."""
    directory = tmp_path_factory.mktemp("portable") / "m"
    done = mla_compile.export_onnx(program()[1], directory)
    assert done.verification.error < 1e-5
    return directory


def test_a_traced_program_keeps_its_names(portable):
    module, _ = program()
    for name in ("decode.onnx", "prefill.onnx"):
        session = ort.InferenceSession(str(portable / name), providers=["CPUExecutionProvider"])
        assert [v.name for v in session.get_inputs()] == ["query", "new", "mask", "rows"]
        assert [v.name for v in session.get_outputs()] == ["output_0", "present_rows"]
        given = (torch.randn(3, 2, 1, 6), torch.randn(3, 1, 8), torch.rand(3, 13) < 0.7, torch.randn(3, 12, 8))
        given[2][:, 0] = True
        feeds = {v.name: t.numpy() for v, t in zip(session.get_inputs(), given, strict=True)}
        for got, expected in zip(session.run(None, feeds), module(*given), strict=True):
            assert np.abs(got - expected.numpy()).max() < 1e-5


@full("draws")
def test_the_same_program_gives_the_same_bytes(portable, tmp_path):
    mla_compile.export_onnx(program()[1], tmp_path / "again", prefill=False, verify=False)
    for name in ("decode.onnx", "weights.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (portable / name).read_bytes(), name


@pytest.mark.parametrize("groups", [4, *also("combination", 1)])
def test_rows_in_float8(groups, tmp_path):
    """The operator has no float8: rows are multiplied by their scales before it."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 2 * 10, bias=False)

        def forward(self, query, rows, scales):
            latent = (rows.float().unflatten(-1, (groups, -1)) * scales[..., None]).flatten(-2)
            k, v = self.up(latent).unflatten(-1, (2, 10)).transpose(1, 2).split([6, 4], -1)
            return nn.functional.scaled_dot_product_attention(query, k, v)

    rows, scales = torch.randn(2, 7, 8).to(torch.float8_e4m3fn), torch.rand(2, 7, groups) + 0.5
    exported = torch.export.export(seeded(Rows), (torch.randn(2, 2, 1, 6), rows, scales), strict=False)
    done = mla_compile.export_onnx(exported, tmp_path / "m", prefill=False)
    assert [site.code for site in done.report.sites] == ["absorbed"]
    assert not done.verification.reason
    assert done.verification.error < 1e-5
    (given,) = (v for v in onnx.load(tmp_path / "m" / "decode.onnx").graph.input if v.name == "rows")
    assert given.type.tensor_type.elem_type == onnx.TensorProto.FLOAT8E4M3FN


@pytest.mark.parametrize("profile", ["inplace", *also("combination", "portable")])
def test_a_mask_of_whole_queries_is_counted_as_one_of_all_keys(tmp_path, profile):
    """It has one column; the operator takes the number of columns for the number of keys.

    In place, the mask of the caller says how many rows of the buffer are in use; what lies behind them is not read.
    """

    class Rows(Decode):
        def forward(self, query, new, mask, rows):
            return super().forward(query, new, mask.any(-1, keepdim=True), rows)

    module, exported = program(seeded(Rows))
    mla_compile.export_onnx(exported, tmp_path / "m", profile=profile, prefill=False, verify=False)
    given = (torch.randn(2, 2, 1, 6), torch.randn(2, 1, 8), torch.ones(2, 6, dtype=torch.bool), torch.randn(2, 5, 8))
    expected = module(*given)
    session = ort.InferenceSession(str(tmp_path / "m" / "decode.onnx"), providers=["CPUExecutionProvider"])
    feeds = {v.name: t.numpy() for v, t in zip(session.get_inputs(), given, strict=True)}
    if profile == "inplace":
        feeds["rows"] = np.pad(feeds["rows"], ((0, 0), (0, 3), (0, 0)), constant_values=np.nan)
    out, rows = session.run(None, feeds)
    assert np.abs(out - expected[0].numpy()).max() < 1e-5
    assert np.array_equal(rows[:, :6], expected[1].numpy())
    assert np.isnan(rows[:, 6:]).all()  # none in a graph that is not in place


def test_a_program_that_was_optimized_before_is_exported_too(tmp_path):
    _, exported = program()
    fast = mla_compile.optimize(exported, lowering="op", forms="absorbed")
    mla_compile.export_onnx(fast, tmp_path / "m", prefill=False)
    nodes = onnx.load(tmp_path / "m" / "decode.onnx", load_external_data=False).graph.node
    assert [n.op_type for n in nodes if n.domain] == ["DecodeAttention"]


def test_a_graph_module_and_another_module_need_example_inputs(tmp_path):
    module, exported = program()
    with pytest.raises(InputError, match="pass example_inputs"):
        mla_compile.export_onnx(exported.module(), tmp_path / "m")
    with pytest.raises(OptionError, match="cast this model before tracing"):
        mla_compile.export_onnx(exported, tmp_path / "n", dtype="float16")
    with pytest.raises(ExportError, match="cannot be traced"):
        mla_compile.export_onnx(module, tmp_path / "n", example_inputs=(torch.randn(2),))
    with pytest.raises(ExportError, match="whose meaning is known"):
        mla_compile.export_onnx(exported, tmp_path / "n", profile="genai")


@pytest.mark.parametrize(
    ("fold", "names"), [("always", {"w_q_w_kc", "w_v_w_o"}), *also("combination", ("never", {"w_kc", "w_v"}))]
)
def test_folds_follow_the_option(tmp_path, fold, names):
    how = {"example_inputs": decode_inputs(), "fold": fold, "prefill": False, "verify": False}
    done = mla_compile.export_onnx(Toy().eval(), tmp_path / "m", **how)
    passes = {p.name: p.changes for p in done.report.passes}
    assert [*passes][:2] == ["tidy", "capture"]
    assert [*passes][-2:] == ["bake", "split_complex"]
    assert passes["bake"] == 2 * passes["absorb"]
    graph = onnx.load(tmp_path / "m" / "decode.onnx", load_external_data=False).graph
    assert {v.name.rsplit(".", 1)[1] for v in graph.initializer if ".w_" in v.name} == names


def test_an_operator_that_onnx_lacks_is_named(tmp_path):
    class Odd(Decode):
        def forward(self, query, new, mask, rows):
            out, all_rows = super().forward(query, new, mask, rows)
            return torch.special.bessel_j0(out), all_rows

    _, exported = program(seeded(Odd))
    with pytest.raises(ExportError, match=r"no form in ONNX opset 21: DispatchError: .*bessel_j0"):
        mla_compile.export_onnx(exported, tmp_path / "m", prefill=False, verify=False)
    assert not any(tmp_path.iterdir())


@full("combination")  # of rows in place and the prompt's graph
def test_a_program_is_written_in_place_where_an_input_counts_its_tokens(tmp_path):
    """The mask says how many rows of the buffer are in use; what lies behind them is not read."""
    module, exported = program()
    mla_compile.export_onnx(exported, tmp_path / "m", profile="inplace")
    given = (torch.randn(2, 2, 1, 6), torch.randn(2, 1, 8), torch.ones(2, 6, dtype=torch.bool), torch.randn(2, 5, 8))
    buffer = torch.full((2, 20, 8), torch.nan)
    buffer[:, :5] = given[3]
    for name in ("decode.onnx", "prefill.onnx"):
        session = ort.InferenceSession(str(tmp_path / "m" / name), providers=["CPUExecutionProvider"])
        feeds = {v.name: t.numpy() for v, t in zip(session.get_inputs(), (*given[:3], buffer), strict=True)}
        out, rows = session.run(None, feeds)
        expected, all_rows = module(*given)
        assert np.abs(out - expected.numpy()).max() < 1e-5
        assert np.array_equal(rows[:, :6], all_rows.numpy())
        assert np.isnan(rows[:, 6:]).all()


def test_a_program_without_a_count_of_tokens_cannot_be_written_in_place(tmp_path):
    class Unmasked(Decode):
        def forward(self, query, new, rows):
            return super().forward(query, new, torch.ones(rows.shape[0], rows.shape[1] + 1, dtype=torch.bool), rows)

    example = (torch.randn(2, 2, 1, 6), torch.randn(2, 1, 8), torch.randn(2, 7, 8))
    batch, past = Dim("batch"), Dim("past", min=0, max=4096)
    shapes = ({0: batch}, {0: batch}, {0: batch, 1: past})
    with pytest.raises(ExportError, match="needs an input with one entry for each of all tokens"):
        mla_compile.export_onnx(
            Unmasked().eval(), tmp_path / "m", profile="inplace", example_inputs=example, dynamic_shapes=shapes
        )
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["keys", *also("combination", "heads")])
def test_what_is_absorbed_in_part_is_exported_too(tmp_path, part):
    """K alone leaves no operator of ours in the graph."""

    class Part(Decode):
        def forward(self, query, new, mask, past):
            rows = torch.cat([past, new], 1)
            B, T, _ = rows.shape
            k, v = self.up(rows).view(B, T, 2, 10).transpose(1, 2).split([6, 4], -1)
            if part == "keys":
                v = v.tanh()
            else:
                k, v = (torch.cat([y, rows[:, None, :, : y.shape[-1]].sin()], 1) for y in (k, v))
                query = torch.cat([query, query[:, :1]], 1)
            return nn.functional.scaled_dot_product_attention(query, k, v, mask[:, None, None], scale=0.4), rows

    _, exported = program(seeded(Part))
    done = mla_compile.export_onnx(exported, tmp_path / "m", prefill=False)
    assert done.verification.error < 1e-5
    assert [site.parts for site in done.report.sites] == [("keys",) if part == "keys" else ("heads 0-1 of 3",)]


def exported_step(module, given, folder):
    """The verified graph of a step of DeepSeek-V4, which has an operator for each memory."""
    shapes = ({}, {}, {}, {1: Dim("past", min=4, max=4096)})
    done = mla_compile.export_onnx(module, folder, example_inputs=given, dynamic_shapes=shapes, prefill=False)
    assert done.verification.error < 1e-5
    ours = {n.op_type for n in onnx.load(folder / "decode.onnx", load_external_data=False).graph.node if n.domain}
    assert ours == {"DecodeAttention", "ListedAttention"}
    return folder / "decode.onnx"


def test_a_step_over_rows_that_all_heads_share_in_two_memories(tmp_path):
    """A window of the last rows, and rows that each stand for several, of which a list is read and one is emitted."""
    dims = Dims(dtype=torch.float32)
    width = dims.N + dims.R
    torch.manual_seed(0)
    given = [torch.randn(*shape) for shape in ((2, 1, dims.D), (2, 5, width), (2, 1, width), (2, 4, width))]
    assert exported_step(rows_of_two_memories.build(dims).eval(), tuple(given), tmp_path / "m").exists()


@full("draws")  # of steps, and of the graph that emits no row
def test_rows_that_all_heads_share_in_two_memories(tmp_path):
    """A step that emits a row and one that does not are a graph each. The graphs generate the tokens of the module,
    each from what it kept itself.
    """
    dims = Dims(dtype=torch.float32)
    module, width = rows_of_two_memories.build(dims).eval(), dims.N + dims.R
    torch.manual_seed(0)  # rows whose scores are equal, as zeros behind the ReLU, are picked in any order
    x, window, rows, words = (torch.randn(*s) for s in ((2, 1, dims.D), (2, 5, width), (2, 4, width), (67, dims.D)))
    graphs = []
    for count in range(rows_of_two_memories.RATE):
        waiting = torch.randn(2, count, width)
        graphs.append(ort.InferenceSession(exported_step(module, (x, window, waiting, rows), tmp_path / str(count))))

    def step(token, kept):
        graph = graphs[kept[1].shape[1]]
        names = [value.name for value in graph.get_inputs()]
        given = (words[token], *map(torch.as_tensor, kept))
        return graph.run(None, {name: value.numpy() for name, value in zip(names, given, strict=True)})

    held = own = (window, torch.zeros(2, 0, width), rows)
    token = torch.tensor([[3], [5]])
    for _ in range(12):
        with torch.no_grad():
            want, *own = module(words[token], *own)
        got, *held = step(token, held)
        for one, other in zip((got, *held), (want, *own), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        token = (want @ words.T).argmax(-1)
        assert np.array_equal(token, (got @ words.T.numpy()).argmax(-1))
