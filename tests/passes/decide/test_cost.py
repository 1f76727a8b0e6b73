"""Formulas against counting, break-evens against their derivation by hand, and the choice of a form over sweeps."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from mla_compile.core.dims import Dims
from mla_compile.errors import InputError, OptionError
from mla_compile.passes.cost import cost, formulas
from mla_compile.passes.cost.cost import DEVICES, DeviceModel, choose
from mla_compile.passes.cost.formulas import Form, evaluate

V3 = Dims(H=128, L=512, R=64, N=128, V=128, Q=1536, D=7168)
V2_LITE = Dims(H=16, L=512, R=64, N=128, V=128, Q=2048, D=2048)
MINICPM3 = Dims(H=40, L=256, R=32, N=64, V=64, Q=768, D=2560)
REAL = [pytest.param(V3, id="v3"), pytest.param(V2_LITE, id="v2-lite"), pytest.param(MINICPM3, id="minicpm3")]
ODD = Dims(H=3, L=10, R=2, N=4, V=5, Q=7, D=11)
NO_ROPE = Dims(H=2, L=6, R=0, N=3, V=4, Q=5, D=9)
FORMS = get_args(Form)
ABSORBED = [form for form in FORMS if form not in ("expanded", "held", "sparse")]
LISTED = 2  # keys that each query has chosen in the sparse form
DEVICE_LIST = list(DEVICES.values())
# A machine that is limited by arithmetic alone: the choice must fall exactly where the FLOPs say.
ARITHMETIC = DeviceModel("arithmetic", flops_per_s=1e9, bytes_per_s=1e18, launch_s=0.0)


def run_call(form: str, dims: Dims, B: int, S: int, T: int) -> None:
    """One MLA call in the given form, its matrix products only, on zeros."""
    H, L, R, N, V, Q, D = dims.H, dims.L, dims.R, dims.N, dims.V, dims.Q, dims.D
    assert Q is not None
    assert D is not None
    latent_BTL, rope_BTR, query_BSQ = torch.zeros(B, T, L), torch.zeros(B, T, R), torch.zeros(B, S, Q)
    q_rope_BHSR = torch.zeros(B, H, S, R)
    W_qc, W_kc, W_v = torch.zeros(H, Q, N), torch.zeros(H, N, L), torch.zeros(H, L, V)
    W_o, W_qk, W_vo = torch.zeros(H * V, D), torch.zeros(H, Q, L), torch.zeros(H * L, D)
    if form in ("folded", "folded_query"):
        q_BHSL = torch.einsum("bsq,hql->bhsl", query_BSQ, W_qk)
    else:
        q_BHSN = torch.einsum("bsq,hqn->bhsn", query_BSQ, W_qc)
    if form in ("expanded", "held"):
        kv_BTX = torch.zeros(B, T, H * (N + V)) if form == "held" else latent_BTL @ torch.zeros(L, H * (N + V))
        k_BHTN, v_BHTV = kv_BTX.view(B, T, H, N + V).transpose(1, 2).split([N, V], -1)
        k = torch.cat([k_BHTN, rope_BTR[:, None].expand(B, H, T, R)], -1)
        scores = torch.cat([q_BHSN, q_rope_BHSR], -1) @ k.transpose(-1, -2)
        (scores @ v_BHTV).transpose(1, 2).reshape(B, S, H * V) @ W_o
        return
    if form in ("chained", "sparse", "folded_output"):
        q_BHSL = torch.einsum("bhsn,hnl->bhsl", q_BHSN, W_kc)
    rows = torch.cat([latent_BTL, rope_BTR], -1)[:, None]
    if form == "sparse":
        latent_BTL, rows = torch.zeros(B * S, LISTED, L), torch.zeros(B * S, 1, LISTED, L + R)
        q_BHSL, q_rope_BHSR = torch.zeros(B * S, H, 1, L), torch.zeros(B * S, H, 1, R)
    out_BHSL = torch.cat([q_BHSL, q_rope_BHSR], -1) @ rows.transpose(-1, -2) @ latent_BTL[:, None]
    out_BHSL = out_BHSL.view(B, S, H, L).transpose(1, 2)
    if form in ("folded", "folded_output"):
        out_BHSL.transpose(1, 2).reshape(B, S, H * L) @ W_vo
    else:
        torch.einsum("bhsl,hlv->bshv", out_BHSL, W_v).reshape(B, S, H * V) @ W_o


@pytest.mark.parametrize("dims", [ODD, NO_ROPE], ids=["rope", "no-rope"])
@pytest.mark.parametrize(("B", "S", "T"), [(1, 1, 9), (2, 6, 6), (3, 4, 13)], ids=["decode", "prefill", "chunk"])
@pytest.mark.parametrize("form", FORMS)
def test_flops_equal_what_torch_counts(form, B, S, T, dims):
    with FlopCounterMode(display=False) as counter:
        run_call(form, dims, B, S, T)
    letters = {"B": B, "S": S, "T": T, "J": LISTED}
    assert evaluate(formulas.flops(form, projections=True), dims, **letters) == counter.get_total_flops()


@pytest.mark.parametrize("form", FORMS)
def test_projections_are_what_the_core_leaves_out(form):
    B, S, letters = 2, 3, {"B": 2, "S": 3, "T": 5, "J": LISTED}
    core = evaluate(formulas.flops(form), ODD, **letters)
    whole = evaluate(formulas.flops(form, projections=True), ODD, **letters)
    query = {"folded_query": 7 * 3 * 10, "folded": 7 * 3 * 10}.get(form, 7 * 3 * 4)
    output = {"folded_output": 3 * 10 * 11, "folded": 3 * 10 * 11}.get(form, 3 * 5 * 11)
    assert whole - core == 2 * B * S * (query + output)


def test_bytes_of_the_expanded_form():
    """Counted by hand: H=3 L=10 R=2 N=4 V=5, two sequences of five tokens, three queries each, two-byte values."""
    expand = 3 * 10 * (4 + 5) + 2 * 5 * (10 + 2) + 2 * 5 * 3 * (4 + 2 + 5)  # weights, rows read, K and V written
    attend = 2 * 5 * 3 * (4 + 2 + 5) + 2 * 3 * 3 * (4 + 2) + 2 * 3 * 3 * 5  # K and V read, query read, out written
    assert evaluate(formulas.moved_bytes("expanded"), ODD, B=2, S=3, T=5, E=2) == 2 * (expand + attend)


def test_bytes_of_the_chained_form():
    absorb = 3 * 4 * 10 + 2 * 3 * 3 * (4 + 10)
    attend = 2 * 5 * (10 + 2) + 2 * 3 * 3 * (10 + 2) + 2 * 3 * 3 * 10
    values = 3 * 10 * 5 + 2 * 3 * 3 * (10 + 5)
    assert evaluate(formulas.moved_bytes("chained"), ODD, B=2, S=3, T=5, E=2) == 2 * (absorb + attend + values)


def test_the_sparse_form_is_the_chained_one_over_a_list():
    """As many keys as there are: the same FLOPs; the rows are read by each query, and no more of them with T."""
    of_all = {"B": 2, "S": 3, "T": 5, "J": 5}
    assert evaluate(formulas.flops("sparse"), ODD, **of_all) == evaluate(formulas.flops("chained"), ODD, **of_all)
    one = {**of_all, "S": 1, "E": 2}
    assert evaluate(formulas.moved_bytes("sparse"), ODD, **one) == evaluate(formulas.moved_bytes("chained"), ODD, **one)
    assert formulas.marginal_flops("sparse") == formulas.marginal_bytes("sparse") == 0


def test_prompts_from_which_the_sparse_form_pays():
    """2,048 of V3's keys: 2048 (2 * 512 + 64) / (128 + 64 + 128) tokens."""
    at, below, above = (
        evaluate(formulas.absorption_gain("sparse"), V3, S=n, T=n, J=2048) for n in (6963.2, 6900, 7000)
    )
    assert below < 0 < above
    assert abs(at) < 1e-6 * above


