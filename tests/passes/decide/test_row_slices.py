"""K and V cut to some of their tokens after the up-projection: the same map of a slice of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from mla_compile.codes import Code
from mla_compile.errors import VerificationError
from mla_compile.passes.sources import row_slices
from tests.passes.decide.test_negatives import rotate
from tests.passes.rewrite.test_absorb import no_expansion
from tests.passes.rewrite.test_split_heads import SomeHeads, data, split
from tests.support.modules import MLA, H, N, V, causal, inputs, padded
from tests.support.programs import (
    absorbed,
    assert_equal,
    assert_untouched,
    calls,
    codes,
    error,
    export,
    one_side,
    optimized,
    refused,
    seeded,
    trace,
)
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

DYN = Dim.DYNAMIC
S, T, USED = 3, 9, 7


class Used(MLA):
    """K [B,H,T,N+R] and V are made of the whole cache and cut to what is used of it."""

    cut = staticmethod(lambda y, n: y[:, :, :n])

    def forward(self, x, c, r=None, mask=None, n=USED):
        k, v = self.expand(self.latent(c))
        k, v = self.spoil(self.join(k, self.rotary(r)), v)
        return self.finish(self.attend(self.query(x), self.cut(k, n), self.cut(v, n), mask), x)


def used(B=2, S=1, T=T, **more):
    return inputs(B, S, T, **more)


def of_used_rows(program):
    """Nothing is expanded, and only the rows that are used are read."""
    assert no_expansion(program, H, T, N)
    assert no_expansion(program, H, USED, N)
    return program


@pytest.mark.parametrize("core", ["sdpa", "bmm", *also("combination", "heads_last", "two_products")])
def test_the_beginning_of_a_cache(core):
    of_used_rows(absorbed(Used(core=core, bias=True), [*used(S=S), padded(2, S, USED)]))


@pytest.mark.parametrize("up", ["int8", *also("combination", "joint", "per_head", "lora")])
def test_every_up_projection(up):
    of_used_rows(absorbed(Used(up=up, share="assign"), used()))


CUTS = {
    "from_the_end": lambda y, n: y[:, :, -n:],
    "from_the_middle": lambda y, n: y[:, :, 1 : n - 1],
    "every_other": lambda y, n: y[:, :, ::2],
    "twice": lambda y, n: y[:, :, :-1][:, :, 1:],
    "some_sequences": lambda y, n: y[:1, :, :n],
    "one_token": lambda y, n: y[:, :, 4:5],
    "picked": lambda y, n: y[:, :, torch.tensor([4, -1, 0, 0])],
    "picked_of_some": lambda y, n: y[:, :, :n].index_select(2, torch.tensor([4, 2, n - 1])),
}


@pytest.mark.parametrize("name", usual(CUTS, ("from_the_end", "some_sequences", "picked_of_some")))
def test_other_slices(name):
    module = Used()
    module.cut = CUTS[name]
    B = 1 if name == "some_sequences" else 2
    x, c, r = used()
    absorbed(module, [x[:B], c, r], verify=True, strict=True)


class SumOfSlices(Used):
    """Two projections, cut one by one and added up."""

    def expand(self, c):
        k, v = super().expand(c)
        more = F.linear(c, self.w[: H * N] * 0.3).view(*c.shape[:2], H, N).transpose(1, 2)
        return k[:, :, :USED] + more[:, :, :USED], v[:, :, :USED]

    def forward(self, x, c, r):
        k, v = self.expand(c)
        return self.finish(self.attend(self.query(x), self.join(k, r[:, :USED]), v, None), x)


def test_a_sum_of_slices():
    of_used_rows(absorbed(SumOfSlices(), used()))


class PaddedFirst(Used):
    """V [B,H,T,V] with zeros beside it, the same for all tokens, and only then cut."""

    def spoil(self, k, v):
        return k, F.pad(v, (0, 3))

    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask)[..., :V]


def test_columns_that_no_rows_make():
    of_used_rows(absorbed(PaddedFirst(), used()))


def test_keys_narrower_than_their_rows():
    """One head: only K and V together are wider than the latent they share."""
    absorbed(Used(H=1, R=0), used(R=0))


def test_narrow_as_make_fx_leaves_it():
    def attention(q, c, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2).narrow(2, 1, USED) for w in (w_k, w_v))
        return F.scaled_dot_product_attention(q, k, v)

    given = [seeded(2, H, 1, N), seeded(2, T, 8)]
    weights = [seeded(H * N, 8, seed=1), seeded(H * V, 8, seed=2)]
    program = trace(attention, given, weights)
    assert "narrow.default" in calls(program)
    outcome = optimized(program, verify=True, strict=True)
    assert codes(outcome) == [Code.ABSORBED]
    assert calls(outcome.program).count("slice.Tensor") == 1
    (got,), want = outcome.program.gm(*given, *weights), attention(*given, *weights)
    assert error(got, want) < 1e-10


class AsLongAsTheMask(Used):
    """The length in use is the mask's; K and V each work it out."""

    def forward(self, x, c, r, mask):
        return super().forward(x, c, r, mask, mask.shape[-1])


