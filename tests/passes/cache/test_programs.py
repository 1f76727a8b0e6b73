"""Programs whose inputs and outputs are K and V per head, rewritten to a signature of rows; caches converted for it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import mla_compile
from mla_compile.errors import InputError
from tests.support.latent_modules import B, D, H, L, N, OneLayer, R, V
from tests.support.programs import seeded
from tests.support.tiers import also

pytestmark = pytest.mark.thorough

EXACT = 1e-12


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def past(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return seeded(B, H, length, N + R, seed=20), seeded(B, H, length, V, seed=21)


def exported(model: OneLayer, queries: int = 1, *, grows: bool = True) -> torch.export.ExportedProgram:
    tokens = torch.export.Dim("T", min=1)
    shapes = (None, ({2: tokens}, {2: tokens})) if grows else None
    return torch.export.export(model, (seeded(B, queries, D), past(7)), dynamic_shapes=shapes, strict=False)


@functools.cache
def rows_program() -> torch.export.ExportedProgram:
    """The decode program of a ``OneLayer()``, of rows; for tests that leave it as it is."""
    return mla_compile.optimize(exported(OneLayer()), cache="latent")


def decode(model, program, mine, theirs, steps=4, queries=1):
    """Runs both for some steps, each with its own cache, through the same loop."""
    for step in range(steps):
        x = seeded(B, queries, D, seed=30 + step)
        expected, mine = model(x, mine)
        got, theirs = program(x, theirs)
        assert (got - expected).abs().max() < EXACT
    return mine, theirs


@pytest.mark.parametrize("queries", [1, *also("combination", 2)])
def test_past_and_present_become_rows(queries):
    model = OneLayer()
    program = rows_program()
    if queries > 1:
        program = mla_compile.optimize(exported(model, queries), cache="latent", forms="absorbed")
    report = program.graph_module.meta["mla_report"]
    assert [site.code for site in report.sites] == ["absorbed"]
    change = program.graph_module.meta["mla_cache"]
    assert [(t.values, t.kept) for t in change.inputs] == [(H * (N + R), L + R), (H * V, 0)]
    assert [(t.values, t.kept) for t in change.outputs] == [(H * (N + R), L + R), (H * V, 0)]
    _, filled = model(seeded(B, 9, D, seed=3))
    rows, error = mla_compile.migrate_cache(program, filled)
    assert error < 1e-13
    _, after = decode(model, program.module(), filled, rows, queries=queries)
    assert [tuple(r.shape) for r in pytree.tree_leaves(after)] == [
        (B, 9 + 4 * queries, L),
        (B, 9 + 4 * queries, R),
    ]


class Counting(OneLayer):
    """Multiplies by the number of tokens so far."""

    def forward(self, x, past):
        y, new = super().forward(x, past)
        return y * past[0].shape[2], new


def test_lengths_are_those_of_the_rows():
    model = Counting()
    program = mla_compile.optimize(exported(model), cache="latent")
    shapes = [n.meta["val"].shape for n in program.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    keys = [one for one in shapes if len(one) == 4 and (one[1], one[3]) == (H, N + R)]
    assert all(isinstance(one[2], int) for one in keys), "K is made of all tokens, if only for their number"
    _, filled = OneLayer()(seeded(B, 9, D, seed=3))
    decode(model, program.module(), filled, mla_compile.migrate_cache(program, filled)[0])


def test_the_signature_stays_unless_it_is_asked_for():
    model = OneLayer()
    with pytest.warns(mla_compile.MlaCompileWarning, match="expanded_cache"):
        program = mla_compile.optimize(exported(model, grows=False))
    assert "mla_cache" not in program.graph_module.meta
    decode(model, program.module(), past(7), past(7), steps=1)


def test_the_new_signature_is_a_whole_program(tmp_path):
    """Saved, loaded, exported again, checked by torch's own verifier; sizes that do not fit are still refused."""
    model, program = OneLayer(), rows_program()
    program.validate()
    torch.export.save(program, tmp_path / "p.pt2")
    loaded = torch.export.load(tmp_path / "p.pt2")
    rows, _ = mla_compile.migrate_cache(program, model(seeded(B, 5, D))[1])
    assert torch.equal(loaded.module()(seeded(B, 1, D), rows)[0], program.module()(seeded(B, 1, D), rows)[0])
    wrong = (tuple(r[:1] for r in rows[0]), rows[1])
    with pytest.raises((AssertionError, RuntimeError)):
        program.module()(seeded(B, 1, D), wrong)