def test_a_list_of_keys_is_read_where_that_is_less():
    def chosen(S, T, k):
        return cost.choose(V3, B=1, S=S, T=T, element_bytes=2, device=DEVICES["cpu"], forms="absorbed", chosen=k)

    assert chosen(1, 32768, 2048).sparse
    assert "1 query against 2,048 chosen ones of 32,768" in chosen(1, 32768, 2048).reason
    assert chosen(1, 32768, 2048).seconds["chained"] < 0.5 * chosen(1, 32768, None).seconds["chained"]
    assert not chosen(8, 2048, 2048).sparse
    assert not chosen(8, 32768, None).sparse


def weight_values(form):
    """The weight values that one call reads, including W_qc and W_o (or their folds)."""
    return sympy.Add(*(stage.weights for stage in formulas.stages(form)))


def test_folded_weights_of_v3():
    """DeepSeek-V3: 33.6M -> 100.7M weights on the query side, 125.8M -> 469.8M on the output side."""
    chained = evaluate(weight_values("chained"), V3)
    query = evaluate(weight_values("folded_query"), V3)
    output = evaluate(weight_values("folded_output"), V3)
    assert query - chained == 128 * 1536 * 512 - (128 * 1536 * 128 + 128 * 128 * 512)
    assert output - chained == 128 * 512 * 7168 - (128 * 512 * 128 + 128 * 128 * 7168)
    assert evaluate(weight_values("folded"), V3) == query + output - chained