@pytest.mark.parametrize("capacity", [pytest.param(None, id="dynamic"), *also("combination", T)])
def test_symbolic_lengths(capacity):
    """What is used, and perhaps what there is room for, is known in each call only."""
    dynamic = {"x": None, "c": {1: DYN}, "r": {1: DYN}, "mask": {3: DYN}}
    dynamic |= {} if capacity is None else {"c": None, "r": None}
    given = [*used(S=S), padded(2, S, USED)]
    module = AsLongAsTheMask()
    program = of_used_rows(absorbed(module, given, dynamic, verify=True, strict=True))
    if capacity is None:
        given = [*used(S=S, T=12), padded(2, S, 5)]
    assert_equal(module, program, [*given[:3], padded(2, S, 5)])


class Window(Used):
    """The newest four tokens: no shape says which."""

    def forward(self, x, c, r, mask=None):
        end = mask.shape[-1]
        k, v = self.expand(c)
        return self.finish(
            self.attend(self.query(x), self.join(k, r)[:, :, end - 4 : end], v[:, :, end - 4 : end], None), x
        )


def test_a_window_that_moves():
    module, dynamic = Window(), {"x": None, "c": None, "r": None, "mask": {3: DYN}}
    program = absorbed(module, [*used(), causal(1, 7)], dynamic, verify=True, strict=True)
    assert_equal(module, program, [*used(), causal(1, 5)])


class Prompt(Used):
    """In an empty cache with room for more: K and V are cut to the prompt."""

    def forward(self, x, c, r):
        k, v = self.expand(c)
        k, v = self.join(k, r)[:, :, : x.shape[1]], v[:, :, : x.shape[1]]
        return self.finish(F.scaled_dot_product_attention(self.query(x), k, v, is_causal=True), x)


@pytest.mark.parametrize("room", [31, 900])
@pytest.mark.parametrize("dynamic", [False, *also("combination", True)])
def test_a_prompt(room, dynamic):
    """Cheaper expanded, unless that means to expand a cache of which most is empty."""
    module, given = Prompt(H=4, L=16, N=12, V=12), inputs(2, 30, room, L=16)
    program = export(module, given, {"x": {1: DYN}, "c": None, "r": None} if dynamic else None)
    outcome = optimized(program)
    if room == 900 and not dynamic:
        assert codes(outcome) == [Code.ABSORBED]
        assert "30 of 900 cached tokens" in outcome.report.sites[0].reason
        assert_equal(module, outcome.program, given)
    else:
        assert codes(outcome) == [Code.COST_PREFILL]
        assert outcome.absorbed == 0
        assert_equal(module, outcome.program, given)


class Cut(Used):
    """``cut_k`` and ``cut_v`` [B,H,T,F] -> [B,H,T',F]."""

    def __init__(self, cut_k, cut_v=None, **options):
        super().__init__(**options)
        self.cut_k, self.cut_v = cut_k, cut_v or cut_k

    def forward(self, x, c, r, *more):
        k, v = self.expand(self.latent(c))
        k, v = self.spoil(self.join(k, self.rotary(r)), v)
        return self.finish(self.attend(self.query(x), self.cut_k(k, *more), self.cut_v(v, *more), None), x)


@pytest.mark.parametrize(
    ("of_k", "of_v"), [((0, 9, 2), (0, 5)), *also("combination", ((0, 6), (1, 7)), ((3, 9), (0, 6)))]
)
def test_keys_and_values_of_other_tokens(of_k, of_v):
    """Legal, if odd: two row tensors, as where the latents themselves are cut like that."""
    cut_k, cut_v = (lambda y, at=slice(*s): y[:, :, at] for s in (of_k, of_v))
    program = of_used_rows(absorbed(Cut(cut_k, cut_v), used(S=S), verify=True, strict=True))
    assert calls(program).count("slice.Tensor") >= 3  # c for K, c for V, r


def test_keys_and_values_of_other_positions():
    """Each picked by a tensor of its own that the caller gives, one of them in another order."""

    class Picked(Cut):
        def forward(self, x, c, r, of_k, of_v):
            k, v = self.expand(self.latent(c))
            k, v = self.join(k, self.rotary(r))[:, :, of_k], v[:, :, of_v]
            return self.finish(self.attend(self.query(x), k, v, None), x)

    given = [*used(S=S), torch.tensor([5, 0, -2, 0]), torch.tensor([1, 2, 8, 4])]
    of_used_rows(absorbed(Picked(None), given, verify=True, strict=True))


class Rotated(Cut):
    def spoil(self, k, v):
        return rotate(k), v


class FactorOfEachToken(Cut):
    def spoil(self, k, v):
        return k * torch.arange(1.0, T + 1, dtype=k.dtype)[:, None], v


class ShiftOfEachToken(Cut):
    def spoil(self, k, v):
        return k, v + torch.arange(1.0, T + 1, dtype=k.dtype)[:, None]


def first(y):
    return y[:, :, :6]


def merged(y):
    """Tokens of the first sequence and half of those of the second, [B*T] as one axis."""
    return y.transpose(1, 2).flatten(0, 1)[:12].unflatten(0, (2, 6)).transpose(1, 2)


