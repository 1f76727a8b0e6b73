"""Writes of K and V into buffers of full length that become writes of rows, and near misses that must stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import mla_compile
from tests.passes.cache.test_buffers import EXACT, Static, _no_grad, buffers, latent, stays, steps_are_equal, tokens
from tests.support.latent_modules import B, D, H, L, N, R
from tests.support.programs import seeded
from tests.support.tiers import also, full

__all__ = ["_no_grad"]
pytestmark = pytest.mark.thorough


class Written(Static):
    """``write(buffer, new, at)`` returns the buffer's new value; ``at``: the positions of the new tokens."""

    def __init__(self, write, in_place=False, style="plain"):
        super().__init__(in_place=in_place, style=style)
        self.put_into = write

    def put(self, buffer, new, at):
        made = self.put_into(buffer, new, at)
        return buffer.copy_(made) if self.in_place else made


def one_hot(buffer, new, at):
    """[S,T]"""
    return F.one_hot(at, buffer.shape[2]).to(new.dtype)


def along(buffer, new, at):
    """[T,1], 1 at the position of the one new token."""
    return one_hot(buffer, new, at).view(-1, 1)


def scattered(buffer, new, at):
    return buffer.scatter(2, at.view(1, 1, -1, 1).expand_as(new), new)


def scattered_by_copies(buffer, new, at):
    return buffer.scatter(2, at[:, None].repeat(*new.shape[:2], 1, new.shape[3]), new)


def scattered_by_sequence(buffer, new, at):
    """Each sequence has a position of its own."""
    at = at + 2 * torch.arange(new.shape[0])[:, None]
    return buffer.scatter(2, at[:, None, :, None].expand_as(new), new)


def copied(buffer, new, at):
    return buffer.index_copy(2, at, new)


def multiplied(buffer, new, at):
    hot = along(buffer, new, at)
    return buffer * (1 - hot) + new * hot


def mixed(buffer, new, at):
    hot = one_hot(buffer, new, at)
    return (1 - hot.sum(0))[:, None] * buffer + torch.einsum("bhsd,st->bhtd", new, hot)


def mixed_by_a_product(buffer, new, at):
    hot = one_hot(buffer, new, at).mT
    return buffer * (1 - hot.sum(1, keepdim=True)) + hot @ new


def chosen(buffer, new, at):
    return torch.where(torch.arange(buffer.shape[2])[:, None] == at, new, buffer)


def between(buffer, new, at):
    return torch.lerp(buffer, new.expand_as(buffer), along(buffer, new, at))


def moved_towards(buffer, new, at):
    return buffer + along(buffer, new, at) * (new - buffer)


def emptied_first(buffer, new, at):
    hot = along(buffer, new, at)
    return buffer.masked_fill(hot.bool(), 0.0) + hot * new


def a_part(buffer, new, at):
    hot, part = along(buffer, new, at)[1:], buffer[:, :, 1:]
    return buffer.slice_scatter(part * (1 - hot) + new * hot, 2, 1)


def faded(buffer, new, at):
    """No mask at all: older tokens fade, and what was there before stays in part."""
    weight = torch.linspace(0.2, 0.9, buffer.shape[2], dtype=new.dtype)[:, None]
    return buffer * 0.5 + new * weight


def added(buffer, new, at):
    """Positions that were written to before hold the sum."""
    return buffer + new * (torch.arange(buffer.shape[2])[:, None] <= at)


def of_each_sequence(buffer, new, at):
    hot = F.one_hot(at + torch.arange(new.shape[0])[:, None], buffer.shape[2]).to(new.dtype).view(B, 1, -1, 1)
    return buffer * (1 - hot) + new * hot


def index_added(buffer, new, at):
    """What a position holds and what is written there are both images of rows, and so is their sum."""
    return buffer.index_add(2, at, new)


def accumulated(buffer, new, at):
    return torch.ops.aten.index_put(buffer, [None, None, at], new, True)


def emptied_and_added(buffer, new, at):
    hot = one_hot(buffer, new, at).sum(0)
    return (buffer * (1 - hot[:, None])).index_add(2, at, new)


def fused(buffer, new, at):
    return torch.addcmul(buffer, along(buffer, new, at), new - buffer)


