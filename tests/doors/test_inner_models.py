"""Methods of an optimized object that call a model within it: it runs absorbed, and the original as it did."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile.core.inner import models_within
from tests.support import models
from tests.support.tiers import also, full
from tests.support.toy import Toy, decode_inputs

STEPS = 2


class Prefixed(nn.Module):
    """An image prefix in front of a language model, as image-text wrappers write it."""

    def __init__(self, language_model: nn.Module, width: int) -> None:
        super().__init__()
        self.vision, self.language_model = nn.Linear(10, width), language_model

    def embeds(self, pixels, ids):
        return torch.cat([self.vision(pixels), self.language_model.get_input_embeddings()(ids)], 1)

    def forward(self, pixels, ids, **how):
        return self.language_model(inputs_embeds=self.embeds(pixels, ids), **how)

    def generate(self, pixels, ids, **how):
        return self.language_model.generate(inputs_embeds=self.embeds(pixels, ids), **how)


def prefixed():
    lm = models.build("minicpm3", num_hidden_layers=1)
    wrapper = Prefixed(lm, lm.config.hidden_size).eval()
    return wrapper, (torch.randn(1, 3, 10), torch.tensor([[5, 6, 7]])), {}


def adapted(**settings):
    peft = pytest.importorskip("peft")
    lm = models.build("minicpm3", num_hidden_layers=1)
    config = peft.LoraConfig(
        r=2, target_modules=["kv_b_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **settings
    )
    return peft.get_peft_model(lm, config).eval(), (), {"input_ids": torch.tensor([[5, 6, 7]])}


def with_magnitudes():
    return adapted(use_dora=True)


@torch.no_grad()
def generated(model, args, kwargs):
    return model.generate(*args, **kwargs, max_new_tokens=STEPS, do_sample=False).tolist()


def counted(model, args, kwargs):
    """The FLOPs of the matrix products, which the profiler counts without hooks."""
    with torch.profiler.profile(with_flops=True) as profile:
        generated(model, args, kwargs)
    products = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
    return sum(event.flops for event in profile.key_averages() if event.key in products)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("build", [adapted, *also("family", prefixed, with_magnitudes)])
def test_generate_of_a_wrapper(build):
    model, args, kwargs = build()
    want = generated(model, args, kwargs)
    fast = mla_compile.optimize(model, codegen="eager")
    assert generated(fast, args, kwargs) == want
    assert fast.mla_report.absorbed
    compiled = fast.mla_report
    assert counted(fast, args, kwargs) < counted(model, args, kwargs)
    assert generated(model, args, kwargs) == want  # the original is what it was
    assert fast.mla_report is compiled


@full("combination")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_adapters_are_switched_through_the_wrapper():
    model, args, kwargs = adapted()
    want = generated(model, args, kwargs)
    with model.disable_adapter():
        without = generated(model, args, kwargs)
    fast = mla_compile.optimize(model, codegen="eager")
    assert generated(fast, args, kwargs) == want
    with fast.disable_adapter():
        assert generated(fast, args, kwargs) == without
    assert generated(fast, args, kwargs) == want


class Decoder(nn.Module):
    """Calls a module of its own from a method, and from its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Block()

    def forward(self, *given):
        return self.attention(*given)

    def decode(self, *given):
        return [self.attention(*given) for _ in range(2)][-1]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(Toy())

    def forward(self, *given):
        return self.core[0](*given)


def copied(fast):
    return copy.deepcopy(fast)


def pickled(fast):
    return pickle.loads(pickle.dumps(fast))


@pytest.mark.parametrize("made", [None, copied, *also("combination", pickled)])
def test_a_method_and_the_forward_are_one_report(made):
    model, given = Decoder().eval(), decode_inputs(queries=1)
    fast = mla_compile.optimize(model, codegen="eager")
    fast = fast if made is None else made(fast)
    with torch.no_grad():
        want = model(*given)
        torch.testing.assert_close(fast.decode(*given), want)
        assert fast.mla_report.absorbed == 1
        torch.testing.assert_close(fast(*given), want)
    assert fast.mla_report.absorbed == len(fast.mla_report.sites) == 2
    assert model.attention is not fast.attention
    assert "forward" not in vars(model.attention)


def test_a_model_that_is_optimized_again_has_parts_of_its_own():
    model, given = Decoder().eval(), decode_inputs(queries=1)
    once = mla_compile.optimize(model, codegen="eager")
    twice = mla_compile.optimize(once, codegen="eager", forms="expanded")
    with torch.no_grad():
        torch.testing.assert_close(twice.decode(*given), model(*given))
        torch.testing.assert_close(once.decode(*given), model(*given))
    assert [site.code.value for site in twice.mla_report.sites] == ["forms_expanded"]
    assert once.mla_report.absorbed == 1


class Several(nn.Module):
    """Models in a dict, and a method of one of them as an attribute."""

    def __init__(self):
        super().__init__()
        self.models = nn.ModuleDict({"first": Decoder(), "others": nn.ModuleDict({"second": Decoder()})})
        self.start = self.models["first"].decode

    def forward(self, *given):
        return self.models["first"](*given)

    def both(self, *given):
        return self.start(*given), self.models["others"]["second"].decode(*given)


def test_models_in_a_dict_and_methods_that_are_attributes():
    model, given = Several().eval(), decode_inputs(queries=1)
    fast = mla_compile.optimize(model, codegen="eager")
    with torch.no_grad():
        torch.testing.assert_close(fast.both(*given), model.both(*given))
    assert fast.mla_report.absorbed == len(fast.mla_report.sites) == 2
    assert fast.start.__self__ is fast.models["first"] is not model.models["first"]
    assert model.start.__self__ is model.models["first"]


def test_layers_are_no_models_of_their_own():
    lm = models.build("minicpm3", num_hidden_layers=2)
    assert models_within(lm) == [lm.model]
    assert models_within(lm.model) == []
    assert all(p is q for p, q in zip(lm.parameters(), mla_compile.optimize(lm).parameters(), strict=True))


@pytest.mark.parametrize("first", ["original", "optimized"])
def test_what_transformers_records_is_recorded_once(first):
    """By hooks on the layers, which a copy shares with its original."""
    model = models.build("minicpm3", num_hidden_layers=1, attn="eager")
    fast = mla_compile.optimize(model, codegen="eager")
    with torch.no_grad():
        for one in (model, fast, model) if first == "original" else (fast, model, fast):
            assert len(one(input_ids=torch.tensor([[5, 6, 7]]), output_attentions=True).attentions) == 1
