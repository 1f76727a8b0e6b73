"""Programs with buffers of full length for K and V per head: the buffers become rows, written at the same positions."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import mla_compile
from mla_compile.errors import InputError
from tests.support.latent_modules import B, D, H, L, Model, N, R, V, rotated
from tests.support.programs import seeded
from tests.support.tiers import also

pytestmark = pytest.mark.thorough

CAPACITY = 13
EXACT = 1e-12


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


class Static(nn.Module):
    """One layer over K [B,H,CAPACITY,N+R] and V [B,H,CAPACITY,V], which the caller holds; x stands ``at`` positions.

    ``write``: ``index_copy``, ``index_put`` or ``slice``. In place, or returned beside the result.
    """

    def __init__(self, write="index_copy", in_place=True, style="plain"):
        super().__init__()
        self.layer = Model(style).layers[0]
        self.write, self.in_place, self.hides = write, in_place, True

    def made(self, x, at):
        b, s, _ = x.shape
        c, k_rope = self.layer.down(x).split([L, R], -1)
        k_nope, v = self.layer.up(self.layer.norm(c)).view(b, s, H, N + V).transpose(1, 2).split([N, V], -1)
        k_rope = rotated(k_rope.view(b, 1, s, R), at.to(x.dtype))
        return torch.cat([k_nope, k_rope.expand(b, H, s, R)], -1), v

    def put(self, buffer, new, at):
        if not self.in_place:
            return buffer.index_copy(2, at, new)
        if self.write == "index_copy":
            buffer.index_copy_(2, at, new)
        elif self.write == "index_put":
            buffer[:, :, at] = new
        else:  # the program is one for its position
            buffer[:, :, self.start : self.start + new.shape[2]] = new
        return buffer

    def read(self, k, v):
        return k, v

    def queries(self, x):
        """Not rotated: what becomes of a buffer does not depend on them."""
        return self.layer.q(x).view(*x.shape[:2], H, N + R).transpose(1, 2)

    def attended(self, q, k, v, at):
        keep = torch.arange(k.shape[2]) <= at[:, None] if self.hides else None
        return self.layer.o(F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).flatten(2))

    def forward(self, x, k_buffer, v_buffer, at):
        q = self.queries(x)
        k, v = self.made(x, at)
        k_buffer, v_buffer = self.put(k_buffer, k, at), self.put(v_buffer, v, at)
        y = self.attended(q, *self.read(k_buffer, v_buffer), at)
        return y if self.in_place else (y, k_buffer, v_buffer)


def buffers():
    return torch.zeros(B, H, CAPACITY, N + R, dtype=torch.float64), torch.zeros(B, H, CAPACITY, V, dtype=torch.float64)


def tokens(start, count, seed=30):
    return seeded(B, count, D, seed=seed + start), torch.arange(start, start + count)


def latent(module, start=0, count=1, **options):
    x, at = tokens(start, count)
    exported = torch.export.export(module.double().eval(), (x, *buffers(), at), strict=False)
    # What is wrong would be taken back if it were verified, and the numbers are compared by each test.
    options = {"cache": "latent", "forms": "absorbed", "verify": False, **options}
    return mla_compile.optimize(exported, **options)


@pytest.mark.parametrize(
    ("write", "in_place"), [("index_put", True), *also("combination", ("index_copy", False), ("index_copy", True))]
)
def test_buffers_become_rows(write, in_place):
    module = Static(write, in_place)
    decode, prompt = latent(module, verify=True), latent(module, 0, 4)
    report, change = decode.graph_module.meta["mla_report"], decode.graph_module.meta["mla_cache"]
    assert [site.code for site in report.sites] == ["absorbed"]
    assert [(t.name, t.values, t.kept) for t in change.inputs] == [
        ("k_buffer", H * (N + R), L + R),
        ("v_buffer", H * V, 0),
    ]
    mine, theirs = buffers(), decode.example_inputs[0][1:3]
    assert all(not row.any() for row in pytree.tree_leaves(theirs))
    step = decode.module()
    for run, start, count in [(prompt.module(), 0, 4), (step, 4, 1), (step, 5, 1)]:
        x, at = tokens(start, count)
        expected, got = module(x, *mine, at), run(x, *theirs, at)
        if not in_place:
            (expected, *mine), (got, *theirs) = expected, got
        assert (got - expected).abs().max() < EXACT
    held = [sum(t.numel() for t in pytree.tree_leaves(cache)) for cache in (mine, theirs)]
    assert held == [B * CAPACITY * H * (N + R + V), B * CAPACITY * (L + R)]
    rows, error = mla_compile.migrate_cache(decode, mine)
    assert error < 1e-13
    for a, b in zip(pytree.tree_leaves(rows), pytree.tree_leaves(theirs), strict=True):
        assert (a - b).abs().max() < EXACT
    change.check_filled_by(prompt.graph_module.meta["mla_cache"])
    assert ("written in place" in str(change)) == in_place
    decode.validate()


class Beginning(Static):
    """Reads the buffers up to the newest token alone."""

    def read(self, k, v):
        return k[:, :, : self.start + 1], v[:, :, : self.start + 1]


def test_a_beginning_of_the_buffers_is_read():
    module = Beginning("slice")
    mine, theirs = buffers(), None
    for start in (1, 7):
        module.start = start
        program = latent(module, start)
        assert [s.code for s in program.graph_module.meta["mla_report"].sites] == ["absorbed"]
        theirs = program.example_inputs[0][1:3] if theirs is None else theirs
        x, at = tokens(start, 1)
        assert (program.module()(x, *theirs, at) - module(x, *mine, at)).abs().max() < EXACT
    shapes = [n.meta["val"].shape for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert not any(list(s[:3]) == [B, H, 8] for s in shapes)


def test_the_old_buffers_are_read_elsewhere():
    """Whoever reads what the buffer held gets it made from its rows."""

    class Sums(Static):
        def forward(self, x, k_buffer, v_buffer, at):
            return *super().forward(x, k_buffer, v_buffer, at), k_buffer.sum()

    module = Sums(in_place=False)
    program = latent(module, 2)
    x, at = tokens(2, 1)
    rows = tuple(tuple(seeded(*r.shape, seed=50) for r in held) for held in program.example_inputs[0][1:3])
    held = program.graph_module.meta["mla_cache"].inputs
    k, v = (t.recipe for t in held)
    k, v = (
        mla_compile.passes.cache.expansion.expand(t.recipe, rows[0], t.leaves, lambda op, *a, **o: op(*a, **o))
        for t in held
    )
    assert (program.module()(x, *rows, at)[3] - module(x, k, v, at)[3]).abs() < 1e-9


class OtherPositions(Static):
    """V stands one position behind K: they are no longer made of the same rows."""

    def put(self, buffer, new, at):
        return buffer.index_copy(2, at + (buffer.shape[-1] == V), new)


def test_positions_that_differ_keep_rows_of_their_own():
    module = OtherPositions(in_place=False)
    program = latent(module)
    change = program.graph_module.meta["mla_cache"]
    assert [t.kept for t in change.inputs] == [L + R, L]
    run, mine, theirs = program.module(), buffers(), program.example_inputs[0][1:3]
    for start in range(4):
        x, at = tokens(start, 1)
        (expected, *mine), (got, *theirs) = module(x, *mine, at), run(x, *theirs, at)
        assert (got - expected).abs().max() < EXACT


class OneHead(Static):
    def put(self, buffer, new, at):
        return buffer.index_copy(1, at.remainder(H)[:1], new.expand(-1, -1, CAPACITY, -1)[:, :1])


class OtherWeights(Static):
    """The newest key is made by other weights than those of the prompt, in one and the same program."""

    def made(self, x, at):
        k, v = super().made(x, at)
        return torch.cat([k[:, :, :1].roll(1, 1), k[:, :, 1:]], 2), v


class Rotated(Static):
    def read(self, k, v):
        return rotated(k, torch.arange(CAPACITY, dtype=k.dtype)), v


def test_a_buffer_of_which_one_head_is_written_stays():
    stays(OneHead(in_place=False))


@pytest.mark.parametrize(("make", "count"), [(OtherWeights, 2), *also("combination", (Rotated, 1))])
def test_values_become_rows_where_keys_cannot(make, count):
    module = make(in_place=False)
    program = latent(module, count=count)
    (site,) = program.graph_module.meta["mla_report"].sites
    assert (site.code, site.parts) == ("absorbed", ("values",))
    change = program.graph_module.meta["mla_cache"]
    assert [(t.name, t.values, t.kept) for t in change.inputs] == [("v_buffer", H * V, L)]
    run, mine, theirs = program.module(), buffers(), program.example_inputs[0][1:3]
    for start in (0, count, 2 * count):
        x, at = tokens(start, count)
        (expected, *mine), (got, *theirs) = module(x, *mine, at), run(x, *theirs, at)
        assert (got - expected).abs().max() < EXACT
        assert (theirs[0] - mine[0]).abs().max() < EXACT


class GatedBranch(Static):
    """K and V have an image of narrow rows added, which have a factor each."""

    def __init__(self, style):
        super().__init__(in_place=False, style=style)
        self.narrow, self.wide = nn.Parameter(seeded(2, L, seed=70)), nn.Parameter(seeded(H * (N + V), 2, seed=71))

    def made(self, x, at):
        k, v = super().made(x, at)
        c = self.layer.norm(self.layer.down(x)[..., :L])
        more = F.linear(F.linear(c, self.narrow), self.wide) * torch.sigmoid(c[..., :1])
        more_k, more_v = more.unflatten(-1, (H, -1)).transpose(1, 2).split([N, V], -1)
        return torch.cat([k[..., :N] + more_k, k[..., N:]], -1), v + more_v


@pytest.mark.parametrize(("style", "marks"), [("plain", 0), *also("combination", ("bias", 1))])
def test_a_factor_of_new_rows_goes_with_them(style, marks):
    module = GatedBranch(style)
    program = latent(module)
    assert [t.kept for t in program.graph_module.meta["mla_cache"].inputs] == [L + marks + R + 2, 0]
    assert [s.code for s in program.graph_module.meta["mla_report"].sites] == ["absorbed"]
    run, mine, theirs = program.module(), buffers(), program.example_inputs[0][1:3]
    for start in (0, 1, 5):
        x, at = tokens(start, 1)
        (expected, *mine), (got, *theirs) = module(x, *mine, at), run(x, *theirs, at)
        assert (got - expected).abs().max() < EXACT


def test_a_buffer_that_the_caller_gets_a_view_of_stays():
    class Shows(Static):
        def forward(self, x, k_buffer, v_buffer, at):
            return super().forward(x, k_buffer, v_buffer, at), k_buffer, v_buffer

    stays(Shows())


class WrittenFurther(Static):
    """Reads what is written and, beside it, tokens that the buffers do not keep."""

    def read(self, k, v):
        return tuple(cache.index_copy(2, torch.tensor([12]), cache[:, :, :1].tanh()) for cache in (k, v))


class MultiplesOfPicked(Static):
    """Every other token, and the first once more; the keys halved, the values negative."""

    def read(self, k, v):
        at = torch.tensor([0, *range(0, CAPACITY, 2)])
        return k[:, :, at] * 0.5, -v[:, :, at]


def test_multiples_of_picked_tokens_of_buffers_are_read():
    module = MultiplesOfPicked(in_place=False)
    program = latent(module)
    assert [s.code for s in program.graph_module.meta["mla_report"].sites] == ["absorbed"]
    steps_are_equal(module, program)


def steps_are_equal(module, program):
    """Take three steps with both, which return their buffers, and return what each holds in the end."""
    run, mine, theirs = program.module(), buffers(), program.example_inputs[0][1:3]
    for start in range(3):
        x, at = tokens(start, 1)
        (expected, *mine), (got, *theirs) = module(x, *mine, at), run(x, *theirs, at)
        assert (got - expected).abs().max() < EXACT
    return mine, theirs


def test_what_is_written_for_one_call_alone_stays():
    stays(WrittenFurther(in_place=False))


def stays(module, start=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_compile.MlaCompileWarning)
        program = latent(module, start)
    assert "mla_cache" not in program.graph_module.meta
    (site,) = program.graph_module.meta["mla_report"].sites
    assert site.verdict == "refused"
    (x, at), mine, theirs = tokens(start, 1), buffers(), buffers()
    expected, got = pytree.tree_leaves(module(x, *mine, at)), pytree.tree_leaves(program.module()(x, *theirs, at))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    return site


class Registered(Static):
    """The buffers belong to the module."""

    def __init__(self):
        super().__init__()
        k, v = buffers()
        self.register_buffer("k_cache", k)
        self.register_buffer("v_cache", v)

    def forward(self, x, at):
        return super().forward(x, self.k_cache, self.v_cache, at)


def test_buffers_of_an_exported_module_are_refused_with_what_to_change():
    module = Registered().double()
    (site,) = mla_compile.explain(torch.export.export(module, tokens(0, 1), strict=False)).sites
    assert site.code == "expanded_cache"
    assert 'cache="latent"' in site.fix
    (site,) = mla_compile.explain(module, *tokens(0, 1)).sites  # by optimize(), they would be kept as rows
    assert site.code == "absorbed"


def test_migration_refuses_what_the_weights_did_not_make():
    program = latent(Static())
    with pytest.raises(InputError, match="not made by the weights"):
        mla_compile.migrate_cache(program, [seeded(*b.shape) for b in buffers()])