def a_number_beside_a_mask(buffer, new, at):
    hot = along(buffer, new, at)
    return buffer * (1 - hot) + new * 0.25 + -(new * hot) / 2


def around_the_end(buffer, new, at):
    """As a ring does, whose last positions are followed by its first."""
    end = buffer.shape[2]
    return buffer.slice_scatter(new[:, :, :2], 2, end - 2).slice_scatter(new[:, :, 2:], 2, 0, new.shape[2] - 2)


def the_last_of_them(buffer, new, at):
    """As a window does that is shorter than a prompt."""
    return buffer.slice_scatter(new[:, :, 1:], 2, 0, new.shape[2] - 1)


def one_by_one(buffer, new, at):
    for i in range(new.shape[2]):
        buffer = buffer.index_copy(2, at[i : i + 1], new[:, :, i : i + 1])
    return buffer


def joined(buffer, new, at):
    """A window that moves: the oldest tokens go."""
    return torch.cat([buffer[:, :, new.shape[2] :], new], 2)


def joined_and_cut(buffer, new, at):
    return torch.cat([buffer, new], 2)[:, :, -buffer.shape[2] :]


def rolled(buffer, new, at):
    return buffer.roll(-new.shape[2], 2).slice_scatter(new, 2, buffer.shape[2] - new.shape[2])


def moved_up(buffer, new, at):
    """The newest tokens come first, and the others move up."""
    count = new.shape[2]
    return buffer.slice_scatter(buffer[:, :, :-count].clone(), 2, count).slice_scatter(new, 2, 0, count)


def two_at_once(buffer, new, at):
    """The tokens, and the first of them once more."""
    return buffer.index_copy(2, torch.cat([at, at[:1] - 1]), torch.cat([new, new[:, :, :1]], 2))


class SideBySide(Static):
    """A pair of buffers for each of ``writes``, all of the same new K and V: one program shows each way to write."""

    def __init__(self, writes, in_place=False, style="plain"):
        super().__init__(in_place=in_place, style=style)
        self.writes = writes

    def put(self, write, buffer, new, at):
        return write(buffer, new, at)

    def forward(self, x, caches, at):
        q, new, results = self.queries(x), self.made(x, at), []
        for write, cache in zip(self.writes, caches, strict=True):
            made = tuple(self.put(write, *of, at) for of in zip(cache, new, strict=True))
            held = tuple(b.copy_(m) for b, m in zip(cache, made, strict=True)) if self.in_place else made
            y = self.attended(q, *held, at)
            results.append(y if self.in_place else (y, held))
        return results if self.in_place else tuple(map(list, zip(*results, strict=True)))


def side_by_side(module, count, **options):
    """The optimized program, its runner, and the rows it starts with."""
    x, at = tokens(2, count)
    caches = [buffers() for _ in module.writes]
    exported = torch.export.export(module.double().eval(), (x, caches, at), strict=False)
    # What is wrong would be taken back if it were verified, and the numbers are compared by each test.
    program = mla_compile.optimize(exported, cache="latent", forms="absorbed", verify=False, **options)
    return program, program.module(), program.example_inputs[0][1]


def sites_that_stay(module):
    """The attentions of a program whose caches and numbers stay exactly what they are."""
    with pytest.warns(mla_compile.MlaCompileWarning):
        program, run, _ = side_by_side(module, 1)
    assert "mla_cache" not in program.graph_module.meta
    x, at = tokens(1, 1)
    expected, got = (call(x, [buffers() for _ in module.writes], at) for call in (module, run))
    for write, y, held, y_got, held_got in zip(module.writes, *expected, *got, strict=True):
        pairs = zip((y, *held), (y_got, *held_got), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), write.__name__
    return program.graph_module.meta["mla_report"].sites


MASKS = [multiplied, chosen, between, moved_towards, emptied_first, fused]
FACTORS = [a_part, faded, added, of_each_sequence, a_number_beside_a_mask]
POSITIONS = [scattered, scattered_by_copies, scattered_by_sequence, one_by_one, two_at_once, around_the_end]
SUMS = [mixed, mixed_by_a_product, index_added, accumulated, emptied_and_added]
WINDOWS = [joined, joined_and_cut, rolled, moved_up, the_last_of_them]
WAYS = [(MASKS, 1), (FACTORS, 1), (POSITIONS, 3), (SUMS, 3), (WINDOWS, 3)]
"""Ways to write so many new tokens."""


