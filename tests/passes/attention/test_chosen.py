"""Masks that show each query the keys of a list: the operator gets the list, or the mask stays and the numbers too."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mla_compile
from mla_compile.codes import Code
from tests.support.programs import OP, codes, error, optimized, seeded, trace
from tests.support.tiers import also
from tests.support.usual import usual

pytestmark = pytest.mark.thorough

B, H, T, L, N, V, K = 3, 4, 9, 8, 6, 5, 3
INF = float("-inf")
NAMES = ("query", "latent", "rope", "values", "mask", "seq_lens", "sinks", "kv_scale", "indices")


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def told(make, S, *given, attend=sdpa, other=(), expect=Code.ABSORBED, said="", exact=1e-10, plain=False, **options):
    """The tensors that the operator is given besides rows, and its numbers; ``make(S, *given)`` makes the mask.

    ``other``: further values of ``given`` for which the rewritten attention has to be what the original is.
    ``said``: what the report says of the mask. ``plain``: its numbers in plain ATen, too, and by the check of the
    pipeline, which compares them as is done here.
    """

    def fn(q, c, *rest):
        *given, w_k, w_v = rest
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        return attend(q, k, v, make(S, *given))

    q, c = seeded(B, H, S, N), seeded(B, T, L)
    weights = [seeded(H * N, L, seed=3), seeded(H * V, L, seed=4)]
    program = trace(fn, [q, c, *given], weights)
    options = {"forms": "absorbed", "verify": plain, "strict": True} | options
    outcome = optimized(program, lowering="op", **options)
    assert codes(outcome) == [expect]
    assert said in " ".join(outcome.report.sites[0].notes)
    outcomes = [outcome, *([optimized(program, **options | {"lowering": "aten"})] if plain else [])]
    for values in (given, *other):
        want = fn(q, c, *values, *weights)
        for one in outcomes:
            (result,) = one.program.gm(q, c, *values, *weights)
            assert torch.equal(result.isnan(), want.isnan())
            assert error(result.nan_to_num(), want.nan_to_num()) < exact
    (node,) = (n for n in outcome.program.gm.graph.nodes if str(n.target) == OP)
    arguments = {**dict(zip(NAMES, node.args, strict=False)), **node.kwargs}
    found = {k: tuple(arguments[k].meta["val"].shape) for k in NAMES[4:] if arguments.get(k) is not None}
    targets = {str(n.target) for n in outcome.program.gm.graph.nodes}
    return found | {"causal": arguments["causal"]}, targets


def ranks(S: int, seed: int = 7, heads: int = 0) -> Tensor:
    return seeded(B, *([heads] if heads else []), S, T, seed=seed)


def best(scores: Tensor, k: int = K) -> Tensor:
    return scores.topk(k, dim=-1).indices


def causal(S: int) -> Tensor:
    return torch.arange(T) <= torch.arange(T - S, T)[:, None]


def hides(index: Tensor, S: int) -> Tensor:
    return torch.ones(B, S, T, dtype=torch.bool).scatter(-1, index, False).unsqueeze(1)


def shows(index: Tensor, S: int) -> Tensor:
    return torch.zeros(B, S, T, dtype=torch.bool).scatter(-1, index, True)[:, None]


MASKS = {
    "scattered False, negated": lambda S, x: ~hides(best(x), S),
    "scattered True": lambda S, x: shows(best(x), S),
    "through int32": lambda S, x: ~hides(best(x).to(torch.int32).long(), S),
    "of a sort": lambda S, x: shows(x.sort(dim=-1, descending=True).indices[..., :K], S),
    "of a stable sort": lambda S, x: shows(x.sort(dim=-1, descending=True, stable=True)[1][..., :K], S),
    "of an argsort": lambda S, x: shows(x.argsort(dim=-1)[..., :K], S),
    "the worst": lambda S, x: shows(x.topk(K, largest=False).indices, S),
    "along another axis first": lambda S, x: shows(best(x.mT.contiguous().mT), S),
    "transposed": lambda S, x: shows(x.mT.topk(K, dim=1).indices.mT, S),
    "by a tensor": lambda S, x: (
        torch.zeros(B, S, T, dtype=torch.bool).scatter(-1, best(x), torch.ones(B, S, K, dtype=torch.bool))[:, None]
    ),
    "counted": lambda S, x: torch.zeros(B, S, T).scatter_add(-1, best(x), torch.ones(B, S, K))[:, None] > 0,
    "counted, and not 0": lambda S, x: (
        torch.zeros(B, S, T, dtype=torch.int32)
        .scatter_add(-1, best(x), torch.ones(B, S, K, dtype=torch.int32)).ne(0)[:, None]
    ),
    "minus infinity": lambda S, x: torch.full((B, S, T), INF).scatter(-1, best(x), 0.0)[:, None],
    "filled": lambda S, x: torch.zeros(B, 1, S, T).masked_fill(hides(best(x), S), INF),
    "where": lambda S, x: torch.where(shows(best(x), S), 0.0, INF),
}  # fmt: skip


USUAL_MASKS = ("scattered False, negated", "of a sort", "of an argsort", "transposed", "counted", "minus infinity")


@pytest.mark.singly
@pytest.mark.parametrize("S", [2, 1])
@pytest.mark.parametrize("name", usual(MASKS, USUAL_MASKS))
def test_the_operator_is_told_the_list(name, S):
    found, targets = told(MASKS[name], S, ranks(S), other=[[ranks(S, seed=8)]], plain=name in ("of a sort", "counted"))
    assert found == {"indices": (B, S, K), "causal": False}
    assert not any("scatter" in t for t in targets)  # the mask over all keys is not made any more
    assert "aten.sort.default" not in targets or "sort" in name  # nor are distinct indices compared


SIDE = 3


def blocks(x: Tensor) -> Tensor:
    """The best of the three blocks that nine keys are in: two for one query, one for each of two."""
    return x.unflatten(-1, (-1, SIDE)).amax(-1).topk(3 - x.shape[1], -1).indices


def of_blocks(S: int, x: Tensor, value: float = True, rest: float = False, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.full((B, 1, S, T // SIDE), rest, dtype=dtype).scatter(-1, blocks(x)[:, None], value)


IN_BLOCKS = {
    "repeated": lambda S, x: of_blocks(S, x).repeat_interleave(SIDE, -1),
    "expanded": lambda S, x: of_blocks(S, x)[..., None].expand(-1, -1, -1, -1, SIDE).reshape(B, 1, S, T),
    "flattened": lambda S, x: of_blocks(S, x).unsqueeze(-1).repeat(1, 1, 1, 1, SIDE).flatten(-2),
    "looked up": lambda S, x: of_blocks(S, x)[..., torch.arange(T) // SIDE],
    "gathered": lambda S, x: of_blocks(S, x).gather(-1, (torch.arange(T) // SIDE).expand(B, 1, S, T)),
    "taken along": lambda S, x: of_blocks(S, x).take_along_dim((torch.arange(T) // SIDE).view(1, 1, 1, T), -1),
    "selected": lambda S, x: of_blocks(S, x).index_select(
        3, torch.div(torch.arange(T), SIDE, rounding_mode="floor")
    ),
    "minus infinity": lambda S, x: of_blocks(S, x, 0.0, INF, torch.float32).repeat_interleave(SIDE, -1),
    "compared": lambda S, x: (blocks(x)[:, None, :, None] == (torch.arange(T) // SIDE)[:, None]).any(-1),
    "one hot": lambda S, x: F.one_hot(blocks(x), T // SIDE).sum(-2)[:, None].bool().repeat_interleave(SIDE, -1),
    "blocks of blocks": lambda S, x: (
        torch.zeros(B, 1, S, 3, dtype=torch.bool).scatter(-1, x[..., :3].topk(1).indices[:, None], True)
        .repeat_interleave(2, -1).repeat_interleave(2, -1)[..., :T]
    ),
}  # fmt: skip


@pytest.mark.singly
@pytest.mark.parametrize("S", [1, 2])
@pytest.mark.parametrize("name", usual(IN_BLOCKS, ("repeated", "gathered", "compared", "blocks of blocks")))
def test_blocks_of_keys(name, S):
    found, targets = told(IN_BLOCKS[name], S, ranks(S), other=[[ranks(S, seed=8)]], plain=name == "repeated")
    assert found["indices"] == (B, S, 4 if name == "blocks of blocks" else (3 - S) * SIDE)
    assert not any("scatter" in t or "repeat" in t for t in targets)


CUT = {
    "rows of other queries": (
        lambda S, x: torch.zeros(B, 4, T, dtype=torch.bool).scatter(-1, best(x), True)[:, :S][:, None],
        seeded(B, 4, T, seed=7),
    ),
    "other sequences": (
        lambda S, x: torch.zeros(B + 2, S, T, dtype=torch.bool).scatter(-1, best(x), True)[:B][:, None],
        seeded(B + 2, 1, T, seed=7),
    ),
    "entries, compared": (
        lambda S, x: (best(x, 5)[:, None, :, None, :] == torch.arange(T)[:, None])[..., :2].any(-1), ranks(1),
    ),
    "entries, one hot": (lambda S, x: F.one_hot(best(x, 5), T)[..., :2, :].sum(-2)[:, None] > 0, ranks(1)),
}  # fmt: skip


@pytest.mark.parametrize("plain", [False, *also("combination", True)])
@pytest.mark.parametrize("name", CUT)
def test_a_list_of_which_the_beginning_is_read(name, plain):
    make, given = CUT[name]
    found, _ = told(make, 1, given, plain=plain)
    assert "mask" in found
    assert "indices" not in found


def test_a_list_over_more_keys_than_there_are():
    """An entry may name a key that is cut off, which is none."""
    make = lambda S, x: torch.zeros(B, S, T + 4, dtype=torch.bool).scatter(-1, best(x), True)[..., :T][:, None]  # noqa: E731
    found, _ = told(make, 1, seeded(B, 1, T + 4, seed=7), other=[[seeded(B, 1, T + 4, seed=8)]])
    assert found == {"indices": (B, 1, K), "causal": False}


def test_a_last_block_that_is_not_full():
    """It names keys that there are not; beside a diagonal."""
    make = lambda S, x: (  # noqa: E731
        torch.zeros(B, 1, S, 3, dtype=torch.bool).scatter(-1, x[:, None, :, :3].topk(1).indices, True)
        .repeat_interleave(4, -1)[..., :T] & causal(S)
    )  # fmt: skip
    found, _ = told(make, 2, ranks(2), other=[[ranks(2, seed=k)] for k in range(8, 12)])
    assert found == {"indices": (B, 2, 4), "causal": True}


def test_blocks_that_come_in_may_be_any_number():
    """Compared with the keys' blocks, an index that is none of them shows no key, however large it is."""
    some = torch.tensor([[[3, -1, 1]], [[2, 2, 2]], [[0, 2**31, 2**62]]])
    make = lambda S, i: (i[:, None, :, None] == (torch.arange(T) // SIDE)[:, None]).any(-1)  # noqa: E731
    other = [torch.full((B, 1, K), -1), torch.zeros(B, 1, K, dtype=torch.int64), torch.tensor([[[0, 2**40, -7]]] * B)]
    found, _ = told(make, 1, some, sparse="auto", other=[[one] for one in other])
    assert found == {"indices": (B, 1, K * SIDE), "causal": False}


NO_BLOCKS = {
    "the other way about": lambda S, x: of_blocks(S, x).repeat(1, 1, 1, SIDE),
    "moved by one": lambda S, x: of_blocks(S, x)[..., (torch.arange(T) + 1).clamp(max=T - 1) // SIDE],
    "from the end": lambda S, x: of_blocks(S, x)[..., (torch.arange(T) - T) // SIDE],
    "remainders": lambda S, x: of_blocks(S, x)[..., torch.arange(T) % SIDE],
    "a slice from the second key": lambda S, x: of_blocks(S, x).repeat_interleave(SIDE + 1, -1)[..., 1 : T + 1],
    "of every second key": lambda S, x: of_blocks(S, x).repeat_interleave(2 * SIDE, -1)[..., ::2],
    "all are equal": lambda S, x: (blocks(x)[:, None, :, None] == (torch.arange(T) // SIDE)[:, None]).all(-1),
    "none is equal": lambda S, x: ~(blocks(x)[:, None, :, None] == (torch.arange(T) // SIDE)[:, None]).any(-1),
    "more than once": lambda S, x: F.one_hot(blocks(x) // 2, 3).sum(-2)[:, None].gt(1).repeat_interleave(SIDE, -1),
}  # fmt: skip


@pytest.mark.parametrize("plain", [False, *also("combination", True)])
@pytest.mark.parametrize("name", usual(NO_BLOCKS, rare=("remainders", "all are equal", "a slice from the second key")))
def test_what_is_no_block(name, plain):
    """Some of these are lists written in yet another way; what is not read as one stays a mask, and the numbers too."""
    found, _ = told(NO_BLOCKS[name], 1, ranks(1), other=[[ranks(1, seed=8)]], plain=plain)
    assert "mask" in found
    assert "indices" not in found


@pytest.mark.parametrize("S", [1, 2])
def test_other_masks_stay_beside_it(S):
    padding = torch.rand(B, 1, 1, T, generator=torch.Generator().manual_seed(0)) < 0.7
    one = ranks(S)
    found, _ = told(lambda S, x, p: ~hides(best(x), S) & causal(S) & p, S, one, padding)
    assert found == {"indices": (B, S, K), "causal": S > 1, "mask": (B, 1, 1, T)}
    found, _ = told(lambda S, x, bias: bias.masked_fill(hides(best(x), S), INF), S, one, seeded(B, H, S, T, seed=9))
    assert found == {"indices": (B, S, K), "causal": False, "mask": (B, H, S, T)}  # a bias is added to what is listed
    found, _ = told(lambda S, x, y: shows(best(x), S) & shows(best(y), S), S, one, ranks(S, seed=5))
    assert found["indices"] == (B, S, K)
    assert found["mask"] == (B, 1, S, T)  # of two lists one stays a mask


def test_indices_that_come_in_may_name_a_key_twice():
    S = 2
    twice = torch.tensor([[[3, 3, 1], [0, 8, 8]], [[2, 2, 2], [7, 6, 5]], [[0, 1, 2], [4, 4, 0]]])
    found, targets = told(
        lambda S, i: ~hides(i, S), S, twice, other=[[torch.zeros(B, S, K, dtype=torch.int64)]], plain=True
    )
    assert found == {"indices": (B, S, K), "causal": False}
    assert "aten.sort.default" in targets


@pytest.mark.parametrize("lowering", ["op", *also("combination", "aten")])
def test_keys_that_are_named_twice_are_dropped_for_sizes_that_were_not_traced(lowering):
    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(L, H * (N + V), bias=False).double()

        def forward(self, q: Tensor, c: Tensor, scores: Tensor) -> Tensor:
            k, v = self.up(c).unflatten(-1, (H, -1)).transpose(1, 2).split([N, V], -1)
            index = scores.topk(min(K, c.shape[1]), dim=-1).indices // 2
            return sdpa(q, k, v, torch.zeros_like(scores, dtype=torch.bool).scatter(-1, index, True)[:, None])

    step = Step().eval().requires_grad_(False)
    batch, queries, keys = torch.export.Dim("batch"), torch.export.Dim("queries"), torch.export.Dim("keys", min=K + 1)
    shapes = ({2: queries}, {1: keys}, {1: queries, 2: keys})
    if lowering == "aten":
        shapes = tuple({0: batch, **sizes} for sizes in shapes)
    given = seeded(B, H, 2, N), seeded(B, T, L), ranks(2)
    program = torch.export.export(step, given, dynamic_shapes=shapes, strict=False)
    fast = mla_compile.optimize(program, forms="absorbed", lowering=lowering).module()
    for batch, queries, keys in ((B, 2, T), (5 if lowering == "aten" else B, 4, 13)):
        given = seeded(batch, H, queries, N), seeded(batch, keys, L), seeded(batch, queries, keys, seed=7)
        assert error(fast(*given), step(*given)) < 1e-10


def test_an_entry_counts_where_its_flag_is_set():
    """-1 for no key, as in glm5_next: cut to a key, and counted as none."""
    S = 2
    index = torch.tensor([[[3, -1, 1], [0, 8, -1]], [[2, -1, -1], [7, 6, 5]], [[0, 1, 2], [4, 4, 0]]])

    def mask(S, i):
        valid = i.ge(0) & i.lt(T)
        counts = torch.zeros(B, S, T, dtype=torch.int32).scatter_add(-1, i.clamp(0, T - 1), valid.to(torch.int32))
        return counts.ne(0).unsqueeze(1)

    found, _ = told(mask, S, index, other=[[torch.full((B, S, K), -1)]], plain=True)
    assert found == {"indices": (B, S, K), "causal": False}


def test_a_list_for_all_of_a_batch():
    found, _ = told(lambda S, x: torch.zeros(S, T, dtype=torch.bool).scatter(-1, best(x), True), 2, ranks(2)[0])
    assert found["indices"] == (B, 2, K)


@pytest.mark.parametrize("attend", [sdpa, eager], ids=["sdpa", "eager"])
def test_a_row_whose_chosen_keys_are_hidden(attend):
    """Zero in the fused attention, NaN in a plain softmax, in both forms."""
    padding = torch.ones(B, 1, 1, T, dtype=torch.bool)
    padding[0] = False

    def mask(S, x, p):
        return torch.zeros(B, 1, S, T).masked_fill(hides(best(x), S), INF).masked_fill(~p, INF)

    found, _ = told(mask, 1, ranks(1), padding, attend=attend, plain=True)
    assert found == {"indices": (B, 1, K), "causal": False, "mask": (B, 1, 1, T)}


LOW = torch.finfo(torch.float32).min


def low(S: int, x: Tensor, *, same: bool = True, fill: float = LOW) -> Tensor:
    """As transformers has it for eager attention: the same mask hides scores and keys, with a finite number."""
    mask = torch.where(causal(S), 0.0, LOW).expand(B, 1, S, T)
    index = best(x + mask[:, 0] if same else x)
    return mask.masked_fill(hides(index, S), fill)


def test_a_finite_number_where_the_best_of_the_visible_keys_are_chosen():
    found, _ = told(low, 2, ranks(2), attend=eager)
    assert found == {"indices": (B, 2, K), "causal": True}
    found, _ = told(low, 3, ranks(3), attend=eager)  # as many rows as there are: not worth it
    assert found == {"mask": (B, 1, 3, T), "causal": False}


def test_a_number_that_a_smaller_dtype_makes_infinite():
    """float64's lowest becomes minus infinity where eager attention takes its softmax in float32."""

    def in_float32(q, k, v, mask):
        return (q @ k.mT * 0.3 + mask).softmax(-1, dtype=torch.float32).double() @ v

    def make(S, x, p):
        zeros = torch.zeros(B, 1, S, T, dtype=torch.float64)
        return zeros.masked_fill(~(p & shows(best(x), S)), torch.finfo(torch.float64).min)

    found, targets = told(make, 1, ranks(1), PADDING, attend=in_float32, other=[[ranks(1), NOTHING]], exact=1e-6)
    assert found == {"indices": (B, 1, K), "causal": False, "mask": (B, 1, 1, T)}
    assert "mla_compile.weigh_alike.default" not in targets


PADDING = torch.ones(B, 1, 1, T, dtype=torch.bool)
NOTHING = PADDING.clone()
NOTHING[1] = False  # one batch entry sees no key at all
NOTHING[2, ..., ::2] = False
ALIKE = {
    "hidden keys may be chosen": (lambda S, x, p: low(S, x, same=False), True),
    "scores are minus infinity": (lambda S, x, p: low(S, torch.where(x > 0, x, INF)), True),
    "padding hides": (
        lambda S, x, p: torch.where(p, 0.0, LOW).expand(B, 1, S, T).masked_fill(hides(best(x), S), LOW), False
    ),
    "padding and a diagonal": (
        lambda S, x, p: torch.where(p & causal(S), 0.0, LOW).masked_fill(hides(best(x), S), LOW), False
    ),
    "flags": (lambda S, x, p: torch.where(
        torch.zeros(B, S, T).scatter_add(-1, best(x), (best(x) < 2).float()).ne(0)[:, None], 0.0, LOW
    ), True),
}  # fmt: skip


@pytest.mark.singly
@pytest.mark.parametrize("attend", [sdpa, eager], ids=["sdpa", "eager"])
@pytest.mark.parametrize("S", [1, 2])
@pytest.mark.parametrize("name", usual(ALIKE, ("hidden keys may be chosen", "padding and a diagonal", "flags")))
def test_a_finite_number_in_rows_that_see_no_key(name, S, attend):
    """They weigh all keys alike, those too that the list does not name."""
    make, unmasked = ALIKE[name]
    found, targets = told(make, S, ranks(S), PADDING, attend=attend, other=[[ranks(S, seed=8), NOTHING]], plain=True)
    assert found["indices"] == (B, S, K)
    assert "mask" not in found or not unmasked
    assert "mla_compile.weigh_alike.default" in targets


def outside(S: int, seed: int = 5) -> list[Tensor]:
    """Masks as they come in: nothing hidden; whole rows hidden, by other numbers too; any numbers, from low to high."""
    any_of = torch.tensor([0.0, LOW, LOW, LOW / 2, -1e30, INF, -5.0, 3.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    some = any_of[torch.randint(len(any_of), (B, 1, S, T), generator=generator)]
    lowest = any_of[1:6][torch.randint(5, (B, 1, S, T), generator=generator)]
    rows = torch.tensor([LOW, INF, LOW / 2], dtype=torch.float64).view(B, 1, 1, 1).expand(B, 1, S, T).clone()
    return [torch.zeros_like(some), some, lowest, rows]


OUTSIDE = {
    "filled": lambda S, x, n: n.masked_fill(hides(best(x), S), LOW),
    "where": lambda S, x, n: torch.where(shows(best(x), S), n, LOW),
    "filled with another number": lambda S, x, n: n.masked_fill(hides(best(x), S), -1e35),
    "flags": lambda S, x, n: torch.where(
        torch.zeros(B, S, T).scatter_add(-1, best(x), (best(x) < 2).float()).ne(0)[:, None], n, LOW
    ),
    "of each head": lambda S, x, n: (n + torch.arange(H).view(H, 1, 1) * LOW / 8).masked_fill(hides(best(x), S), LOW),
}  # fmt: skip


@pytest.mark.singly
@pytest.mark.parametrize("attend", [sdpa, eager], ids=["sdpa", "eager"])
@pytest.mark.parametrize("S", [1, 2])
@pytest.mark.parametrize("name", usual(OUTSIDE, ("filled", "flags", "of each head")))
def test_a_mask_that_comes_in_as_numbers_is_read_at_the_listed_keys(name, S, attend):
    """A static cache's: 0 and the lowest number in transformers, but nothing says so. Where all are low they decide."""
    first, *others = outside(S)
    other = [[ranks(S, seed=k), n] for k, n in enumerate((*others, *outside(S, seed=6)))]
    found, targets = told(OUTSIDE[name], S, ranks(S), first, attend=attend, other=other, plain=name != "filled")
    assert {"indices", "mask"} <= found.keys()
    assert "mla_compile.weigh_alike.default" in targets


def test_a_mask_that_comes_in_beside_minus_infinity_needs_no_more():
    for attend in (sdpa, eager):
        other = [[ranks(1, seed=k), n] for k, n in enumerate(outside(1))]
        found, targets = told(lambda S, x, n: n.masked_fill(hides(best(x), S), INF), 1, ranks(1), outside(1)[0],
                              attend=attend, other=other)  # fmt: skip
        assert {"indices", "mask"} <= found.keys()
        assert "mla_compile.weigh_alike.default" not in targets


@pytest.mark.parametrize("name", ["a diagonal", "two lists", "scores", "two masks", "a number that shows"])
def test_a_mask_that_comes_in_stays_where_more_is_hidden(name):
    """Here the number of a key that is not listed, or not seen, would have to be known."""
    make = {
        "a diagonal": lambda S, x, n: n.masked_fill(hides(best(x), S) | ~causal(S), LOW),
        "two lists": lambda S, x, n: n.masked_fill(hides(best(x), S) | hides(best(-x), S), LOW),
        "scores": lambda S, x, n: n.masked_fill(hides(best(x + n[:, 0]), S), LOW) + 0 * n,
        "two masks": lambda S, x, n: n.masked_fill(hides(best(x), S), LOW) + torch.where(causal(S), 0.0, LOW / 4),
        "a number that shows": lambda S, x, n: n.masked_fill(hides(best(x), S), -1e9),
    }[name]
    other = [[ranks(2, seed=k), n] for k, n in enumerate(outside(2)[:2])]
    found, targets = told(make, 2, ranks(2), outside(2)[0], attend=eager, other=other)
    assert "indices" not in found
    assert "mla_compile.weigh_alike.default" not in targets


def test_a_number_that_scores_show_beside_does_not_weigh_all_alike():
    """In float64, beside -1e9, the scores decide; and two masks may add up to two numbers."""
    for fill in (-1e9, -1e28):
        make = lambda S, x, p, fill=fill: torch.where(p & shows(best(x), S), 0.0, fill)  # noqa: E731
        found, _ = told(make, 1, ranks(1), PADDING, attend=eager, other=[[ranks(1), NOTHING]])
        assert "indices" not in found

    def twice(q, k, v, mask):
        return (q @ k.mT * 0.3 + mask + torch.where(torch.arange(T) < 7, 0.0, -1e30)).softmax(-1) @ v

    found, _ = told(lambda S, x: torch.where(shows(best(x), S), 0.0, -1e30), 1, ranks(1), attend=twice)
    assert "indices" not in found


KEPT = {
    "two finite numbers": (lambda S, x: low(S, x, fill=LOW / 2), eager, [ranks(3)]),
    "the listed keys are hidden": (lambda S, x: hides(best(x), S), sdpa, [ranks(3)]),
    "others are let through": (lambda S, x: shows(best(x), S) | causal(S), sdpa, [ranks(3)]),
    "a list for each head": (
        lambda S, x: torch.zeros(B, H, S, T, dtype=torch.bool).scatter(-1, best(x), True), sdpa,
        [ranks(3, heads=H)],
    ),
    "heads are chosen": (
        lambda S, x: torch.zeros(B, H, S, T, dtype=torch.bool).scatter(1, x.topk(2, dim=1).indices, True), sdpa,
        [ranks(3, heads=H)],
    ),
    "queries are chosen": (
        lambda S, x: torch.zeros(B, S, T, dtype=torch.bool).scatter(1, x.topk(2, dim=1).indices, True)[:, None], sdpa,
        [ranks(3)],
    ),
    "a soft mask": (lambda S, x: torch.full((B, S, T), -5.0).scatter(-1, best(x), 0.0)[:, None], sdpa, [ranks(3)]),
    "not quite minus infinity": (
        lambda S, x: torch.full((B, S, T), -1e9).scatter(-1, best(x), 0.0)[:, None], eager, [ranks(3)],
    ),
    "a bonus": (lambda S, x: torch.full((B, S, T), INF).scatter(-1, best(x), 0.5)[:, None], sdpa, [ranks(3)]),
    "some rows are not written": (
        lambda S, x: torch.ones(B, S, T, dtype=torch.bool).scatter(-1, best(x)[:, :2], False).logical_not()[:, None],
        sdpa, [ranks(3)],
    ),
    "counts that cancel": (
        lambda S, x, y: (torch.zeros(B, S, T, dtype=y.dtype).scatter_add(-1, best(x), y) != 0)[:, None], sdpa,
        [ranks(3), seeded(B, 3, K)],
    ),
    "changed after it was made": (
        lambda S, x: shows(best(x), S).logical_xor(causal(S)), sdpa, [ranks(3)],
    ),
}  # fmt: skip


SAID = {
    "the listed keys are hidden": "hides the keys of a list and shows all others",
    "others are let through": "shows a key if either mask does",
    "a list for each head": "lists other keys for each head",
    "heads are chosen": "chooses heads, not keys",
    "queries are chosen": "chooses queries, not keys",
    "a soft mask": "adds 0 to the scores of listed keys and -5 to all others",
    "not quite minus infinity": "adds 0 to the scores of listed keys and -1e+09 to all others",
    "a bonus": "adds 0.5 to the scores of listed keys and -inf to all others",
}


@pytest.mark.parametrize("plain", [False, *also("combination", True)])
@pytest.mark.parametrize("name", KEPT)
def test_the_mask_stays(name, plain):
    make, attend, given = KEPT[name]
    found, _ = told(make, 3, *given, attend=attend, said=SAID.get(name, "compares no positions"), plain=plain)
    assert "indices" not in found
    assert "mask" in found


def test_indices_that_are_changed_are_followed_as_they_are():
    """Not those of the top k any more: two of them may be equal now."""
    found, targets = told(lambda S, x: shows((best(x) + 1).clamp(max=T - 1), S), 2, ranks(2))
    assert found["indices"] == (B, 2, K)
    assert "aten.sort.default" in targets


def test_rounded_indices_may_be_equal():
    _, targets = told(lambda S, x: shows(best(x).to(torch.bfloat16).long().clamp(0, T - 1), S), 1, ranks(1))
    assert "aten.sort.default" in targets


def test_off_where_it_is_switched_off_or_does_not_pay():
    mask = MASKS["scattered True"]
    assert "mask" in told(mask, 1, ranks(1), sparse="never")[0]
    # Five queries of eight out of nine keys each: their rows one by one are more than all rows once.
    found, _ = told(lambda S, x: shows(best(x, 8), S), 5, ranks(5))
    assert "mask" in found


def test_what_the_report_says():
    def fn(q, c, keys, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        scores = (q[:, :2] @ keys.mT[:, None]).relu().sum(1)
        return sdpa(q, k, v, ~hides(best(scores), 1))

    given = [seeded(B, H, 1, N), seeded(B, T, L), seeded(B, T, N, seed=5)]
    outcome = optimized(trace(fn, given, [seeded(H * N, L, seed=3), seeded(H * V, L, seed=4)]), forms="absorbed")
    (site,) = outcome.report.sites
    assert site.chosen == K
    assert site.choosing_flops == 2 * 2 * N  # two heads of N
    assert site.choosing_bytes == 8 * N + 2 * 2 * 8  # a row, and a product of each head, written and read
    assert site.choosing_fused is False
    assert site.decode_flops_after == 0
    assert not math.isnan(site.precision_ratio or 0)
    assert "list of keys" in str(outcome.report)


def test_an_attention_with_an_open_core_is_not_said_to_be_sparse():
    def fn(q, c, ranks, w_k, w_v):
        k, v = (F.linear(c, w).unflatten(-1, (H, -1)).transpose(1, 2) for w in (w_k, w_v))
        scores = torch.tanh(q @ k.mT * 0.3).masked_fill(hides(best(ranks), 1), INF)
        return scores.softmax(-1) @ v

    given = [seeded(B, H, 1, N), seeded(B, T, L), ranks(1)]
    outcome = optimized(trace(fn, given, [seeded(H * N, L, seed=3), seeded(H * V, L, seed=4)]), forms="absorbed")
    (site,) = outcome.report.sites
    assert (site.verdict, site.chosen) == ("absorbed", None)
    assert site.decode_flops_after
