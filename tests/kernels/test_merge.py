"""Results over parts of the keys put together, against the reference over all of them in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mla_compile.errors import InputError
from mla_compile.kernels import decode, reference
from mla_compile.kernels.call import DecodeCall
from tests.support.tiers import also

B, S, H, T, L, R = 2, 3, 5, 41, 24, 8


def whole(spread: float = 1.0, seed: int = 0, **more: Any) -> DecodeCall:
    """A call in float64; the scores' standard deviation is ``spread``."""
    g = torch.Generator().manual_seed(seed)
    query, rows = (torch.randn(*n, generator=g, dtype=torch.float64) for n in ((B, S, H, L + R), (B, T, L + R)))
    return DecodeCall(query, rows[..., :L], rows[..., L:], scale=spread * (L + R) ** -0.5, **more)


def parts_of(call: DecodeCall, cuts: list[int], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The call over the keys between the cuts: out in ``dtype``, lse in float32 (float64 for float64)."""
    outs, sums = [], []
    assert call.rope is not None
    for lo, hi in zip([0, *cuts], [*cuts, T], strict=True):
        mask = None if call.mask is None else call.mask[..., lo:hi]
        part = call._replace(latent=call.latent[:, lo:hi], rope=call.rope[:, lo:hi], mask=mask, sinks=None)
        out, lse = reference.decode_attention(part)
        outs.append(out.to(dtype))
        sums.append(lse if dtype == torch.float64 else lse.float())
    return outs, sums


TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_random_cuts_give_the_whole(dtype: torch.dtype, seed: int):
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, T + 1, (int(torch.randint(0, 7, (), generator=g)),), generator=g).sort().values.tolist()
    sinks = torch.randn(H, generator=g) if seed % 2 else None
    visible = torch.rand(B, H, S, T, generator=g) < 0.2  # leaves parts, and with luck rows, without a key
    visible[0, 0, 0] = False
    call = whole(3.0, seed, mask=visible, sinks=sinks)
    outs, sums = parts_of(call, cuts, dtype)
    want, want_lse = reference.decode_attention(call)
    got, lse = decode.merge(torch.stack(outs), torch.stack(sums), sinks=sinks)
    assert (got.dtype, lse.dtype) == (dtype, sums[0].dtype)
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-6)
    again = decode.merge(outs, sums, sinks=sinks)
    assert all(torch.equal(a, b) for a, b in zip(again, (got, lse), strict=True)), "a sequence is the stacked tensor"


def test_parts_that_saw_nothing_are_not_read():
    call = whole()
    (one,), (lse,) = parts_of(call, [], torch.float32)
    junk = [torch.full_like(one, value) for value in (torch.nan, torch.inf, 7.0)]
    nothing = torch.full_like(lse, -torch.inf)
    got, sums = decode.merge([junk[0], one, *junk[1:]], [nothing, lse, nothing, nothing])
    assert torch.equal(got, one)
    assert torch.equal(sums, lse)
    got, sums = decode.merge(junk, [nothing] * 3, sinks=torch.zeros(H))
    assert not got.any()
    assert (sums == -torch.inf).all()


def test_nan_of_a_part_that_saw_keys_is_not_hidden():
    outs, sums = parts_of(whole(), [20], torch.float32)
    outs[0][0, 1, 2, 3] = torch.nan
    sums[1][1, 0, 4] = torch.nan
    got, lse = decode.merge(outs, sums)
    assert torch.equal(got.isnan().nonzero(), torch.tensor([[0, 1, 2, 3], *([1, 0, 4, v] for v in range(L))]))
    assert torch.equal(lse.isnan().nonzero(), torch.tensor([[1, 0, 4]]))


@pytest.mark.parametrize("shift", [-3e4, -1e3, 1e3, 3e4, 1e30])
def test_scores_of_any_size(shift: float):
    """Neither an overflow, nor the rounding of a large lse (2e-3 at 3e4) as a factor of the result."""
    g = torch.Generator().manual_seed(1)
    out, lse = torch.randn(4, B, S, H, L, generator=g), shift + torch.randn(4, B, S, H, generator=g)
    weight = (lse.double() - lse.double().amax(0)).exp()
    want = (weight[..., None] * out.double()).sum(0) / weight.sum(0)[..., None]
    got, sums = decode.merge(out, lse)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(sums.double(), lse.double().logsumexp(0), atol=1e-6, rtol=1e-6)


def test_one_part_is_itself_and_merging_twice_is_merging_once():
    outs, sums = parts_of(whole(5.0), [3, 17, 30], torch.float32)
    assert torch.equal(decode.merge(outs[:1], sums[:1])[0], outs[0])
    left, right = decode.merge(outs[:2], sums[:2]), decode.merge(outs[2:], sums[2:])
    got = decode.merge(*map(list, zip(left, right, strict=True)))
    for a, b in zip(got, decode.merge(outs, sums), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_a_shared_prefix_and_the_rest():
    """One prefix for all requests, then pages of their own: what a server does with it."""
    call = whole()
    query, rows = call.query.float(), torch.cat([call.latent[:1].expand(B, -1, -1), call.latent], 1).float()
    rope = torch.cat([call.rope[:1].expand(B, -1, -1), call.rope], 1).float()
    want, want_lse = decode.decode_attention(query, rows, rope, scale=0.2)
    prefix = decode.decode_attention(query, rows[:, :T], rope[:, :T], scale=0.2)
    rest = decode.decode_attention(query, rows[:, T:], rope[:, T:], scale=0.2)
    out, lse = decode.merge([prefix[0], rest[0]], [prefix[1], rest[1]])
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("dynamic", [True, *also("combination", False)])
def test_is_traced_whole(dynamic: bool):
    torch._dynamo.reset()
    step = torch.compile(lambda o, s, k: decode.merge(o, s, sinks=k), fullgraph=True, dynamic=dynamic, backend="eager")
    for b in (2, 3):
        out, lse = torch.randn(4, b, S, H, L), torch.randn(4, b, S, H)
        lse[0] = -torch.inf
        for o, s in ((out, lse), (list(out), list(lse))):
            for got, want in zip(step(o, s, torch.zeros(H)), decode.merge(o, s, sinks=torch.zeros(H)), strict=True):
                torch.testing.assert_close(got, want)


def test_fake_tensors_have_the_shapes():
    with torch._subclasses.FakeTensorMode():
        out, lse = decode.merge(torch.empty(4, B, S, H, L, dtype=torch.bfloat16), torch.empty(4, B, S, H))
    assert (out.shape, out.dtype) == ((B, S, H, L), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((B, S, H), torch.float32)


OUT, LSE = torch.zeros(2, B, S, H, L), torch.zeros(2, B, S, H)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": OUT[0]}, r"out is float32 \[2, 3, 5, 24\] on cpu, expected \[P,B,S,H,V\]"),
        ({"out": OUT[:0], "lse": LSE[:0]}, "there is no part in out"),
        ({"out": []}, "there is no part in out"),
        ({"out": list(OUT), "lse": []}, "there is no part in lse"),
        ({"lse": LSE[:1]}, r"lse is float32 \[1, 2, 3, 5\] on cpu, expected \[2, 2, 3, 5\]"),
        ({"lse": LSE.transpose(2, 3)}, r"lse is float32 \[2, 2, 5, 3\]"),
        ({"out": [OUT[0], OUT[1].half()]}, r"out\[1\] is float16 .* expected float32 .* as out\[0\]"),
        ({"lse": [LSE[0], LSE[1][:1]]}, r"lse\[1\] is float32 \[1, 3, 5\]"),
        ({"out": OUT.int()}, "out is torch.int32, expected one of"),
        ({"lse": LSE.half()}, "lse is torch.float16, expected float32 or float64"),
        ({"lse": LSE.to("meta")}, "lse is on meta, expected cpu as out"),
        ({"sinks": torch.zeros(H + 1)}, r"sinks is float32 \[6\] on cpu, expected float32 \[H\] = \[5\]"),
        ({"sinks": torch.zeros(H, dtype=torch.int32)}, "sinks is int32"),
        ({"sinks": torch.zeros(H, device="meta")}, "sinks is on meta"),
        ({"out": OUT.clone().requires_grad_()}, "an input requires grad"),
    ],
)
def test_what_does_not_fit_says_why(change: dict[str, Any], message: str):
    with pytest.raises(InputError, match=f"^merge: {message}"):
        decode.merge(**{"out": OUT, "lse": LSE, **change})