@pytest.mark.parametrize("in_place", [False, *also("combination", True)])
@pytest.mark.parametrize(("writes", "count"), WAYS, ids=["masks", "factors", "positions", "sums", "windows"])
def test_buffers_become_rows_however_they_are_written_to(writes, count, in_place):
    _become_rows(SideBySide(writes, in_place), count, L + R)


@full("combination")
@pytest.mark.parametrize(("writes", "count"), WAYS, ids=["masks", "factors", "positions", "sums", "windows"])
def test_a_bias_goes_with_what_is_written(writes, count):
    _become_rows(SideBySide(writes, style="bias"), count, L + 1 + R)


def test_a_bias_is_where_something_was_written():
    """An attention that sees the whole buffer: zeros where nothing was written, and no bias."""
    module = SideBySide([copied, index_added, multiplied, joined], style="bias")
    module.hides = False
    _become_rows(module, 1, L + 1 + R)


def _become_rows(module, count, kept):
    program, run, theirs = side_by_side(module, count)
    ways, change = len(module.writes), program.graph_module.meta["mla_cache"]
    keys, values = ([t.kept for t in change.inputs][first::2] for first in (0, 1))
    assert keys[0] == kept
    assert {*keys} <= {kept, 0}  # 0: written to as another buffer is, whose rows it has
    assert values == [0] * ways
    assert [s.code for s in program.graph_module.meta["mla_report"].sites] == ["absorbed"] * ways
    mine = [buffers() for _ in module.writes]
    for start in (1, 1 + count, 2):  # the last call overwrites
        x, at = tokens(start, count)
        expected, got = module(x, mine, at), run(x, theirs, at)
        if not module.in_place:
            (expected, mine), (got, theirs) = expected, got
        for write, one, other in zip(module.writes, expected, got, strict=True):
            assert (other - one).abs().max() < EXACT, write.__name__
    rows, error = mla_compile.migrate_cache(program, pytree.tree_leaves(mine))
    assert error < 1e-13
    held = [pytree.tree_leaves(one) for one in (rows, theirs)]
    assert all((a - b).abs().max() < EXACT for a, b in zip(*held, strict=True))


class OfSequences(Static):
    """Buffers [B,T,H,...], in which each sequence has positions of its own."""

    def __init__(self, accumulate):
        super().__init__(in_place=False)
        self.accumulate = accumulate

    def put(self, buffer, new, at):
        sequences = torch.arange(new.shape[0])[:, None]
        return buffer.index_put((sequences, at + 2 * sequences), new.transpose(1, 2), accumulate=self.accumulate)

    def read(self, k, v):
        return k.transpose(1, 2), v.transpose(1, 2)


@pytest.mark.parametrize("accumulate", [False, *also("combination", True)])
def test_pairs_of_sequences_and_positions(accumulate):
    module = OfSequences(accumulate).double().eval()
    x, at = tokens(0, 1)
    mine = [buffer.transpose(1, 2).contiguous() for buffer in buffers()]
    exported = torch.export.export(module, (x, *mine, at), strict=False)
    program = mla_compile.optimize(exported, cache="latent", forms="absorbed")
    assert [t.kept for t in program.graph_module.meta["mla_cache"].inputs] == [L + R, 0]
    run, theirs = program.module(), program.example_inputs[0][1:3]
    for start in (0, 1, 1):
        x, at = tokens(start, 1)
        (expected, *mine), (got, *theirs) = module(x, *mine, at), run(x, *theirs, at)
        assert (got - expected).abs().max() < EXACT


def test_positions_that_are_named_twice_hold_the_last_token():
    module = Written(scattered)
    program = latent(module, count=3)
    mine, theirs = buffers(), program.example_inputs[0][1:3]
    x, at = tokens(0, 3)
    at = at.new_tensor([4, 2, 4])
    (expected, *mine), (got, *theirs) = module(x, *mine, at), program.module()(x, *theirs, at)
    assert (got - expected).abs().max() < EXACT