def test_marginal_flops_have_their_closed_forms():
    A, H, L, N, R, V = formulas.A, formulas.H, formulas.L, formulas.N, formulas.R, formulas.V
    assert sympy.expand(formulas.marginal_flops("expanded") - 2 * H * (L * (N + V) + N + R - A + V)) == 0
    assert sympy.expand(formulas.marginal_flops("held") - 2 * H * (N + R - A + V)) == 0
    for form in ABSORBED:
        assert sympy.expand(formulas.marginal_flops(form) - 2 * H * (2 * L + R)) == 0


def test_marginal_bytes_have_their_closed_forms():
    A, E, H, L, N, R, V = (getattr(formulas, name) for name in "AEHLNRV")
    assert sympy.expand(formulas.marginal_bytes("expanded") - E * (L + R + 2 * H * (N + R - A + V))) == 0
    assert sympy.expand(formulas.marginal_bytes("held") - E * H * (N + R - A + V)) == 0
    for form in ABSORBED:
        assert sympy.expand(formulas.marginal_bytes(form) - E * (L + R)) == 0


def test_marginal_numbers_of_v3():
    assert cost.decode_flops(V3, "expanded") == 33_636_352
    assert cost.decode_flops(V3, "chained") == 278_528
    assert cost.decode_bytes(V3, "chained", 2) == 1152
    assert cost.decode_bytes(V3, "expanded", 2) == 164_992


def test_cache_values():
    numbers = {"H": 128, "d": 128, "G": 8, "L": 512, "R": 64, "N": 128, "V": 128}
    kinds = ("mha", "gqa", "mqa", "mla", "mla_expanded")
    got = [evaluate(formulas.cache_values(kind), **numbers) for kind in kinds]
    assert got == [32768, 2048, 256, 576, 40960]
    assert evaluate(formulas.cache_values("mla"), V3) == V3.latent_values
    assert evaluate(formulas.cache_values("mla_expanded"), V3) == V3.expanded_values


def test_prefill_and_decode_are_substitutions():
    prefill = formulas.flops("chained").subs({formulas.T: formulas.S})
    decode = formulas.flops("chained").subs(formulas.DECODE)
    assert evaluate(prefill, ODD, B=2, S=6) == evaluate(formulas.flops("chained"), ODD, B=2, S=6, T=6)
    assert evaluate(decode, ODD, B=2, T=6) == evaluate(formulas.flops("chained"), ODD, B=2, S=1, T=6)


def test_evaluate_names_the_letters_that_have_no_value():
    with pytest.raises(InputError, match="no value for B, T in"):
        evaluate(formulas.flops("expanded"), V3, S=1)
    with pytest.raises(InputError, match="no value for Q in"):
        evaluate(weight_values("folded"), Dims(H=2, L=4, R=1, N=2, V=2, D=8))


