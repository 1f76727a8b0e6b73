"""Adapters of peft on an optimized model: after every switch, the original's logits and tokens in the same state."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from mla_compile import MlaCompileWarning, optimize
from tests.support.models import build, prompt
from tests.support.tiers import also, full
from tests.support.toy import Toy, decode_inputs

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft reads it
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),  # a bias beside a layer without one is the test
]

FAST: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}


@functools.cache
def peft() -> Any:
    """The library, which takes seconds to import, or a reason to skip."""
    module = pytest.importorskip("peft", reason="adapters are those of peft")
    try:
        module.inject_adapter_in_model(module.LoraConfig(r=1, target_modules=["0"]), nn.Sequential(nn.Linear(1, 1)))
    except ImportError as error:  # a quantization library that peft finds and does not accept
        pytest.skip(f"peft attaches no adapter here: {error}")
    return module


TARGETS = ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SMALL_TARGETS = ["up", "q", "out"]


def activate(model: Any, *names: str) -> None:
    """What ``set_adapter`` does, but without gradients, which it switches on: other graphs would be compiled."""
    model.base_model.set_adapter(list(names))
    model.requires_grad_(False)


def lora(**settings: Any) -> Any:
    """An adapter whose narrow weights are both random: peft begins with zeros."""
    given = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False, **settings}
    return peft().LoraConfig(**given)


def model_with(*configs: Any, seed: int = 0) -> Any:
    """A tiny model with adapters, the first of them active."""
    model = build("deepseek_v3", num_hidden_layers=1)
    torch.manual_seed(seed)
    made = peft().get_peft_model(model, configs[0], adapter_name="one")
    for config in configs[1:]:
        made.add_adapter("two", config)
    return made.eval().requires_grad_(False)


def small_with(*configs: Any) -> Any:
    """The same around a module of one attention, which compiles in a fraction of the time."""
    torch.manual_seed(0)
    made = peft().get_peft_model(Toy(), configs[0], adapter_name="one")
    for config in configs[1:]:
        made.add_adapter("two", config)
    return made.eval().requires_grad_(False)


def small(**settings: Any) -> Any:
    return lora(**{"target_modules": SMALL_TARGETS, **settings})


def up(**settings: Any) -> Any:
    """An adapter of what makes K and V, and of no other layer, which compiles sooner."""
    return small(target_modules=["up"], **settings)


def steps(model: Any) -> list[torch.Tensor]:
    """Logits of a prompt and of a decode step; of the small module, what it returns for a step."""
    if any(isinstance(m, Toy) for m in model.modules()):
        with torch.no_grad():
            return [model(*decode_inputs())[0]]
    cache = DynamicCache()
    with torch.no_grad():
        inputs = (prompt()["input_ids"], torch.full((2, 1), 101))
        return [model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1] for ids in inputs]


def assert_same(fast: Any, model: Any, close: float = 1e-4) -> list[torch.Tensor]:
    got, want = steps(fast), steps(model)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
        assert close > 1e-3 or torch.equal(one.argmax(-1), other.argmax(-1))
    return want


def assert_other(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    """The test shows nothing, if two states of the adapters give the same logits."""
    assert all((a - b).abs().max() > 0.05 for a, b in zip(one, other, strict=True))


def absorbed(fast: Any) -> bool:
    """Whether every decode step that was compiled is absorbed: the prompts are expanded, which is cheaper."""
    decoding = [s for s in fast.mla_report.sites if s.code != "cost_prefill"]
    return bool(decoding) and all(s.verdict == "absorbed" for s in decoding)


RANKS_AND_BIAS: dict[str, Any] = {"rank_pattern": {"up": 7}, "alpha_pattern": {"up": 3}, "lora_bias": True}


@pytest.mark.parametrize("real", [False, *also("family", True)])
def test_adapters_are_switched_and_go_on_learning(real: bool) -> None:
    """The model within that of peft: they share the layers, and so the state of the adapters."""
    if real:
        model = model_with(lora(), lora(r=3, use_rslora=True))
    else:
        model = small_with(small(), small(r=3, use_rslora=True, **RANKS_AND_BIAS))
    original = model.base_model.model
    fast = optimize(original, **FAST)
    one = assert_same(fast, original)
    with model.disable_adapter():
        assert_other(assert_same(fast, original), one)
    activate(model, "two")
    two = assert_same(fast, original)
    assert_other(one, two)
    activate(model, "one", "two")
    both = assert_same(fast, original)
    assert_other(both, one)
    assert_other(both, two)
    graphs = fast.forward.compiler.graphs
    activate(model, "one")
    assert_same(fast, original)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B.one" in name:
                weight.mul_(-1.5)
    assert_other(assert_same(fast, original), one)
    assert fast.forward.compiler.graphs == graphs  # a state that was compiled before, whatever its weights are
    assert absorbed(fast)


def test_adapters_come_and_go() -> None:
    model = small_with(up())
    fast = optimize(model, **FAST)
    one = assert_same(fast, model)
    torch.manual_seed(5)
    model.add_adapter("late", up(r=5))
    model.requires_grad_(False)
    model.set_adapter("late")
    assert_other(assert_same(fast, model), one)
    model.set_adapter("one")
    model.delete_adapter("late")
    torch.testing.assert_close(assert_same(fast, model), one)
    assert absorbed(fast)


@pytest.mark.parametrize("fold", ["always", *also("combination", "never")])
def test_merging(fold: str) -> None:
    model = small_with(small(), small())
    fast = optimize(model, fold=fold, **FAST)
    apart = assert_same(fast, model)
    model.merge_adapter()
    together = assert_same(fast, model)
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-3)
    model.unmerge_adapter()
    assert_same(fast, model)
    model.merge_adapter(["two"])
    assert_other(assert_same(fast, model), apart)
    model.unmerge_adapter()
    assert_same(fast, model)
    assert absorbed(fast)


KINDS: dict[str, Callable[[], Any]] = {
    "rank-stabilized": lambda: small(use_rslora=True),
    "dropout, which is off": lambda: small(lora_dropout=0.3),
    "a rank for each layer": lambda: small(rank_pattern={"up": 7}, alpha_pattern={"up": 3}),
    "with a bias": lambda: small(lora_bias=True),
    "a rank for each layer, with a bias": lambda: small(**RANKS_AND_BIAS),
}


@full("combination")  # each alone, and what is not there; an adapter that is switched to above has them together
@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    model = small_with(KINDS[name]())
    fast = optimize(model, **FAST)
    one = assert_same(fast, model)
    with model.disable_adapter():
        assert_other(assert_same(fast, model), one)
    assert absorbed(fast)


def toy(**settings: Any) -> Any:
    torch.manual_seed(0)
    config = small(**settings)
    return peft().inject_adapter_in_model(config, Toy()).eval().requires_grad_(False)


def change(model: nn.Module) -> None:
    """Other adapters, and with DoRA other magnitudes: what is divided by is a norm of these."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name or "magnitude" in name:
                weight.add_(0.3 * weight.std() * torch.randn_like(weight) + 0.1)