class ValuesFirst(Written):
    """The rows that both share are written before the first of them is made again."""

    def forward(self, x, k_buffer, v_buffer, at):
        k, v = self.made(x, at)
        v_buffer = self.put(v_buffer, v, at)
        k_buffer = self.put(k_buffer, k, at)
        return self.attended(self.queries(x), k_buffer, v_buffer, at), k_buffer, v_buffer


@pytest.mark.parametrize("write", [copied, *also("combination", multiplied)])
def test_values_may_be_written_before_the_keys(write):
    module = ValuesFirst(write)
    program = latent(module)
    assert [t.kept for t in program.graph_module.meta["mla_cache"].inputs] == [L + R, 0]
    steps_are_equal(module, program)


class Gated(Static):
    """Each key is an image of the latent and a row that no weight expands, times ``gain``."""

    def __init__(self, *gain):
        super().__init__(in_place=False)
        self.row, self.up = nn.Linear(D, N + R, bias=False), nn.Linear(L, H * (N + R), bias=False)
        self.gain = nn.Parameter(seeded(*gain).exp())

    def made(self, x, at):
        c = self.layer.norm(self.layer.down(x)[..., :L])
        k, v = (up(c).unflatten(2, (H, -1)).transpose(1, 2) for up in (self.up, self.layer.up))
        return torch.addcmul(k * self.gain, self.row(x)[:, None].sin(), self.gain), v[..., N:]


@pytest.mark.parametrize("gain", [(N + R,), (H, 1, 1)])
def test_a_row_times_a_factor_for_each_column_or_head(gain):
    module = Gated(*gain)
    program = latent(module)
    assert [t.kept for t in program.graph_module.meta["mla_cache"].inputs] == [L + N + R, 0]
    assert [s.code for s in program.graph_module.meta["mla_report"].sites] == ["absorbed"]
    mine, theirs = steps_are_equal(module, program)
    rows, error = mla_compile.migrate_cache(program, mine)
    assert error < 1e-13
    held = [pytree.tree_leaves(one) for one in (rows, theirs)]
    assert all((a - b).abs().max() < EXACT for a, b in zip(*held, strict=True))


def test_a_row_times_a_factor_for_each_sequence_stays():
    """The values alone are images of rows."""
    (site,) = latent(Gated(B, 1, 1, 1)).graph_module.meta["mla_report"].sites
    assert (site.parts, [part.code for part in site.kept]) == (("values",), ["expanded_cache"])


class Two(SideBySide):
    """Two tensors are written in one call: of x, and of another that ``second(made, x, at)`` makes."""

    def __init__(self, writes, second):
        super().__init__(writes)
        self.second = second

    def put(self, write, buffer, new, at):
        return write(buffer, *new, at)

    def made(self, x, at):
        return tuple(zip(super().made(x, at), self.second(super().made, x, at), strict=True))


def each_to_its_positions(buffer, first, second, at):
    return buffer.index_copy(2, at, first).index_copy(2, at - 1, second)


def each_by_its_mask(buffer, first, second, at):
    hot = along(buffer, first, at)
    before = hot.roll(-1, 0)
    return buffer * (1 - hot - before) + first * hot + second * before


def added_to_what_was_chosen(buffer, first, second, at):
    chosen = torch.where(torch.arange(buffer.shape[2])[:, None] == at, first, buffer)
    return chosen.index_add(2, at - 1, second)


def in_one_write(buffer, first, second, at):
    return buffer.index_copy(2, torch.cat([at, at - 1]), torch.cat([first, second], 2))


def of_other_tokens(made, x, at):
    return made(x.sin(), at - 1)


def values_of_others_yet(made, x, at):
    return made(x.sin(), at - 1)[0], made(x.cos(), at - 1)[1]