def test_break_even_has_its_closed_form():
    A, L, N, T, V = (getattr(formulas, name) for name in "ALNTV")
    limit = formulas.break_even_queries(long_context=True)
    assert sympy.simplify(limit - L * (N + V) / (2 * L + A - N - V)) == 0
    finite = formulas.break_even_queries()
    assert sympy.simplify(finite - T * L * (N + V) / (L * (N + V) + T * (2 * L + A - N - V))) == 0


@pytest.mark.parametrize(
    ("dims", "queries"),
    [
        pytest.param(V3, 170 + 2 / 3, id="v3"),
        pytest.param(V2_LITE, 170 + 2 / 3, id="v2-lite"),
        pytest.param(MINICPM3, 85 + 1 / 3, id="minicpm3"),
        pytest.param(Dims(H=4, L=16, R=4, N=16, V=16), math.inf, id="2L=N+V"),
        pytest.param(Dims(H=4, L=8, R=4, N=16, V=16), math.inf, id="2L<N+V"),
    ],
)
def test_break_even_numbers(dims, queries):
    assert cost.break_even_S(dims) == pytest.approx(queries)
    if queries < math.inf:
        assert cost.break_even_S(dims, 10**9) == pytest.approx(queries, rel=1e-5)


def test_a_narrow_latent_breaks_even_only_past_the_last_query():
    """A call has at most T queries, so S* >= T is never reached: 2L = N+V meets it, 2L < N+V has none for long T."""
    assert cost.break_even_S(Dims(H=4, L=16, R=4, N=16, V=16), 1000) == 1000
    assert cost.break_even_S(Dims(H=4, L=8, R=4, N=16, V=16), 10) > 10
    assert cost.break_even_S(Dims(H=4, L=8, R=4, N=16, V=16), 1000) == math.inf


def test_break_even_is_where_the_flops_meet():
    for T in (3, 64, 1000, 8192):
        S = cost.break_even_S(MINICPM3, T)
        expanded, chained = (
            evaluate(formulas.flops(form), MINICPM3, B=1, S=S, T=T) for form in ("expanded", "chained")
        )
        assert expanded == pytest.approx(chained, rel=1e-12)


def _bytes_saved(dims: Dims, side: str) -> float:
    return evaluate(weight_values("chained") - weight_values(f"folded_{side}"), dims)


@pytest.mark.parametrize(
    ("L", "side", "pays"),
    [(139, "query", True), (140, "query", False), (130, "output", True), (131, "output", False)],
)
def test_fold_pays_in_bytes_below_its_break_even(L, side, pays):
    dims = Dims(H=128, L=L, R=64, N=128, V=128, Q=1536, D=7168)
    assert (_bytes_saved(dims, side) > 0) is pays


def test_fold_pays_at_any_width_when_the_input_is_narrower_than_the_head():
    assert _bytes_saved(Dims(H=2, L=10**6, R=0, N=8, V=8, Q=8, D=16), "query") > 0


@pytest.mark.singly
@pytest.mark.parametrize("dims", [*REAL, pytest.param(ODD, id="odd"), pytest.param(NO_ROPE, id="no-rope")])
@pytest.mark.parametrize("T", [1, 2, 17, 512, 8192, 163_840])
def test_the_gain_of_absorbing_is_that_of_the_flops(dims, T):
    expanded, chained = formulas.flops("expanded"), formulas.flops("chained")
    for S in {min(S, T) for S in (1, 2, 16, 84, 86, 147, 170, 171, 4096)}:
        saved = evaluate(expanded - chained, dims, B=3, S=S, T=T)
        assert evaluate(formulas.absorption_gain(), dims, S=S, T=T) * 2 * 3 * dims.H == saved


@pytest.mark.parametrize("dims", REAL)
@pytest.mark.parametrize("T", [64, 1024, 8192, None])
def test_choice_flips_once_and_exactly_at_the_flops_when_arithmetic_is_all(dims, T):
    queries = range(1, min(T or 400, 400) + 1)
    absorbed = [choose(dims, B=1, S=S, T=T, element_bytes=2, device=ARITHMETIC).absorbed for S in queries]
    expected = cost.break_even_S(dims, T or cost.LONG_CONTEXT)
    assert absorbed == [expected > S for S in queries]