def test_a_prompt_program_fills_the_cache_of_a_decode_program():
    model = OneLayer()
    prompt = torch.export.export(model, (seeded(B, 6, D),), strict=False)
    first = mla_compile.optimize(prompt, cache="latent", forms="absorbed")
    program = rows_program()
    made, taken = first.graph_module.meta["mla_cache"], program.graph_module.meta["mla_cache"]
    taken.check_filled_by(made)
    x = seeded(B, 6, D, seed=5)
    (expected, mine), (got, theirs) = model(x), first.module()(x)
    assert (got - expected).abs().max() < EXACT
    decode(model, program.module(), mine, theirs)

    other = OneLayer()
    other.layer.up.weight.data.mul_(2)
    prompt = torch.export.export(other, (seeded(B, 6, D),), strict=False)
    foreign = mla_compile.optimize(prompt, cache="latent", forms="absorbed").graph_module.meta["mla_cache"]
    with pytest.raises(InputError, match="other weights"):
        taken.check_filled_by(foreign)
    with pytest.raises(InputError, match="returns 0"):
        taken.check_filled_by(type(taken)((), (), ()))


def test_a_graph_module():
    model = OneLayer()

    def call(x, k, v):
        y, (new_k, new_v) = model(x, (k, v))
        return y, new_k, new_v

    example = seeded(B, 1, D), *past(7)
    gm = make_fx(call)(*example)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    fast = mla_compile.optimize(gm, example, cache="latent")
    _, filled = model(seeded(B, 7, D, seed=3))
    rows = mla_compile.migrate_cache(fast, filled).inputs
    x = seeded(B, 1, D, seed=4)
    expected, _ = model(x, filled)
    y, new_k, new_v = fast(x, *rows[0], *rows[1])
    assert (y - expected).abs().max() < EXACT
    assert [tuple(r.shape) for r in new_k] == [(B, 8, L), (B, 8, R)]
    assert new_v == ()


def test_other_readers_of_the_past_get_it_expanded():
    class Reads(OneLayer):
        def forward(self, x, past):
            y, present = super().forward(x, past)
            return y + past[1].mean(), present

    model = Reads()
    program = mla_compile.optimize(exported(model, grows=False), cache="latent")
    _, filled = OneLayer.forward(model, seeded(B, 7, D, seed=3))
    decode(model, program.module(), filled, mla_compile.migrate_cache(program, filled).inputs, steps=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *also("family", torch.float32)])
def test_migration_tells_its_error(dtype):
    model = OneLayer().to(dtype)
    example = tuple(t.to(dtype) for t in past(9))
    program = torch.export.export(model, (seeded(B, 1, D).to(dtype), example), strict=False)
    program = mla_compile.optimize(program, cache="latent")
    _, filled = model(seeded(B, 9, D, seed=3).to(dtype))
    rows, error = mla_compile.migrate_cache(program, filled)
    assert 0 < error < 8 * torch.finfo(dtype).eps
    assert all(r.dtype == dtype for r in pytree.tree_leaves(rows))
    with pytest.raises(InputError, match=r"allowed 1\.0e-12"):
        mla_compile.migrate_cache(program, filled, tolerance=1e-12)


def test_migration_refuses_what_the_weights_did_not_make():
    program = rows_program()
    with pytest.raises(InputError, match="not made by the weights"):
        mla_compile.migrate_cache(program, past(7))
    with pytest.raises(InputError, match=r"expected \[\*, 3, \*, 6\]"):
        mla_compile.migrate_cache(program, past(7)[::-1])
    with pytest.raises(InputError, match="got 1 tensors"):
        mla_compile.migrate_cache(program, past(7)[:1])
    with pytest.raises(InputError, match='optimize the program with cache="latent"'):
        mla_compile.migrate_cache(OneLayer(), past(7))


# Near misses: nothing may change.