@pytest.mark.parametrize(
    ("writes", "second", "kept"),
    [
        ([each_to_its_positions, each_by_its_mask, added_to_what_was_chosen, in_one_write], of_other_tokens, 0),
        ([each_to_its_positions], values_of_others_yet, L),
    ],
)
def test_two_tensors_are_written_in_one_call(writes, second, kept):
    """``kept``: the width of the rows of the values, if these are not among those of the keys."""
    module = Two(writes, second)
    program, run, theirs = side_by_side(module, 1)
    assert [t.kept for t in program.graph_module.meta["mla_cache"].inputs] == [L + R, kept] * len(writes)
    assert [s.code for s in program.graph_module.meta["mla_report"].sites] == ["absorbed"] * len(writes)
    mine = [buffers() for _ in writes]
    for start in (1, 3, 2):
        x, at = tokens(start, 1)
        (expected, mine), (got, theirs) = module(x, mine, at), run(x, theirs, at)
        for write, one, other in zip(writes, expected, got, strict=True):
            assert (other - one).abs().max() < EXACT, write.__name__


def changed(write, change):
    """``write``, whose second tensor is changed first."""

    def put(buffer, first, second, at):
        return write(buffer, first, change(second), at)

    put.__name__ = f"{write.__name__}, {change.__name__}"
    return put


def rolled_by_a_head(new):
    return new.roll(1, 1)


def squashed_tokens(new):
    return new.tanh()


def of_half_the_size(new):
    return new * 0.5


def moved_away(new):
    return new + 1


def in_float32(new):
    return new.float()


def added_to_a_mixture(buffer, first, second, at):
    here = torch.arange(buffer.shape[2])[:, None] == at - 1
    return buffer + torch.where(here, second, first * along(buffer, first, at))


def test_two_tensors_of_which_one_is_made_otherwise_stay():
    writes = [changed(in_one_write, change) for change in (rolled_by_a_head, of_half_the_size)]
    for change in (rolled_by_a_head, squashed_tokens, of_half_the_size, moved_away):
        writes.append(changed(each_to_its_positions, change))
    writes.append(changed(added_to_a_mixture, in_float32))
    assert all(site.verdict == "refused" for site in sites_that_stay(Two(writes, of_other_tokens)))


def test_what_is_converted_on_the_way_stays():
    """Keys in float32, which ``where`` converts to the buffer's float64."""
    in_float32 = Written(lambda buffer, new, at: chosen(buffer, new.float(), at))
    assert stays(in_float32).code == "expanded_cache"


def per_head(buffer, new, at):
    hot = along(buffer, new, at) * torch.linspace(0.5, 1, H, dtype=new.dtype).view(H, 1, 1)
    return buffer * (1 - hot) + new * hot


def per_column(buffer, new, at):
    hot = along(buffer, new, at) * torch.linspace(0.5, 1, new.shape[3], dtype=new.dtype)
    return buffer * (1 - hot) + new * hot


def chosen_per_head(buffer, new, at):
    return torch.where(torch.arange(buffer.shape[2])[:, None] == (at + torch.arange(H)).view(H, 1, 1), new, buffer)


def squashed(buffer, new, at):
    hot = along(buffer, new, at)
    return buffer.tanh() * (1 - hot) + new * hot


def filled(buffer, new, at):
    return buffer.masked_fill(along(buffer, new, at).bool(), 1.0) + new * along(buffer, new, at)


def two_new(buffer, new, at):
    hot = along(buffer, new, at)
    return buffer * (1 - hot) + new * hot + new.tanh() * hot.roll(1, 0)


def added_per_head(buffer, new, at):
    head, row = torch.arange(H)[:, None], (at + torch.arange(H)[:, None]) % buffer.shape[2]
    return torch.ops.aten.index_put(buffer, [None, head, row], new, True)


def added_to_columns(buffer, new, at):
    return buffer.index_add(3, torch.arange(new.shape[3]).flip(0), new.expand_as(buffer))


def added_twice(buffer, new, at):
    return buffer.index_add(2, at, new, alpha=2)


def added_to_one_half(buffer, new, at):
    return buffer.index_add(1, torch.arange(H - 1), new[:, 1:].expand(-1, -1, buffer.shape[2], -1))


def scattered_per_head(buffer, new, at):
    at = at.view(1, 1, -1, 1) + torch.arange(H).view(H, 1, 1)
    return buffer.scatter(2, at.expand_as(new), new)


def scattered_per_column(buffer, new, at):
    at = (at.view(-1, 1) + torch.arange(new.shape[3])) % buffer.shape[2]
    return buffer.scatter(2, at.expand_as(new), new)