@pytest.mark.parametrize("device", DEVICE_LIST, ids=lambda device: device.name)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("dims", REAL)
@pytest.mark.parametrize("T", [1024, 8192, None])
def test_choice_flips_once_near_the_break_even(dims, T, element_bytes, device):
    queries = range(1, 400)
    absorbed = [choose(dims, B=1, S=S, T=T, element_bytes=element_bytes, device=device).absorbed for S in queries]
    flip = absorbed.index(False)
    assert not any(absorbed[flip:])
    # Memory traffic moves the flip: K and V are written and read, which narrow heads in float32 feel most on a GPU.
    room = 0.02 if device.name == "cpu" else 1.5
    expected = cost.break_even_S(dims, T)
    assert expected * 0.88 - 1 <= queries[flip] <= expected * (1 + room) + 1


@pytest.mark.parametrize("device", DEVICE_LIST, ids=lambda device: device.name)
@pytest.mark.parametrize("B", [1, 8])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("dims", REAL)
def test_prefill_expands_and_decode_absorbs(dims, element_bytes, B, device):
    for tokens in (8, 17, 64, 512, 4096, 32768):
        call = {"B": B, "T": tokens, "element_bytes": element_bytes, "device": device}
        assert choose(dims, S=tokens, **call).form == "expanded", tokens
        assert choose(dims, S=1, **call).absorbed, tokens
    assert choose(dims, B=B, S=1, T=None, element_bytes=element_bytes, device=device).absorbed


def test_launches_alone_never_expand_a_decode_step():
    """Tiny models are all launches; both forms take as many, so the sizes still decide."""
    slow = DeviceModel("slow launches", flops_per_s=1e15, bytes_per_s=1e13, launch_s=1.0)
    for dims in (ODD, NO_ROPE, Dims(H=4, L=32, R=8, N=16, V=16)):
        assert choose(dims, B=1, S=1, T=64, element_bytes=4, device=slow).absorbed


def test_real_models_are_not_folded_and_tiny_ones_are():
    call = {"B": 1, "S": 1, "T": 4096, "element_bytes": 2, "can_fold_query": True, "can_fold_output": True}
    for device in DEVICE_LIST:
        for dims in (V3, V2_LITE, MINICPM3):
            assert choose(dims, device=device, **call).form == "chained"
        tiny = choose(Dims(H=4, L=32, R=8, N=16, V=16, Q=64, D=64), device=device, **call)
        assert (tiny.form, tiny.fold_query, tiny.fold_output) == ("folded", True, True)
        assert tiny.seconds["folded"] < tiny.seconds["chained"]


def test_each_side_folds_for_itself():
    """No launch cost, a latent below the query side's break-even only (N Q/(Q-N) = 140, V D/(D-V) = 17)."""
    dims = Dims(H=8, L=100, R=8, N=128, V=16, Q=1536, D=512)
    call = {"B": 1, "S": 1, "T": 4096, "element_bytes": 2, "device": DeviceModel("no launches", 5e14, 3e12, 0.0)}
    choice = choose(dims, can_fold_query=True, can_fold_output=True, **call)
    assert (choice.form, choice.fold_query, choice.fold_output) == ("folded", True, False)
    assert "with W_q W_k folded about" in choice.reason


@pytest.mark.parametrize(
    ("dims", "can", "folds"),
    [
        (V3, (True, True), (True, True)),
        (V3, (True, False), (True, False)),
        (V3, (False, True), (False, True)),
        (V3, (False, False), (False, False)),
        (Dims(H=128, L=512, R=64, N=128, V=128, D=7168), (True, True), (False, True)),
        (Dims(H=128, L=512, R=64, N=128, V=128, Q=1536), (True, True), (True, False)),
    ],
)
def test_fold_always_folds_what_is_legal(dims, can, folds):
    call = {"B": 1, "S": 1, "T": 4096, "element_bytes": 2, "device": DEVICES["cuda"]}
    choice = choose(dims, fold="always", can_fold_query=can[0], can_fold_output=can[1], **call)
    assert (choice.fold_query, choice.fold_output) == folds
    assert choice.form == ("folded" if any(folds) else "chained")
    assert ("folded" in choice.seconds) is any(folds)


