"""Lists of keys on their way to a launch: which calls the kernel takes, their plan, what is launched and told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_compile.kernels import decode, launch
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.kinds import grown, rounded
from mla_compile.kernels.launch import chosen_plan
from mla_compile.kernels.plan import GRID_LIMIT, Plan, plan
from mla_compile.kernels.triton import lists, steps
from tests.support.fake_driver import FakeDriver
from tests.support.plans import H200, HALF, make

B, S, H, L, WIDTH = 2, 3, 4, 32, 40


def call(T: int = 300, k: int = 50, **changed: Any) -> DecodeCall:
    rows = torch.zeros(B, 3000, WIDTH, dtype=torch.bfloat16)[:, :T]
    query = torch.zeros(B, S, H, WIDTH, dtype=torch.bfloat16)
    indices = torch.zeros(B, S, k, dtype=torch.int32)
    return DecodeCall(query, rows[..., :L], rows[..., L:], indices=indices, scale=0.5)._replace(**changed)


def paged(**changed: Any) -> DecodeCall:
    pages = torch.zeros(12, 16, WIDTH, dtype=torch.bfloat16)
    table, lens = torch.zeros(B, 6, dtype=torch.int32), torch.full((B,), 90, dtype=torch.int32)
    return (
        call()
        ._replace(latent=pages[..., :L], rope=pages[..., L:], block_table=table, seq_lens=lens)
        ._replace(**changed)
    )


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def test_which_lists_the_kernel_reads():
    for suitable in (
        call(),
        paged(),
        call(mask=mask(B, 1, S, 300)),
        call(mask=mask(1, 1, 1, 300).expand(B, H, S, 300)),
    ):
        assert lists.suits(suitable)
    for other in (call(k=0), call(mask=mask(B, H, 1, 300)), call(indices=None)):
        assert not lists.suits(other)
    far = torch.empty(1 << 26, 64, 16, dtype=torch.bfloat16, device="meta")
    assert not lists.suits(paged(latent=far))  # a row's number has to fit int32
    assert lists.suits(call(mask=mask(300)))  # whose shape the checks refuse


def test_a_plan_is_for_query_tokens_and_the_keys_of_their_lists():
    got = chosen_plan(call(T=100_000, k=2048), H200)
    assert got == plan(
        B=B * S, S=1, H=H, L=L, R=WIDTH - L, T=2048, query_dtype=HALF, cache_dtype=HALF, device=H200, listed=True
    )
    assert got == chosen_plan(call(T=5000, k=2048, mask=mask(B, 1, S, 5000)), H200)
    assert chosen_plan(call(k=2000)._replace(deterministic=True), H200).splits == 2
    assert chosen_plan(call()._replace(num_splits=7), H200).splits == 7


@pytest.mark.parametrize("page", [None, 8, 64])
def test_the_hopper_kernel_reads_lists_for_more_heads(page: int | None):
    sizes: dict[str, Any] = {"T": 2048, "page_size": page, "listed": True}
    for B, H in ((1, 128), (4, 17), (GRID_LIMIT + 1, 64)):
        got = make(**sizes, B=B, H=H, gluon=True)
        assert (got.kernel, got.block_m, got.block_n, got.scheduled) == ("gluon", 64, 64, False)
    assert make(**sizes, H=16, gluon=True).kernel == "triton"
    other = make(**sizes)
    assert (other.kernel, other.block_m, other.block_n, other.scheduled) == ("triton", 64, 32, False)
    assert make(**sizes, gluon=True, deterministic=True).splits == 2


def test_a_plan_of_the_callers_own_may_be_for_the_hopper_kernel():
    own = Plan("gluon", 64, 64, 4, 2, 3, None, 0)
    found = chosen_plan(call(), H200, own)
    assert (found.kernel, found.splits) == ("gluon", 3)


def test_a_grid_has_room_for_the_tokens_of_a_long_prompt():
    tokens = GRID_LIMIT + 1
    query = torch.empty(1, tokens, 40, WIDTH, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(1, tokens, WIDTH, dtype=torch.bfloat16, device="meta")
    indices = torch.empty(1, tokens, 64, dtype=torch.int32, device="meta")
    long = DecodeCall(query, rows[..., :L], rows[..., L:], indices=indices, scale=0.5)
    pytest.importorskip("triton")
    found = chosen_plan(long, PRESETS["sm_80"])
    (attend,) = steps.steps(long, found, PRESETS["sm_80"])
    assert attend.grid == (found.row_blocks(40) * tokens, 1, 1)


def test_a_launch_is_told_of_the_lists(driver: FakeDriver):
    given = call(num_splits=2, causal=True)
    assert given.indices is not None
    assert launch.launch(given) is not None
    (grid, _, attend), (combined, _, _) = driver.launched
    assert grid == (B * S, 2, 1)
    assert combined == (B * S * H, 1, 1)
    assert (attend["indices"], attend["places"], attend["bias"]) == (given.indices.data_ptr(), None, None)
    assert (attend["entries"], attend["indices_b"], attend["indices_s"]) == (50, 150, 50)
    driver.launched.clear()
    turned = call(indices=torch.zeros(B, 50, S, dtype=torch.int32).transpose(1, 2))
    assert launch.launch(turned) is not None
    assert driver.launched[0][2]["indices_s"] == 50  # copied: rows of a list lie behind each other


@pytest.mark.parametrize(
    ("given", "places", "bias", "page"),
    [
        (paged(), True, False, 0),
        (call(mask=mask(B, 1, S, 300)), True, False, 0),
        (call(mask=mask(1, 1, 1, 300, dtype=torch.float32)), True, True, 0),
        (paged(latent=torch.zeros(12, 20, L, dtype=torch.bfloat16)[:, :16]), True, False, 16),
    ],
    ids=["pages", "mask", "added mask", "pages at a distance"],
)
def test_places_are_looked_up_in_the_same_launch(
    given: DecodeCall, places: bool, bias: bool, page: int, driver: FakeDriver
):
    """Masks are neither listed by tile nor by a schedule: there is nothing to prepare."""
    assert launch.launch(given._replace(num_splits=1)) is not None
    ((_, _, attend),) = driver.launched
    assert (attend["places"] is not None, attend["bias"] is not None) == (places, bias)
    assert (attend["work"], attend["PAGE"], attend["LIST_PAGE"]) == (None, page, given.sizes.page)
    driver.launched.clear()
    schedule = launch.schedule(given)
    assert schedule.numel() == 0
    assert not driver.launched
    assert launch.launch(given._replace(schedule=schedule)) is not None


def test_a_growing_cache_is_one_kind_once_its_lists_are_full(driver: FakeDriver):
    for T in range(40, 600):
        assert launch.launch(call(T, min(T, 200))) is not None
    assert len(launch._kinds) == len({rounded(min(T, 200)) for T in range(40, 600)}) == 4
    attends = [given for _, _, given in driver.launched if "entries" in given]
    assert [a["T"] for a in attends] == [*range(40, 600)]
    assert [a["entries"] for a in attends] == [min(T, 200) for T in range(40, 600)]
    assert [a["indices_s"] for a in attends] == [min(T, 200) for T in range(40, 600)]


def test_kinds_of_calls_with_lists():
    plain, listed = grown(call(indices=None)), grown(call())
    assert plain is not None
    assert listed is not None
    assert (plain.most, listed.most) == (rounded(300), rounded(50))
    assert plain.forms != listed.forms
    assert grown(call(mask=mask(1, 1, 1, 300))) is None
    assert grown(paged()) is None
    assert grown(call(indices=torch.zeros(4, dtype=torch.int32))) is None  # which the checks refuse


def test_a_plan_of_the_callers_own_is_not_lost_where_rows_are_gathered(monkeypatch: pytest.MonkeyPatch):
    taken: list[Plan | None] = []
    kept = decode.run

    def run(given: DecodeCall, plan: Plan | None = None, **how: Any) -> Any:
        taken.append(plan)
        return kept(given, plan, **how)

    monkeypatch.setattr(decode, "run", run)
    own = Plan("triton", 16, 32, 4, 2, 1, None, 0)
    by_head = call(mask=mask(B, H, S, 300))
    wide = {name: getattr(by_head, name).double() for name in ("query", "latent", "rope")}  # no kernel takes float64
    decode.run(by_head._replace(**wide), own)
    assert taken == [own, own]