@full("inductor")
def test_through_inductor() -> None:
    model = toy()
    fast = optimize(model)
    inputs = decode_inputs()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-4, atol=1e-4)
            change(model)
    assert fast.mla_report.absorbed == 1


@pytest.mark.parametrize("switched", [False, *also("combination", True)])
def test_dora(switched: bool) -> None:
    """The norm of the merged weight is a weight expression: on, off, changed, switched and merged."""
    kind = small if switched else up
    model = small_with(kind(use_dora=True), kind(use_dora=True, r=3))
    fast = optimize(model, **FAST)
    one = assert_same(fast, model)
    with model.disable_adapter():
        assert_other(assert_same(fast, model), one)
    model.requires_grad_(False)
    change(model)
    changed = assert_same(fast, model)
    assert_other(changed, one)
    if switched:
        activate(model, "two")
        assert_other(assert_same(fast, model), changed)
        activate(model, "one")
    model.merge_adapter()
    torch.testing.assert_close(assert_same(fast, model), changed, rtol=1e-3, atol=1e-3)
    model.unmerge_adapter()
    assert_same(fast, model)
    assert len(fast.mla_report.sites) >= (3 if switched else 2)
    assert absorbed(fast)


def test_dora_with_norms_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of an earlier call is a tensor in a dict of a layer, which multiplies features."""
    model = small_with(up(use_dora=True))
    monkeypatch.setattr(importlib.import_module("peft.tuners.lora.dora"), "ENABLE_DORA_CACHING", True)
    fast = optimize(model, **FAST)
    one = assert_same(fast, model)
    torch.testing.assert_close(assert_same(fast, model), one, rtol=0, atol=0)
    model.requires_grad_(False)
    change(model)
    assert_same(fast, model)  # with the norms of before, as the original has them
    model.train().eval()  # which forgets them
    assert_other(assert_same(fast, model), one)
    assert {site.code.value for site in fast.mla_report.sites} == {"absorbed"}


@full("combination")  # of a broken graph and a door
def test_dora_through_the_backend() -> None:
    """Dynamo breaks the graph before the backend is asked: the original's numbers, the line, and what to do."""
    model = small_with(small(use_dora=True))
    compiled = torch.compile(model, backend="mla", options={"codegen": "eager"})
    with pytest.warns(
        MlaCompileWarning, match=r"graph_break.*integrations\.py:\d+.*call mla_compile\.optimize\(model\)"
    ):
        assert_same(compiled, model)