def test_fold_never():
    tiny = Dims(H=4, L=32, R=8, N=16, V=16, Q=64, D=64)
    call = {"B": 1, "S": 1, "T": 4096, "element_bytes": 4, "device": DEVICES["cpu"]}
    choice = choose(tiny, fold="never", can_fold_query=True, can_fold_output=True, **call)
    assert choice.form == "chained"


def test_forms_are_obeyed_against_the_cost():
    call = {"B": 1, "T": 4096, "element_bytes": 2, "device": DEVICES["cpu"]}
    forced = choose(V3, S=4096, forms="absorbed", **call)
    assert forced.form == "chained"
    assert forced.reason.startswith('forms="absorbed": 4096 queries against 4,096 cached tokens on cpu')
    assert forced.seconds["chained"] > forced.seconds["expanded"]
    assert choose(V3, S=1, forms="expanded", fold="always", can_fold_query=True, **call).form == "expanded"


def test_reason_is_plain_words():
    even = DeviceModel("bench", flops_per_s=1e12, bytes_per_s=1e18, launch_s=0.0)
    choice = choose(Dims(H=1, L=500, R=0, N=500, V=500), B=1, S=1, T=1000, element_bytes=2, device=even)
    assert choice.reason == (
        "absorbing is cheaper: 1 query against 1,000 cached tokens on bench, absorbed about 3 us, expanded about 1 ms"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"forms": "absorb"}, r"forms is 'absorb', expected one of auto, absorbed, expanded .*'absorbed'"),
        ({"fold": "allways"}, r"fold is 'allways', expected one of auto, never, always .*'always'"),
    ],
)
def test_unknown_options(option, message):
    with pytest.raises(OptionError, match=message):
        choose(V3, B=1, S=1, T=8, element_bytes=2, device=DEVICES["cpu"], **option)


def test_an_unknown_accelerator_is_taken_for_a_gpu():
    assert cost.default_device("cpu") is DEVICES["cpu"]
    assert cost.default_device("cuda") is cost.default_device("xpu") is DEVICES["cuda"]


def test_tokens_that_are_expanded_and_not_attended_to():
    """K and V are cut out of a longer cache: the expanded form makes all of it, the absorbed one reads what is cut."""
    call = {"B": 2, "S": 20, "T": 20, "element_bytes": 8, "device": ARITHMETIC}
    more = cost.seconds("expanded", ODD, **call, made=50) - cost.seconds("expanded", ODD, **call)
    assert more * 1e9 == pytest.approx(2 * 2 * 30 * ODD.H * ODD.L * (ODD.N + ODD.V))
    assert cost.seconds("chained", ODD, **call, made=50) == cost.seconds("chained", ODD, **call)
    assert not choose(ODD, **call).absorbed
    assert not choose(ODD, **call, made=21).absorbed
    choice = choose(ODD, **call, made=2000)
    assert choice.absorbed
    assert "20 queries against 20 of 2,000 cached tokens, all of which are expanded, on arithmetic" in choice.reason


def test_parts_that_are_expanded_and_not_attended_to():
    part = cost.AbsorbedColumns("values", ODD.H, ODD.L, ODD.V, ODD.H)
    call = {"writes": False, "B": 2, "S": 20, "T": 20, "element_bytes": 8, "device": ARITHMETIC}
    expanded, cut = (cost.choose_parts([part], **call, made=made) for made in (None, 50))
    more = cut.seconds["expanded"] - expanded.seconds["expanded"]
    assert more * 1e9 == pytest.approx(2 * 2 * 30 * ODD.H * ODD.L * ODD.V)
    assert cut.seconds["chained"] == expanded.seconds["chained"]
    assert not expanded.absorbed
    assert cost.choose_parts([part], **call, made=2000).absorbed