def ring(y):
    return torch.cat([y[:, :, 4:], y[:, :, :4]], 2)


def by_data(y, n):
    n = n.item()
    torch._check(n >= 2)
    torch._check(n <= T)
    return y[:, :, :n]


def window_by_data(y, n):
    n = n.item()
    torch._check(n >= 0)
    torch._check(n <= T - 2)
    return y[:, :, n : n + 2]


def by_sequence(y):
    at = torch.tensor([[0, 2, 1], [3, 3, 0]])
    return y[torch.arange(2)[:, None], :, at].transpose(1, 2)


REFUSED = {
    "flip": (Cut(lambda y: y.flip(2)[:, :, :6]), Code.TOKEN_MIXING),
    "ring": (Cut(ring), Code.TOKEN_MIXING),
    "batch_and_tokens_merged": (Cut(merged), Code.UNSUPPORTED_OP),
    "by_data": (Cut(by_data), Code.UNSUPPORTED_OP),
    "window_by_data": (Cut(window_by_data), Code.UNSUPPORTED_OP),
    "picked_by_sequence": (Cut(by_sequence), Code.UNSUPPORTED_OP),
    "picked_where_data_says": (Cut(lambda y, mask: y[:, :, mask]), Code.TOKEN_MIXING),
}


@pytest.mark.parametrize("name", usual(REFUSED, rare=("by_data",)))
def test_what_is_no_slice_of_rows(name):
    module, code = REFUSED[name]
    more = {"by_data": torch.tensor(5), "data_says": torch.arange(T) % 2 == 0}
    refused(module, [*used(S=S), *(given for ends, given in more.items() if name.endswith(ends))], code)


ONE_SIDE = {
    "rotated": (Rotated(first), "values", Code.POSITION_DEPENDENT),
    "factor_of_each_token": (FactorOfEachToken(first), "values", Code.POSITION_DEPENDENT),
    "shift_of_each_token": (ShiftOfEachToken(first), "keys", Code.POSITION_DEPENDENT),
    "columns_picked": (Cut(lambda y: y, lambda y: y[..., torch.arange(V).flip(0)]), "keys", Code.UNSUPPORTED_OP),
    "keys_flipped": (Cut(lambda y: y.flip(2)[:, :, :6], first), "values", Code.TOKEN_MIXING),
}


@pytest.mark.parametrize("name", usual(ONE_SIDE, ("rotated", "shift_of_each_token", "columns_picked")))
def test_only_one_side(name):
    module, side, code = ONE_SIDE[name]
    one_side(module, used(S=S), side, code)


@pytest.mark.singly
@pytest.mark.parametrize("up", ["joint", "einsum"])
@pytest.mark.parametrize("dim", [1, 2, *also("combination", 0, 3)])
@pytest.mark.parametrize(("start", "end"), [(1, 4), *also("combination", (2, 3))])
def test_all_sizes_equal(dim, up, start, end):
    """Sequences, heads, tokens or columns are cut: atoms tell them apart where sizes do not."""
    n = 4

    class Equal(MLA):
        def forward(self, x, c, r, start, end):
            k, v = self.expand(c)
            k = self.join(k, r)
            q, k, v = (y.narrow(dim, start, end - start) for y in (self.query(x), k, v))
            return self.attend(self.query(x) if dim == 2 else q, k, v, None).transpose(1, 2).flatten(2)

    module = Equal(H=n, L=n, N=n, R=n, V=n, up=up)
    absorbed(module, [*inputs(n, n, n, L=n, R=n), start, end])


def test_what_is_read_elsewhere():
    """K is returned, so it is made anyway, of all tokens; V is then made of c alone."""

    class Returned(Used):
        def forward(self, x, c, r):
            k, v = self.expand(c)
            k = self.join(k, r)
            return self.finish(self.attend(self.query(x), first(k), first(v), None), x), k

    module = Returned()
    outcome = optimized(export(module, used()))
    (site,) = outcome.report.sites
    assert (site.code, site.parts) == (Code.ABSORBED, ("values",))
    assert [k.code for k in site.kept] == [Code.KEYS_USED_ELSEWHERE]
    assert_equal(module, outcome.program, used())


def test_some_heads():
    """Heads of a latent beside others, all cut to what is used: split by heads, then slices of rows."""

    class More(SomeHeads):
        def joined(self, *tensors):
            return tuple(first(y) for y in super().joined(*tensors))

    program, _ = split(More(), data(S=S, T=T), verify=True, strict=True)
    assert no_expansion(program, H, T, N)


def test_the_check_in_numbers_sees_another_slice(monkeypatch):
    """Rows shown at other positions than those of K and V: the rewritten attention is rolled back."""
    virtual = row_slices.virtual
    monkeypatch.setattr(
        row_slices, "virtual", lambda mode, op, rows, at, *_: virtual(mode, op, rows, at, 1, USED + 1, 1)
    )
    program = export(Used(), used())
    outcome = optimized(program, verify=True)
    assert codes(outcome) == [Code.VERIFY_FAILED]
    assert_untouched(program, outcome)
    with pytest.raises(VerificationError):
        optimized(program, verify=True, strict=True)
