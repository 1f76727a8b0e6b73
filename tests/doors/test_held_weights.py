"""Up-projections whose weights are plain tensor attributes, and the caches that could be taken for such weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile import MlaCompileWarning
from mla_compile.backend import reports
from mla_compile.codes import Code
from mla_compile.errors import StaleWeightError
from mla_compile.runtime.latent import LatentTensor
from tests.support.tiers import full

D, H, L, N = 24, 4, 6, 5
OPTIONS: dict[str, Any] = {"codegen": "eager", "forms": "absorbed", "strict": True}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def optimized(model: nn.Module, **options: Any) -> tuple[Any, Callable[[], list[Code]]]:
    fast = mla_compile.optimize(model, **OPTIONS, **options)
    return fast, lambda: [site.code for site in fast.mla_report.sites]


def compiled(model: nn.Module, **options: Any) -> tuple[Any, Callable[[], list[Code]]]:
    before = len(reports())
    fast = torch.compile(model, backend="mla", options=OPTIONS | options)
    return fast, lambda: [site.code for report in reports()[before:] for site in report.sites]


DOORS = pytest.mark.parametrize("door", [optimized, compiled])
OPTIMIZED = pytest.mark.parametrize("door", [optimized, pytest.param(compiled, marks=full("combination"))])
"""Where the other door has nothing of its own to show."""


class Attention(nn.Module):
    """The halves of one up-projection are attributes, made once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.o = nn.Linear(D, H * N), nn.Linear(D, L), nn.Linear(H * N, D)
        self.w_uk, self.w_uv = torch.randn(H, N, L), torch.randn(H, N, L)

    def halves(self, c: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("btl,hnl->bhtn", c, self.w_uk), torch.einsum("btl,hnl->bhtn", c, self.w_uv)

    def attend(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (H, N)).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Rows(Attention):
    """Caches the latent."""

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.cat([past, self.down(x)], 1)
        return self.attend(x, *self.halves(c)), c


class Keys(Attention):
    """Caches K and V."""

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        k, v = self.halves(self.down(x))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return self.attend(x, k, v), (k, v)


class Model(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.layer = attention

    def forward(self, *inputs: Any) -> Any:
        return self.layer(*inputs)


def x() -> Tensor:
    return torch.randn(2, 1, D)


def rows() -> Tensor:
    return torch.randn(2, 9, L)


def replaced(layer: Any) -> None:
    layer.w_uk, layer.w_uv = torch.randn(H, N, L), torch.randn(H, N, L)


def written(layer: Any) -> None:
    layer.w_uk.mul_(-2)
    layer.w_uv.flip(0).neg_()
    layer.w_uv[0] = 3.0


def written_through_data(layer: Any) -> None:
    layer.w_uk.data.mul_(-2)


def swapped(layer: Any) -> None:
    layer.w_uk, layer.w_uv = layer.w_uv, layer.w_uk


def one_for_both(layer: Any) -> None:
    layer.w_uv = layer.w_uk


def widened(layer: Any) -> None:
    layer.w_uk = torch.randn(H, 2 * N, L)[:, ::2]


def put_into_parameters(layer: Any) -> None:
    del layer.w_uk
    layer.w_uk = nn.Parameter(torch.randn(H, N, L))


EDITS = [replaced, written, written_through_data, swapped, one_for_both, widened, put_into_parameters]


@pytest.mark.singly
@DOORS
@pytest.mark.parametrize("fold", ["never", "always"])
def test_an_attribute_that_is_changed_between_calls_is_followed(door, fold):
    model = Model(Rows())
    fast, codes = door(model, fold=fold)
    for edit in (None, *EDITS):
        if edit is not None:
            edit(model.layer)
        for _ in range(2):
            inputs = x(), rows()
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert set(codes()) == {Code.ABSORBED}


@OPTIMIZED
def test_halves_that_the_first_call_makes(door):
    class Lazy(Rows):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(L, 2 * H * N, bias=False)
            self.w_uk = self.w_uv = None

        def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
            if self.w_uk is None:
                self.w_uk, self.w_uv = self.up.weight.view(2, H, N, L).unbind(0)
            return super().forward(x, past)

    model = Model(Lazy())
    fast, codes = door(model)
    for _ in range(3):
        inputs = x(), rows()
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    assert set(codes()) == {Code.ABSORBED}


@OPTIMIZED
def test_keys_and_values_that_were_cached_with_the_weights_of_then(door):
    """They are rows; with other weights they become plain K and V, and weights that were written to are an error."""
    model = Model(Keys())
    fast, codes = door(model)
    mine = theirs = None
    for count in (5, 1):
        new = torch.randn(2, count, D)
        (got, mine), (expected, theirs) = fast(new, mine), model(new, theirs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert set(codes()) == {Code.ABSORBED}
    assert all(isinstance(one, LatentTensor) for one in mine)
    replaced(model.layer)
    new = x()
    with pytest.warns(MlaCompileWarning, match=r"refused \(expanded_cache\)"):
        got, mine = fast(new, mine)
    expected, theirs = model(new, theirs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    _, mine = fast(x(), None)
    written(model.layer)
    with pytest.raises(StaleWeightError):
        fast(x(), mine)
    assert torch.isfinite(fast(x(), None)[0]).all()


class Owned(Attention):
    """K and V in attributes beside those of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = torch.zeros(2, H, 16, N), torch.zeros(2, H, 16, N)

    def forward(self, x: Tensor, start: int) -> Tensor:
        stop = start + x.shape[1]
        self.k[:, :, start:stop], self.v[:, :, start:stop] = self.halves(self.down(x))
        return self.attend(x, self.k[:, :, :stop], self.v[:, :, :stop])


def test_buffers_of_keys_and_values_beside_weights_that_are_attributes():
    model, own = Model(Owned()), Model(Owned())
    own.load_state_dict(model.state_dict())
    own.layer.w_uk, own.layer.w_uv = model.layer.w_uk, model.layer.w_uv
    fast, codes = optimized(own)
    for start, count in ((0, 5), (5, 1), (6, 1)):
        new = torch.randn(2, count, D)
        torch.testing.assert_close(fast(new, start), model(new, start), rtol=1e-4, atol=1e-5)
        assert isinstance(fast.layer.k, LatentTensor)
    assert set(codes()) == {Code.ABSORBED}
    assert not model.layer.k.equal(own.layer.k)


class Encoded(Attention):
    """Attends to what another model left in an attribute, as many rows as wide, in the shape of a weight."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.k_up, self.v_up, self.expanded = nn.Linear(L, H * N), nn.Linear(L, H * N), expanded
        self.rows = torch.randn(H, N, L)

    def forward(self, x: Tensor) -> Tensor:
        if self.expanded:
            k, v = self.k_up(self.rows), self.v_up(self.rows)
            return self.attend(x, *(one.unflatten(-1, (H, -1)).transpose(1, 2) for one in (k, v)))
        q = (self.q(x).unflatten(-1, (H, N)).transpose(1, 2) @ self.w_uk) @ self.rows[:, None].mT
        return (q.softmax(-1) @ self.rows[:, None]) @ self.w_uv.mT


@pytest.mark.singly
@DOORS
@pytest.mark.parametrize(("expanded", "code"), [(True, Code.ABSORBED), (False, Code.ALREADY_ABSORBED)])
def test_rows_in_an_attribute_are_no_weight(door, expanded, code):
    model = Model(Encoded(expanded))
    fast, codes = door(model)
    for edit in (None, lambda m: m.rows.mul_(2), lambda m: setattr(m, "rows", torch.randn(H, N, L))):
        if edit is not None:
            edit(model.layer)
        for _ in range(2):
            new = torch.randn(H, 1, D)
            torch.testing.assert_close(fast(new), model(new), rtol=1e-4, atol=1e-5)
    assert set(codes()) == {code}


class Remembered(Attention):
    """A latent cache in an attribute: joined and assigned anew, or written in place. Heads are as many as sequences."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.c, self.at = how, torch.zeros(H, 0 if how == "joined" else 12, L), 0

    def forward(self, x: Tensor) -> Tensor:
        new = self.down(x)
        if self.how == "joined":
            self.c = torch.cat([self.c, new], 1)
            return self.attend(x, *self.halves(self.c))
        self.c[:, self.at : self.at + 1] = new
        self.at += 1
        return self.attend(x, *self.halves(self.c[:, : self.at]))


@pytest.mark.singly
@DOORS
@pytest.mark.parametrize("how", ["joined", "written"])
def test_a_latent_cache_in_an_attribute_stays_a_cache(door, how):
    model, own = Model(Remembered(how)), Model(Remembered(how))
    own.load_state_dict(model.state_dict())
    own.layer.w_uk, own.layer.w_uv = model.layer.w_uk, model.layer.w_uv
    fast, codes = door(own)
    for _ in range(4):
        new = torch.randn(H, 1, D)
        torch.testing.assert_close(fast(new), model(new), rtol=1e-4, atol=1e-5)
    assert set(codes()) == {Code.ABSORBED}


class Given(Attention):
    """The weights are arguments: nothing says that they are no cache."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, past: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        c = torch.cat([past, self.down(x)], 1)
        if self.how == "linear":
            k, v = (F.linear(c, w.flatten(0, 1)).unflatten(-1, (H, N)).transpose(1, 2) for w in (w_uk, w_uv))
        else:
            k, v = (torch.einsum("btl,hnl->bhtn", c, w) for w in (w_uk, w_uv))
        return self.attend(x, k, v)


@pytest.mark.singly
@DOORS
@pytest.mark.parametrize("how", ["einsum", "linear"])
def test_a_weight_that_is_an_argument_is_told_by_name(door, how):
    model = Given(how)
    fast, codes = door(model)
    inputs = x(), rows(), torch.randn(H, N, L), torch.randn(H, N, L)
    with pytest.warns(MlaCompileWarning, match="unsupported_weight"):
        got = fast(*inputs)
    torch.testing.assert_close(got, model(*inputs))
    assert codes() == [Code.UNSUPPORTED_WEIGHT]
    (site,) = mla_compile.explain(model, *inputs).sites
    assert "an input of the graph that is not a weight of the model" in site.reason


class Mixed(nn.Module):
    """Plain attention, whose keys and values a matrix from outside mixes along the tokens: no wider than before."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, among: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, among @ k, among @ v)


def test_a_matrix_that_mixes_tokens_is_no_weight():
    (site,) = mla_compile.explain(Mixed(), torch.randn(2, 7, D), torch.randn(7, 7)).sites
    assert site.code is Code.NOT_MLA
    assert "projected from hidden states, as the queries are" in site.reason