class Shifted(OneLayer):
    """The cached keys are not what the next call takes them for."""

    def forward(self, x, past):
        y, (k, v) = super().forward(x, past)
        return y, (k * 2, v)


class Rotated(OneLayer):
    def __init__(self):
        super().__init__()
        self.layer.style = "rope_on_keys"


class TokenMix(OneLayer):
    def forward(self, x, past):
        return super().forward(x, (past[0].flip(2), past[1]))


@pytest.mark.filterwarnings("ignore:nothing was absorbed")
@pytest.mark.parametrize("kind", [Shifted, Rotated, TokenMix])
def test_near_misses_keep_their_keys(kind):
    model = kind()
    program = mla_compile.optimize(exported(model, queries=2, grows=False), cache="latent")
    change = program.graph_module.meta.get("mla_cache")
    assert change is None or all(t.values != H * (N + R) for t in change.inputs)


class Growing(torch.nn.Module):
    """K and V [B,H,T,N] grow by what ``keys`` and ``values`` join, of rows c, d and e [B,1,L]."""

    def __init__(self, keys, values):
        super().__init__()
        self.keys, self.values = keys, values
        self.w_k, self.w_v = (torch.nn.Parameter(seeded(H, L, 2 * N, seed=n)) for n in (1, 2))

    def forward(self, q, rows, past_k, past_v):
        k, v = ([torch.einsum("bsl,hln->bhsn", r, w) for r in rows] for w in (self.w_k, self.w_v))
        k, v = self.keys(past_k, k), self.values(past_v, v)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v), k, v


@pytest.mark.parametrize(
    "values",
    [
        lambda past, new: torch.cat([past, new[0], new[2]], 2),
        *also("combination", lambda past, new: torch.cat([*new[:2], past], 2)),
    ],
    ids=["other rows", "another order"],
)
def test_values_that_grow_otherwise_than_the_keys_have_rows_of_their_own(values):
    model = Growing(lambda past, new: torch.cat([past, *new[:2]], 2), values).eval()
    past = tuple(torch.zeros(B, H, 3, 2 * N, dtype=torch.float64) for _ in "kv")
    tokens = torch.export.Dim("T", min=1)
    given = seeded(B, H, 1, 2 * N), [seeded(B, 1, L, seed=n) for n in range(3)]
    shapes = (None, [None] * 3, {2: tokens}, {2: tokens})
    exported = torch.export.export(model, (*given, *past), dynamic_shapes=shapes, strict=False)
    program = mla_compile.optimize(exported, cache="latent", forms="absorbed")
    assert [t.kept for t in program.graph_module.meta["mla_cache"].inputs] == [L, L]
    run, (rows, _) = program.module(), mla_compile.migrate_cache(program, past)
    for step in range(3):
        given = seeded(B, H, 1, 2 * N, seed=step), [seeded(B, 1, L, seed=10 * step + n) for n in range(3)]
        (expected, *past), (got, *rows) = model(*given, *past), run(*given, *rows)
        assert (got - expected).abs().max() < EXACT


class TwoBranches(torch.nn.Module):
    """An up-projection, and beside it one of rows that are a nonlinear function of the latent."""

    def __init__(self, up):
        super().__init__()
        self.up = up
        self.down, self.more = (
            torch.nn.Parameter(seeded(2, L, seed=5)),
            torch.nn.Parameter(seeded(*up.weight.shape[:1], 2)),
        )

    def forward(self, c):
        return self.up(c) + torch.tanh(c @ self.down.mT) @ self.more.mT


def test_caches_of_sums_become_each_of_their_rows_and_are_converted():
    model = OneLayer()
    model.layer.up = TwoBranches(model.layer.up)
    program = mla_compile.optimize(exported(model, grows=False), cache="latent", forms="absorbed")
    assert [site.code for site in program.graph_module.meta["mla_report"].sites] == ["absorbed"]
    assert sum(t.kept for t in program.graph_module.meta["mla_cache"].inputs) == L + R + 2
    _, filled = model(seeded(B, 7, D, seed=3))
    rows, error = mla_compile.migrate_cache(program, filled)
    assert error < 1e-12
    decode(model, program.module(), filled, rows, steps=1)