@pytest.mark.parametrize("fold", ["always", *also("combination", "never")])
def test_dora_in_a_program(fold: str) -> None:
    """torch.export has no graph breaks: the norm of the merged weight is a weight expression."""
    model, inputs = toy(use_dora=True), decode_inputs()
    change(model)
    with torch.no_grad():
        want = model(*inputs)
        program = optimize(torch.export.export(model, inputs), fold=fold)
        torch.testing.assert_close(program.module()(*inputs), want, rtol=1e-4, atol=1e-4)
    assert program.graph_module.meta["mla_report"].absorbed == 1


@full("family")
def test_bfloat16_with_adapters_in_float32_is_no_less_exact() -> None:
    model = model_with(lora())
    model.base_model.model.to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.float()
    fast = optimize(model, **FAST)
    got, want = steps(fast), steps(model)
    model.double()
    for g, w, exact in zip(got, want, steps(model), strict=True):
        assert g.dtype == w.dtype
        assert (g.double() - exact).pow(2).mean() <= 1.3**2 * (w.double() - exact).pow(2).mean()
    assert absorbed(fast)


@full("family")  # by another call, the same layers of peft
def test_adapters_by_the_methods_of_transformers() -> None:
    model = build("deepseek_v3", num_hidden_layers=1)
    fast = optimize(model, **FAST)
    plain = assert_same(fast, model)
    torch.manual_seed(0)
    try:
        model.add_adapter(lora(), "one")
    except ValueError as error:  # 5.24 wants a release of peft that does not exist yet
        if "PEFT you are using is not compatible" not in str(error):
            raise
        pytest.skip(f"transformers refuses the peft that is installed: {error}")
    model.requires_grad_(False).eval()
    assert_other(assert_same(fast, model), plain)
    model.disable_adapters()
    torch.testing.assert_close(assert_same(fast, model), plain)
    assert absorbed(fast)


# Caches that were filled in another state.


