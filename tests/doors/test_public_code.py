"""What public code showed: small models with the structure of code that was refused, misjudged or stopped by a bug.

Found in modules of cross-layer value sharing, grouped heads with their own cache, images, and converted models.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mla_compile
from mla_compile import InputError
from mla_compile.codes import Code
from mla_compile.core.records import SiteReport
from mla_compile.runtime.latent import LatentTensor
from tests.support.tiers import also

D, H, L, R, N = 24, 4, 6, 4, 6


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def optimized(model: nn.Module, **options: Any) -> Any:
    return mla_compile.optimize(model, codegen="eager", forms="absorbed", strict=True, **options)


def heads(x: Tensor, count: int = H) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def turned(x: Tensor, start: int = 0) -> Tensor:
    angle = torch.arange(start, start + x.shape[-2], dtype=x.dtype)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class SharedBelow(nn.Module):
    """Two layers that read the same K, normed per head, and the same V: of both the values are absorbed."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(2))
        self.down, self.k, self.v = nn.Linear(D, L), nn.Linear(L, D, bias=False), nn.Linear(L, D, bias=False)

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        c = torch.cat([past, self.down(x)], 1)
        k, v = F.rms_norm(heads(self.k(c)), (D // H,)), heads(self.v(c))
        for q in self.q:
            x = x + F.scaled_dot_product_attention(heads(q(x)), k, v).transpose(1, 2).flatten(2)
        return x, c


def test_a_layer_that_reads_the_values_of_the_one_below():
    model = SharedBelow().double()
    x, past = torch.randn(2, 1, D).double(), torch.randn(2, 9, L).double()
    fast = optimized(model)
    torch.testing.assert_close(fast(x, past), model(x, past), rtol=1e-12, atol=1e-12)
    sites = fast.mla_report.sites
    assert [(site.code, site.parts) for site in sites] == [(Code.ABSORBED, ("values",))] * 2
    assert [kept.code for site in sites for kept in site.kept] == [Code.NONLINEAR] * 2


class Repeated(nn.Module):
    """Half as many heads of K and V as of queries, repeated before they are cached, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(D, H * (N + R)), nn.Linear(D, L)
        self.k, self.v, self.r = nn.Linear(L, H // 2 * N), nn.Linear(L, H // 2 * N), nn.Linear(D, R)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        def repeated(y: Tensor) -> Tensor:
            return y[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)

        start = 0 if past is None else past[0].shape[2]
        c, q = self.down(x), heads(self.q(x))
        q = torch.cat([q[..., :N], turned(q[..., N:], start)], -1)
        r = turned(self.r(x)[:, None], start).expand(-1, H, -1, -1)
        k = torch.cat([repeated(heads(self.k(c), H // 2)), r], -1)
        v = repeated(heads(self.v(c), H // 2))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return y.transpose(1, 2).flatten(2), (k, v)


def test_heads_that_are_repeated_before_they_are_cached():
    model = Repeated().double()
    fast = optimized(model)
    mine = theirs = None
    for count in (5, 1, 1):
        x = torch.randn(2, count, D).double()
        (expected, theirs), (got, mine) = model(x, theirs), fast(x, mine)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert {site.code for site in fast.mla_report.sites} == {Code.ABSORBED}
    assert mine is not None
    for own, plain in zip(mine, theirs, strict=True):
        assert isinstance(own, LatentTensor)
        torch.testing.assert_close(own.clone(), plain, rtol=1e-12, atol=1e-12)


class OfAnImage(nn.Module):
    """Keys are the places of a map: two axes of the latent, one of the shared key, both of open length."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Conv2d(D, H * (N + R), 1), nn.Conv2d(D, L, 1)
        self.r, self.up = nn.Conv2d(D, R, 1), nn.Conv2d(L, H * 2 * N, 1)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).flatten(2).unflatten(1, (H, -1)).mT
        k, v = self.up(self.down(x)).flatten(2).unflatten(1, (H, -1)).mT.split([N, N], -1)
        r = self.r(x).flatten(2).mT.unsqueeze(1)
        r = r * torch.arange(r.shape[2], dtype=x.dtype).cos()[:, None]
        return (q @ torch.cat([k, r.expand(-1, H, -1, -1)], -1).mT).softmax(-1) @ v


def test_keys_along_two_axes():
    model = OfAnImage().double()
    fast = optimized(model, dynamic=True)
    for size in ((3, 4), (4, 4), (5, 6)):
        x = torch.randn(2, D, *size).double()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-12, atol=1e-12)
    assert {site.code for site in fast.mla_report.sites} == {Code.ABSORBED}


