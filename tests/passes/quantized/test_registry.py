"""Operators of other people: refused by name until somebody says how their weight is dequantized."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mla_compile
from mla_compile.codes import Code
from mla_compile.passes.quantized import registry
from tests.support.quantized import H, L, N, V, error, exact, optimized
from tests.support.tiers import also

pytestmark = pytest.mark.thorough

OUT = H * (N + V)


@pytest.fixture
def products(monkeypatch):
    """The registry, as it was afterwards."""
    monkeypatch.setattr(registry, "registered", registry.ProductTable({}))
    monkeypatch.setattr("mla_compile.passes.quantized.read.registered", registry.registered)


@pytest.fixture(scope="module")
def doubled():
    """``x (2 codes)^T + bias``: a product whose format nobody can guess."""
    library = torch.library.Library("tests_quantized", "DEF")
    library.define("doubled(Tensor x, Tensor codes, Tensor? bias=None) -> Tensor")

    def product(x: Tensor, codes: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.float() @ (2 * codes.float()).T
        return (out if bias is None else out + bias.float()).to(x.dtype)

    library.impl("doubled", product, "CPU")
    library._register_fake("doubled", lambda x, codes, bias=None: x.new_empty((*x.shape[:-1], len(codes))))
    yield torch.ops.tests_quantized.doubled
    library._destroy()


class Layer(nn.Module):
    def __init__(self, op, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.register_buffer("codes", torch.randint(-3, 4, (OUT, L), dtype=torch.int8))
        self.register_buffer("bias", torch.randn(OUT) if bias else None)

    def forward(self, x):
        return self.op(x * 0.01, self.codes, self.bias)


def test_an_unknown_product_is_refused_by_its_name(doubled):
    fast, after, before = optimized(Layer(doubled))
    (site,) = fast.mla_report.sites
    assert site.code == Code.UNKNOWN_PRODUCT
    assert "doubled" in site.reason
    assert "register_quantized_linear" in site.fix
    assert torch.equal(after, before)


def test_an_unknown_product_that_writes_into_memory_it_is_given():
    """Kernels are often wrapped like this; the functional graph holds another operator around them."""

    def writes(x, codes, out):
        out.copy_(x @ codes.to(x.dtype).T)

    library = torch.library.Library("tests_quantized_out", "DEF")
    library.define("product(Tensor x, Tensor codes, Tensor(a!) out) -> ()")
    library.impl("product", writes, "CPU")
    library._register_fake("product", lambda *_: None)

    class Written(Layer):
        def forward(self, x):
            rows = x.flatten(0, 1)
            out = rows.new_empty(len(rows), OUT)
            self.op(rows, self.codes, out)
            return out.unflatten(0, x.shape[:2])

    try:
        fast, after, before = optimized(Written(torch.ops.tests_quantized_out.product))
    finally:
        library._destroy()
    (site,) = fast.mla_report.sites
    assert site.code == Code.UNKNOWN_PRODUCT
    assert site.reason.startswith("product ")
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", ["overload", "pattern", *also("combination", "packet", "text")])
def test_registered_it_is_absorbed(doubled, products, name):
    names = {"text": "tests_quantized::doubled", "pattern": "tests_*::doubled"}
    op = {"packet": doubled, "overload": doubled.default, **names}
    mla_compile.register_quantized_linear(op[name], lambda codes, bias: (2 * codes.float(), bias), rows="x")
    layer = Layer(doubled, bias=False)
    fast, after, before = optimized(layer, verify=True)
    (site,) = fast.mla_report.sites
    assert site.code == Code.ABSORBED, site.reason
    truth = exact(0.02 * layer.codes.double())
    assert error(after, truth) <= 1.05 * error(before, truth)


def test_its_bias_is_that_of_the_values(doubled, products):
    mla_compile.register_quantized_linear(doubled, lambda codes, bias: (2 * codes.float(), bias), rows="x")
    fast, after, before = optimized(Layer(doubled), torch.float32, verify=True)
    assert fast.mla_report.sites[0].code == Code.ABSORBED
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_without_a_way_to_dequantize_the_unit_vectors_tell(doubled, products):
    mla_compile.register_quantized_linear(doubled, None, rows="x")
    fast, after, before = optimized(Layer(doubled, bias=False), torch.float32, verify=True)
    assert fast.mla_report.sites[0].code == Code.ABSORBED
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_rows_that_are_rounded_too(doubled, products):
    how = lambda codes, bias: (2 * codes.float(), bias)  # noqa: E731
    mla_compile.register_quantized_linear(doubled, how, rows="x", rounds_rows=True)
    fast, *_ = optimized(Layer(doubled), quantized="exact")
    assert fast.mla_report.sites[0].code == Code.QUANTIZED_ROWS
    fast, *_ = optimized(Layer(doubled))
    assert any("no longer rounded" in note for note in fast.mla_report.sites[0].notes)


@pytest.mark.parametrize(
    ("dequantize", "said"),
    [
        (lambda codes, bias: codes.float().T, r"shape \[64, 224\].*expected the weight \[out, in\] = \[224, 64\]"),
        (lambda codes, bias: codes, "int8, expected float32"),
    ],
)
def test_a_wrong_weight_is_no_silent_number(doubled, products, dequantize, said):
    mla_compile.register_quantized_linear(doubled, dequantize, rows="x")
    with pytest.raises(Exception, match=said):
        optimized(Layer(doubled))


def test_a_wrong_weight_leaves_the_model_as_it_was(doubled, products):
    mla_compile.register_quantized_linear(doubled, lambda codes, bias: codes, rows="x")
    with pytest.warns(mla_compile.MlaCompileWarning, match="expected float32"):
        _, after, before = optimized(Layer(doubled), strict=False)
    assert torch.equal(after, before)


def test_arguments_that_cannot_be():
    with pytest.raises(mla_compile.InputError, match=r"no argument 'rows'.*self, mat2"):
        mla_compile.register_quantized_linear(torch.ops.aten.mm.default, None, rows="rows")
    with pytest.raises(mla_compile.InputError, match="namespace::name"):
        mla_compile.register_quantized_linear("doubled", None, rows="x")