def scattered_sums(buffer, new, at):
    return buffer.scatter_add(2, at.view(-1, 1).expand_as(new), new)


def scattered_products(buffer, new, at):
    return buffer.scatter_reduce(2, at.view(-1, 1).expand_as(new), new, "prod")


def scattered_in_part(buffer, new, at):
    """Some columns only."""
    return buffer.scatter(2, at.view(-1, 1).expand_as(new[..., 1:]), new[..., 1:])


def assembled_of_columns(buffer, new, at):
    return buffer.slice_scatter(new[..., :2].expand(*buffer.shape[:3], 2), 3, 0, 2)


def divided(buffer, new, at):
    """By what is new."""
    return buffer + along(buffer, new, at) / (new.abs() + 1)


def heads_one_by_one(buffer, new, at):
    """Each with a position of its own."""
    for head in range(H):
        part = buffer[:, head : head + 1].index_copy(2, at + head, new[:, head : head + 1])
        buffer = buffer.slice_scatter(part, 1, head, head + 1)
    return buffer


def backwards(buffer, new, at):
    hot = along(buffer, new, at)
    return buffer * (1 - hot) + new * hot + new.flip(3) * hot.roll(1, 0)


def mixed_heads(buffer, new, at):
    mixing = torch.eye(H, dtype=new.dtype).roll(1, 0)
    return buffer * (1 - along(buffer, new, at)) + torch.einsum("hg,bgsd->bhsd", mixing, new) * along(buffer, new, at)


def joined_and_added(buffer, new, at):
    """What a window held is moved away: zeros with it were none."""
    return torch.cat([buffer[:, :, 1:] + 1, new], 2)


def rolled_heads(buffer, new, at):
    return buffer.roll(1, 1).index_copy(2, at, new)


def rolled_as_one(buffer, new, at):
    return buffer.roll(1).index_copy(2, at, new)


def joined_heads(buffer, new, at):
    return torch.cat([buffer[:, 1:], buffer[:, :1]], 1).index_copy(2, at, new)


def scattered_and_added(buffer, new, at):
    return torch.scatter(buffer, 2, at.view(-1, 1).expand_as(new), new, reduce="add")


KEPT = [per_head, per_column, chosen_per_head, two_new, scattered_per_head, scattered_per_column, scattered_in_part,
        mixed_heads, scattered_and_added, added_per_head, added_to_columns, added_twice, added_to_one_half,
        assembled_of_columns, heads_one_by_one, backwards, rolled_heads, joined_heads]  # fmt: skip
UNREAD = [squashed, filled, scattered_sums, scattered_products, joined_and_added]


OTHERS = {divided: "nonlinear", rolled_as_one: "token_mixing"}


CODES = {**dict.fromkeys(KEPT, "expanded_cache"), **dict.fromkeys(UNREAD, "unsupported_op"), **OTHERS}


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter")
def test_buffers_that_are_written_to_otherwise_stay():
    sites = sites_that_stay(SideBySide(list(CODES)))
    assert {w.__name__: s.code for w, s in zip(CODES, sites, strict=True)} == {w.__name__: CODES[w] for w in CODES}
    assert all(site.verdict == "refused" for site in sites)


def test_what_is_written_into_zeros_is_no_buffer():
    """The new tokens are left out: nothing is made of a latent."""

    def zeros_instead(buffer, new, at):
        return torch.where(torch.arange(buffer.shape[2])[:, None] == at, torch.zeros_like(buffer), buffer)

    with pytest.warns(mla_compile.MlaCompileWarning):
        program = latent(Written(zeros_instead))
    assert "mla_cache" not in program.graph_module.meta


def test_rows_in_float8_are_not_multiplied():
    """Packed rows can be moved to positions, and not added to others."""
    assert "mla_cache" in latent(Written(chosen), cache_dtype="fp8").graph_module.meta
    with pytest.warns(mla_compile.MlaCompileWarning):
        program, *_ = side_by_side(SideBySide([multiplied, index_added, accumulated]), 1, cache_dtype="fp8")
    assert "mla_cache" not in program.graph_module.meta
