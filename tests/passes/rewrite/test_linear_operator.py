"""Which products are handed to the operator, and that models decode alike with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from mla_compile import pipeline
from mla_compile.kernels import linear
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.passes.ir.walk import weight_nodes
from mla_compile.passes.rewrite.linear_operator import LinearOperator, lower_products
from mla_compile.pipeline.target import this_machine
from tests.support.models import build, greedy, prompt
from tests.support.programs import canonical, export, run, seeded, trace
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs
from tests.zoo import rows_of_all_heads
from tests.zoo.base import Dims

O, K = 12, 8  # noqa: E741  the letter of the columns of a result
X, W, BIAS = (seeded(*shape, dtype=torch.float32) for shape in [(2, K), (O, K), (O,)])
Fn = Callable[..., Tensor]


def handed(
    fn: Fn, *weights: Tensor, x: Tensor = X, least: int = 0, most: int = 4, pays: Callable[..., bool] | None = None
) -> int:
    """How many products of ``fn(x, *weights)`` the operator takes; the result has to stay the same."""
    program = trace(fn, [x], weights)
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(pays or (lambda *of: of[3] <= most), 4, lambda *_: None, linear.MANY, least)
    done = lower_products(program.gm.graph, program.fake_mode, known, operator)
    program.gm.graph.lint()
    program.gm.recompile()
    with torch.no_grad():
        torch.testing.assert_close(program.gm(x, *weights)[0], fn(x, *weights))
    return done


def whatever_it_costs(device: torch.device, dtype: torch.dtype, stored: torch.dtype, rows: int, width: int) -> bool:
    return linear.takes(device, dtype, stored, rows) and width % linear.COLUMNS == 0


TAKEN: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "linear": (F.linear, (W,)),
    "with a bias": (F.linear, (W, BIAS)),
    "mm": (lambda x, w: torch.mm(x, w.t()), (W,)),
    "matmul": (lambda x, w: x @ w.mT, (W,)),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w.t()), (W, BIAS)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_products_with_a_weight(name: str):
    fn, weights = TAKEN[name]
    assert handed(fn, *weights) == 1


LEFT: dict[str, tuple[Fn, tuple[Tensor, ...]]] = {
    "made of others": (lambda x, v, w: F.linear(x, v + w), (W, W)),
    "converted": (lambda x, w: F.linear(x, w.float()), (W.double(),)),
    "columns in one piece": (F.linear, (W.t().contiguous().t(),)),
    "not turned": (lambda x, w: x @ w, (W.t().contiguous(),)),
    "a batch of weights": (lambda x, w: x @ w.mT, (W.expand(3, O, K).contiguous(),)),
    "scaled": (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), (W, BIAS)),
    "added rows": (lambda x, w, b: torch.addmm(b, x, w.t()), (W, BIAS.expand(2, O))),
    "no weight": (lambda x, w: F.linear(x, x) * w, (torch.ones(2),)),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_compiler(name: str):
    fn, weights = LEFT[name]
    assert handed(fn, *weights) == 0


WIDE = seeded(2, 96, dtype=torch.float32)
CODES = torch.arange(O * 96).reshape(O, 96).remainder(16).sub(8).to(torch.int8)
SCALES, ZEROS = seeded(O, 3, dtype=torch.float32), torch.arange(3 * O).reshape(O, 3).remainder(5).to(torch.int8)


def by_torchao(width: int = 32, rows: int = 1, dtype: torch.dtype = torch.float32, turned: bool = False) -> Fn:
    """A product with a weight that torchao dequantizes, with a scale for each block of rows and columns."""

    def fn(x: Tensor, codes: Tensor, scales: Tensor, *zeros: Tensor) -> Tensor:
        dequantize = torch.ops.torchao.dequantize_affine
        given = (codes, [rows, width], scales, *(zeros or [None]), torch.int8, -8, 7)
        weight = dequantize(*given, output_dtype=dtype).to(x.dtype)
        return x @ weight.t() if turned else F.linear(x, weight)

    return fn


IN_GROUPS: dict[str, tuple[Fn, tuple[Tensor, ...], int]] = {
    "scales": (by_torchao(), (CODES, SCALES), 1),
    "zero points": (by_torchao(), (CODES, SCALES, ZEROS), 1),
    "a scale for a row": (by_torchao(96), (CODES, SCALES[:, :1].contiguous(), ZEROS[:, :1].contiguous()), 1),
    "a transposed weight": (by_torchao(turned=True), (CODES, SCALES, ZEROS), 1),
    "groups that the kernel does not read": (by_torchao(24), (CODES, seeded(O, 4, dtype=torch.float32)), 0),
    "blocks of two rows": (by_torchao(rows=2), (CODES, SCALES[: O // 2].contiguous()), 0),
    "zero points of 32 bits": (by_torchao(), (CODES, SCALES, ZEROS.int()), 0),
    "scales of another dtype": (by_torchao(), (CODES, SCALES.bfloat16()), 0),
    "a rounded weight": (by_torchao(dtype=torch.bfloat16), (CODES, SCALES), 0),
}


@pytest.mark.parametrize("name", IN_GROUPS)
def test_weights_with_a_scale_for_each_group(name: str):
    pytest.importorskip("torchao.quantization")
    fn, weights, taken = IN_GROUPS[name]
    assert handed(fn, *weights, x=WIDE, pays=whatever_it_costs) == taken


def test_scales_that_each_call_computes_are_left_to_the_compiler():
    pytest.importorskip("torchao.quantization")
    given = lambda x, codes, scales: by_torchao()(x, codes, scales * x[0, 0])  # noqa: E731
    assert handed(given, CODES, SCALES, x=WIDE, pays=whatever_it_costs) == 0


@pytest.mark.parametrize(("seen", "pays", "takes"), [(3, 4, 4), (4, 3, 2), (3, 1, None), (5, 4, None)])
def test_an_open_number_of_rows(seen: int, pays: int, takes: int | None):
    """The operator takes as many as it pays for, of powers of two; where many were seen, the compiler takes all."""
    module = torch.nn.Linear(K, O)
    x = seeded(seen, 1, K, dtype=torch.float32)
    program = export(module, [x], [{0: torch.export.Dim("batch")}])
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(lambda *of: of[3] <= pays, 4, lambda *_: None, linear.MANY, 0)
    done = lower_products(program.gm.graph, program.fake_mode, known, operator)
    ops = [n for n in program.gm.graph.nodes if n.target is torch.ops.mla_compile.linear.default]
    assert [n.args[3] for n in ops] == [takes] * done == ([] if takes is None else [takes])
    program.gm.recompile()
    for rows in (2, 4, 7):
        other = seeded(rows, 1, K, dtype=torch.float32)
        (got,) = run(program, other)
        torch.testing.assert_close(got, module(other))


def test_rows_bytes_and_what_pays_decide():
    assert handed(F.linear, W, x=seeded(1, 4, K, dtype=torch.float32)) == 1
    assert handed(F.linear, W, x=seeded(5, K, dtype=torch.float32)) == 0
    assert handed(F.linear, W, most=1) == 0
    assert handed(F.linear, W, least=O * K * 4) == 1
    assert handed(F.linear, W, least=O * K * 4 + 1) == 0


@pytest.mark.parametrize(
    ("rows", "many", "takes"),
    [
        (40, torch.float32, (0, True)),
        (40, torch.bfloat16, (0, False)),  # in the dtype of the rows, but the weight is not what torch reads best
        (40, None, None),
        (15, torch.float32, None),  # too few rows for it, and too many for the kernel
        (3, torch.float32, (3, False)),
    ],
)
def test_many_rows(rows: int, many: torch.dtype | None, takes: tuple[int, bool] | None):
    program = trace(F.linear, [seeded(rows, K, dtype=torch.bfloat16)], [W.bfloat16()])
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(lambda *of: of[3] <= 4, 4, lambda *_: many, linear.MANY, 0)
    assert lower_products(program.gm.graph, program.fake_mode, known, operator) == (takes is not None)
    ops = [n for n in program.gm.graph.nodes if n.target is torch.ops.mla_compile.linear.default]
    assert [(n.args[3], n.kwargs["wide"]) for n in ops] == ([] if takes is None else [takes])


def test_an_open_number_of_many_rows():
    """The operator multiplies many rows in float32, and fewer by its kernel or as torch does."""
    module = torch.nn.Linear(K, O).bfloat16()
    program = export(module, [seeded(40, 1, K, dtype=torch.bfloat16)], [{0: torch.export.Dim("batch")}])
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(lambda *of: of[3] <= 4, 32, lambda *_: torch.float32, linear.MANY, 0)
    assert lower_products(program.gm.graph, program.fake_mode, known, operator) == 1
    (node,) = (n for n in program.gm.graph.nodes if n.target is torch.ops.mla_compile.linear.default)
    assert (node.args[3], node.kwargs["wide"]) == (4, True)
    program.gm.recompile()
    for rows in (2, 4, 7, 16, 33):
        x = seeded(rows, 1, K, dtype=torch.bfloat16)
        (got,) = run(program, x)
        torch.testing.assert_close(got, module(x), rtol=2e-2, atol=2e-2)


EXPERTS = seeded(3, 16, K, dtype=torch.bfloat16)
ENDS = torch.tensor([4, 4, 20], dtype=torch.int32)


@pytest.mark.parametrize(
    ("fn", "least", "takes"),
    [
        (lambda x, w, ends: torch._grouped_mm(x, w.mT, ends), 0, (4, True)),
        (lambda x, w, ends: torch._grouped_mm(x, w.transpose(1, 2), offs=ends), 16 * K * 2, (4, True)),
        (lambda x, w, ends: torch._grouped_mm(x, w.mT, ends), 16 * K * 2 + 1, None),  # of one group
        (lambda x, w, ends: torch._grouped_mm(x, (w * x[0, 0]).mT, ends), 0, None),
        (lambda x, w, ends: torch._grouped_mm(x, w.view(3, K, 16), ends), 0, None),
    ],
)
def test_products_of_experts(fn: Fn, least: int, takes: tuple[int, bool] | None):
    x = seeded(20, K, dtype=torch.bfloat16)
    program = trace(lambda x, ends, w: fn(x, w, ends), [x, ENDS], [EXPERTS])
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(lambda *of: of[3] <= 4, 8, lambda *_: torch.float32, linear.MANY, least)
    assert lower_products(program.gm.graph, program.fake_mode, known, operator) == (takes is not None)
    ops = [n for n in program.gm.graph.nodes if n.target is torch.ops.mla_compile.grouped_linear.default]
    assert [(n.args[3], n.kwargs["wide"]) for n in ops] == ([] if takes is None else [takes])
    program.gm.recompile()
    with torch.no_grad():
        got, want = program.gm(x, ENDS, EXPERTS)[0], fn(x, EXPERTS, ENDS)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("most", [4, 8])
def test_the_mean_group_decides(most: int):
    """Twenty rows of three groups: seven of each."""
    x = seeded(20, K, dtype=torch.bfloat16)
    program = trace(lambda x, ends, w: torch._grouped_mm(x, w.mT, ends), [x, ENDS], [EXPERTS])
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(lambda *of: of[3] <= 4, most, lambda *_: None, linear.MANY, 0)
    assert lower_products(program.gm.graph, program.fake_mode, known, operator) == (most == 8)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(EXPERTS)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, ends)


@pytest.mark.parametrize("seen", [12, 13])
def test_an_open_number_of_rows_of_experts(seen: int):
    """Judged by the number seen: four or five rows of each group, for a kernel of at most four."""
    x = seeded(seen, K, dtype=torch.bfloat16)
    program = export(Experts(), [x, ENDS.clamp(max=seen)], [{0: torch.export.Dim.DYNAMIC}, None])
    known = weight_nodes(canonical(program), program.weights)
    operator = LinearOperator(lambda *of: True, 4, lambda *_: None, linear.MANY, 0)
    assert lower_products(program.gm.graph, program.fake_mode, known, operator) == (seen == 12)


def test_calls_that_do_not_absorb_have_the_operator_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear, "many_rows", lambda *_: torch.float32)
    module, given = Toy().bfloat16(), decode_inputs()
    given = [t.bfloat16() if t.is_floating_point() else t for t in given]
    queries = torch.export.Dim("queries", min=2, max=64)
    shapes = [{1: queries}, *({} for _ in given[1:])]
    wide = [given[0].expand(-1, 3, -1).contiguous(), *given[1:]]
    outcome = pipeline.run(export(module, wide, shapes), Options(products="native", forms="auto"), recompiles=True)
    assert outcome.variants
    for program in (outcome.program, outcome.long):
        assert any(n.target is torch.ops.mla_compile.linear.default for n in program.gm.graph.nodes)
        with torch.no_grad():
            torch.testing.assert_close(run(program, *wide)[0], module(*wide)[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("products", ["native", "torch"])
def test_a_prompt_of_many_rows(products: Any, monkeypatch: pytest.MonkeyPatch):
    """Nothing is absorbed in a prompt, but its products are computed in float32."""
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear, "many_rows", lambda *_: torch.float32)
    model = build("deepseek_v3", num_hidden_layers=1).bfloat16()
    given = {"input_ids": torch.arange(96)[None] % 90}
    fast: Any = mla_compile.optimize(model, codegen="eager", strict=True, products=products)
    with torch.no_grad():
        want = build("deepseek_v3", num_hidden_layers=1).bfloat16().double()(**given).logits
        got, plain = fast(**given).logits, model(**given).logits
    assert (got - want).norm() <= 1.1 * (plain - want).norm()
    assert {str(site.code) for site in fast.mla_report.sites} == {"cost_prefill"}
    changes = {p.name: p.changes for p in fast.mla_report.passes}["products"]
    assert changes >= 8 if products == "native" else changes == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "codegen"),
    [*also("family", ("minicpm3", "eager"), ("deepseek_v3", "eager")), *also("inductor", ("minicpm3", "inductor"))],
)
def test_models_decode_alike(family: str, codegen: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear, "pays", whatever_it_costs)
    model = build(family).float()
    given = prompt(batch=1, pad=0)
    want, _ = greedy(model, given, 6)
    for products in ("native", "torch"):
        torch._dynamo.reset()
        fast: Any = mla_compile.optimize(model, codegen=codegen, strict=True, products=products)
        assert torch.equal(greedy(fast, given, 6)[0], want)
        found = {p.name: p.changes for p in fast.mla_report.passes}["products"]
        assert found >= 2 * 4 if products == "native" else found == 0  # of two attentions, and of what is around them


def of_few_bits(kind: torch.dtype, dtype: torch.dtype = torch.float32) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    model = build("deepseek_v3", hidden_size=64, q_lora_rank=32, v_head_dim=16, num_hidden_layers=1).to(dtype)
    config = quantization.IntxWeightOnlyConfig(weight_dtype=kind, granularity=quantization.PerGroup(32))
    quantization.quantize_(model, config)
    return model


@pytest.mark.thorough
@pytest.mark.singly
def test_models_of_four_bits_decode_alike(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    model = of_few_bits(torch.int4)
    given = prompt(batch=1, pad=0)
    want, _ = greedy(model, given, 4)
    fast: Any = mla_compile.optimize(model, codegen="eager", strict=True, products="native")
    assert torch.equal(greedy(fast, given, 4)[0], want)
    assert {p.name: p.changes for p in fast.mla_report.passes}["products"] >= 3


@pytest.mark.thorough
@pytest.mark.singly
@pytest.mark.parametrize(
    ("kind", "dequantize"), [(torch.int4, "auto"), *also("combination", (torch.int4, "step"), (torch.int8, "auto"))]
)
def test_codes_of_four_bits_are_packed_once(kind: torch.dtype, dequantize: str, monkeypatch: pytest.MonkeyPatch):
    if native.load() is None:
        pytest.skip("no native kernel here")
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear, "packs", lambda *_: True)
    read: list[int] = []
    multiply = native.packed_product
    monkeypatch.setattr(
        native, "packed_product", lambda *given: (read.append(given[2].data_ptr()), multiply(*given))[1]
    )
    model = of_few_bits(kind, torch.bfloat16)
    fast: Any = mla_compile.optimize(model, codegen="eager", strict=True, products="native", dequantize=dequantize)
    given, before = prompt(batch=1, pad=0), None
    for _ in range(2):
        read.clear()
        want, logits = greedy(model, given, 4)[1], greedy(fast, given, 4)[1]
        assert (logits - want).norm() < 0.03 * want.norm()
        assert before is None or not torch.equal(before, logits)
        if kind == torch.int4 and dequantize == "auto":
            assert len(read) >= 3 * len(set(read)) >= 27  # the same memory in each of three steps
        else:
            assert not read
        before = logits
        with torch.no_grad():  # a write to a tensor inside the weight
            model.model.layers[0].self_attn.o_proj.weight.scale.mul_(1.5)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_several_ranks_keep_their_products(ranks: int, monkeypatch: pytest.MonkeyPatch):
    """Replicated results have to be the same on all ranks, and each would measure by itself."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: ranks > 0)
        patch.setattr(torch.distributed, "get_world_size", lambda: ranks)
        target = this_machine()
    several = target.ranks > 1
    assert several is (ranks == 2)
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear, "pays", whatever_it_costs)
    monkeypatch.setattr("mla_compile.pipeline.target._ranks", lambda: target.ranks)
    module, given = Toy(), decode_inputs()
    outcome = pipeline.run(export(module, given), Options(products="native", forms="absorbed"))
    assert outcome.absorbed == 1
    with torch.no_grad():
        torch.testing.assert_close(run(outcome.program, *given)[0], module(*given)[0])
    assert ({p.name: p.changes for p in outcome.report.passes}["products"] > 0) is not several


def test_attention_over_rows_that_heads_share_counts_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(linear, "pays", whatever_it_costs)
    dims = replace(Dims(), dtype=torch.float32)
    module = rows_of_all_heads.build(dims).eval()
    given = [seeded(dims.B, S, W, dtype=torch.float32) for S, W in ((1, dims.D), (7, dims.N + dims.R))]
    outcome = pipeline.run(export(module, given), Options(products="native"))
    assert outcome.fused == 1
    assert {p.name: p.changes for p in outcome.report.passes}["products"] >= 3
    with torch.no_grad():
        torch.testing.assert_close(run(outcome.program, *given)[0], module(*given)[0])