class Returned(nn.Module):
    """Keys with rotary columns for each head, which the model returns, too: only the values are absorbed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(D, H * (N + R)), nn.Linear(D, L)
        self.k, self.v, self.r = nn.Linear(L, H * N), nn.Linear(L, H * N), nn.Linear(D, H * R)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.down(x)
        k = torch.cat([heads(self.k(c)), turned(heads(self.r(x)))], -1)
        return F.scaled_dot_product_attention(heads(self.q(x)), k, heads(self.v(c))), k


def test_why_keys_that_are_returned_stay():
    model = Returned().double()
    x = torch.randn(2, 7, D).double()
    fast = optimized(model)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-12, atol=1e-12)
    (site,) = fast.mla_report.sites
    assert site.parts == ("values",)
    assert [(kept.part, kept.code) for kept in site.kept] == [("keys", Code.KEYS_USED_ELSEWHERE)]


class Scored(nn.Module):
    """Rotary keys from the hidden state for each head, and no cache: every call is a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.r = nn.Linear(D, H * (N + R)), nn.Linear(D, L), nn.Linear(D, H * R)
        self.k, self.v = nn.Linear(L, H * N), nn.Linear(L, H * 3 * N)

    def forward(self, x: Tensor) -> Tensor:
        c = self.down(x)
        k = torch.cat([turned(heads(self.r(x))), heads(self.k(c))], -1)
        return F.scaled_dot_product_attention(heads(self.q(x)), k, heads(self.v(c)), is_causal=True)


def test_what_a_prompt_of_any_length_could_absorb_is_not_called_cheaper():
    model = Scored().double()
    fast = mla_compile.optimize(model, codegen="eager", strict=True)
    for length in (5, 7, 3):
        x = torch.randn(2, length, D).double()
        torch.testing.assert_close(fast(x), model(x), rtol=1e-12, atol=1e-12)
    (reason,) = [site.reason for site in fast.mla_report.sites if site.code is Code.COST_PREFILL]
    assert "the keys and values alone could be absorbed; a prompt: as many queries as keys" in reason
    assert {site.code for site in fast.mla_report.sites} == {Code.ABSORBED, Code.COST_PREFILL}


class Static(nn.Module):
    """K and V in buffers of the module, all in one, all K in one, or written where a sequence is active alone."""

    LEAD: ClassVar[dict[str, tuple[int, ...]]] = {"one": (2, 2), "of layers": (2,), "pairs": (2,), "masked": ()}

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.q, self.down, self.k, self.v = (nn.Linear(a, b, bias=False) for a, b in ((D, D), (D, L), (L, D), (L, D)))
        for name in ("a", "b"):
            self.register_buffer(name, torch.zeros(*self.LEAD[how], 2, H, 16, D // H))

    def buffers_of(self, layer: int) -> tuple[Tensor, Tensor]:
        if self.how == "one":
            return self.a[0, layer], self.a[1, layer]
        if self.how == "of layers":
            return self.a[layer], self.b[layer]
        if self.how == "pairs":
            return (self.a, self.b)[layer].unbind()
        return self.a, self.b

    def forward(self, x: Tensor, start: int, active: Tensor) -> Tensor:
        stop, c = start + x.shape[1], self.down(x)
        for layer in range(2 if self.how != "masked" else 1):
            k, v = self.buffers_of(layer)
            for buffer, new in ((k, self.k(c)), (v, self.v(c))):
                new = heads(new)
                if self.how == "masked":
                    new = torch.where(active[:, None, None, None], new, buffer[:, :, start:stop])
                buffer[:, :, start:stop] = new
            y = F.scaled_dot_product_attention(heads(self.q(x)), k[:, :, :stop], v[:, :, :stop])
            x = x + y.transpose(1, 2).flatten(2)
        return x


# test_layers_of_one_buffer.py has layers of one buffer by default.
@pytest.mark.parametrize("how", ["masked", *also("combination", "one", "of layers", "pairs")])
def test_masked_writes_and_buffers_of_several_become_rows(how: str):
    assert Code.ABSORBED in {site.code for site in run_static(how)}


def run_static(how: str) -> list[SiteReport]:
    """The sites of a prompt and a step, which have the original's numbers."""
    model, own = Static(how).double(), Static(how).double()
    own.load_state_dict(model.state_dict())
    fast, start = optimized(own), 0
    for count in (5, 1):
        inputs = torch.randn(2, count, D).double(), start, torch.tensor([True, False])
        torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-12, atol=1e-12)
        start += count
    return list(fast.mla_report.sites)


class Steps(nn.Module):
    """What runs is a method of its own."""

    def decode_step(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("door", [mla_compile.optimize, mla_compile.explain])
def test_a_module_that_cannot_be_called(door: Any):
    for module in (Steps(), nn.ModuleList([nn.Linear(2, 2)])):
        with pytest.raises(InputError, match="needs the forward of a module"):
            door(module)
    own = Steps()
    own.forward = own.decode_step  # type: ignore[method-assign]
    assert mla_compile.optimize(own)(torch.ones(2)).tolist() == [1, 1]