@full("family")  # the small module that switches adapters attends to rows that no adapter of its own made, too
def test_rows_of_another_adapter_are_expanded_as_the_original_does_it() -> None:
    """The model caches the latent: kv_b as it is now makes K and V of it, whatever adapter made the rows."""
    model = model_with(lora(), lora())
    fast = optimize(model, **FAST)
    caches = {fast: DynamicCache(), model: DynamicCache()}
    ids = prompt()["input_ids"]
    made: dict[Any, torch.Tensor] = {}
    for token, state in enumerate(("one", "two", None)):
        off = contextlib.nullcontext() if state else model.disable_adapter()
        if state:
            activate(model, state)
        with torch.no_grad(), off:
            for one, cache in caches.items():
                made[one] = one(input_ids=ids, past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(made[fast], made[model], rtol=1e-4, atol=1e-4)
        ids = torch.full((2, 1), 7 + token)
    assert absorbed(fast)


class KeepsHeads(Toy):
    """A cache of K and V per head: what another adapter made stays what it made."""

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, ...]:
        B, S, _ = x.shape
        q = self.q(x).view(B, S, 4, -1).transpose(1, 2)
        latent, rope = self.down(x).split([16, 6], dim=-1)
        k, v = self.up(latent).view(B, S, 4, 22).transpose(1, 2).split([12, 10], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, 4, -1, -1)], dim=-1)
        if past:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).reshape(B, S, 40)), k, v


def test_heads_of_another_adapter_stay_what_they_are() -> None:
    torch.manual_seed(0)
    model = peft().get_peft_model(KeepsHeads(), up(), adapter_name="one").eval()
    model.add_adapter("two", up())
    model.requires_grad_(False)
    fast = optimize(model, **FAST)
    held: dict[Any, Any] = {fast: (), model: ()}
    made: dict[Any, torch.Tensor] = {}
    for step, state in enumerate(("one", "two", "one")):
        activate(model, state)
        x, _ = decode_inputs(queries=9 if step == 0 else 1, seed=step)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", MlaCompileWarning)  # a cache of another map is expanded, and it is said so
            for one in held:
                made[one], *held[one] = one(x, tuple(held[one]))
        torch.testing.assert_close(made[fast], made[model], rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(held[fast], held[model], strict=True):
            torch.testing.assert_close(ours.clone() + 0, theirs, rtol=1e-5, atol=1e-5)


# Adapters on quantized weights: the numbers have to be right, whatever becomes of the attention.


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers in the attentions of a model that take adapters, with their owners."""
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if name in (*TARGETS, *SMALL_TARGETS) and isinstance(layer, nn.Linear):
                yield owner, name, layer


def in_four_bits(model: nn.Module) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="4-bit weights are those of bitsandbytes")
    for owner, name, layer in linears(model):
        if layer.in_features % 64 or layer.out_features % 32:  # its CPU kernel takes no others
            continue
        packed = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        packed.weight = bnb.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, quant_type="nf4")
        setattr(owner, name, packed.to("cpu"))


def in_eight_bits(model: nn.Module) -> None:
    pytest.importorskip("torchao", reason="int8 weights are those of torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    chosen = {id(layer) for *_, layer in linears(model)}
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda layer, _: id(layer) in chosen)


# The 4-bit kernel of a CPU computes in bfloat16 whatever the model does; the absorbed form in the model's float32.
@full("combination")
@pytest.mark.parametrize(
    ("quantize", "close", "real"),
    [(in_eight_bits, 1e-4, False), (in_four_bits, 3e-2, True), (in_eight_bits, 1e-4, True)],
)
@pytest.mark.usefixtures("quiet")
def test_adapters_on_quantized_weights(quantize: Callable[[nn.Module], None], close: float, real: bool) -> None:
    base = build("deepseek_v3", num_hidden_layers=1) if real else Toy()
    quantize(base)
    torch.manual_seed(0)
    model = peft().get_peft_model(base, lora() if real else small(), adapter_name="one")
    model.eval().requires_grad_(False)
    steps(model)  # bitsandbytes packs its weights for the CPU in the first call
    fast = optimize(model, **FAST)
    one = assert_same(fast, model, close)
    with model.disable_adapter():
        assert_other(assert_same(fast, model, close), one)
    torch.testing.assert_close(assert_same(fast, model, close), one, rtol=close, atol=close)
    assert fast.mla_report.sites
