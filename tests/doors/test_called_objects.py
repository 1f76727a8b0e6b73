"""Methods that reach layers through objects that are no modules: absorbed by copies, where a copy does the same."""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

import mla_compile
from mla_compile import MlaCompileWarning
from tests.doors.test_called_parts import Layer, Layers, Model, again, copied, one_step, pickled, steps
from tests.support.tiers import also
from tests.support.toy import Toy


class Engine:
    """Runs a model, and counts its calls."""

    def __init__(self, lm):
        self.lm, self.calls = lm, 0

    def run(self, x, caches):
        self.calls += 1
        return self.lm(x, caches)


class Step(nn.Module):
    def forward(self, x):
        return x

    def step(self, x, caches):
        return self.engine.run(x, caches)


class Holds(Step):
    """The model is in the object, and nowhere else."""

    def __init__(self):
        super().__init__()
        self.engine = Engine(Model())


class Both(Step):
    """The model is a submodule, too, and the object has two names."""

    def __init__(self):
        super().__init__()
        self.lm = Model()
        self.engine = self.again = Engine(self.lm)

    def step(self, x, caches):
        assert self.again is self.engine
        assert self.engine.lm is self.lm
        return self.again.run(x, caches)


class Back(Layers):
    """The object points back to the model, whose layers only the object's method names."""

    class Loop:
        def __init__(self, owner):
            self.owner = owner

        def __call__(self, x, caches):
            for i, layer in enumerate(self.owner.layers):
                x, caches[i] = layer(x, caches[i])
            return x

    def __init__(self):
        super().__init__()
        self.loop = self.Loop(self)

    def forward(self, x):
        return x

    def step(self, x, caches):
        return self.loop(x, caches)


class Ring(Step):
    """Objects that hold each other."""

    class Sampler:
        def __init__(self, engine):
            self.engine = engine

        def one(self, x, caches):
            return self.engine.lm(x, caches)

    class Chat(Engine):
        def __init__(self, lm):
            super().__init__(lm)
            self.sampler = Ring.Sampler(self)

        def run(self, x, caches):
            assert self.sampler.engine is self
            return self.sampler.one(x, caches)

    def __init__(self):
        super().__init__()
        self.engine = self.Chat(Model())


class Slots(Step):
    class Slotted:
        __slots__ = ("caches", "lm")

        def __init__(self, lm):
            self.lm = lm

        run = Engine.__dict__["run"]
        calls = property(lambda self: 0, lambda self, value: None)

    def __init__(self):
        super().__init__()
        self.engine = self.Slotted(Model())


@dataclass(frozen=True)
class Frozen:
    """Compares by value, and cannot be a key."""

    lm: nn.Module
    parts: list = field(default_factory=list)

    def run(self, x, caches):
        return self.parts[0](x, caches)


class Dataclass(Step):
    def __init__(self):
        super().__init__()
        lm = Model()
        self.engine = Frozen(lm, [lm])


class Delegates(Step):
    """Everything that the object has not is the model's."""

    class Wrapped:
        def __init__(self, lm):
            self.lm = lm

        def __getattr__(self, name):
            return getattr(self.lm, name)

    def __init__(self):
        super().__init__()
        self.engine = self.Wrapped(Model())

    def step(self, x, caches):
        return self.engine.step(x, caches)


class Namespace(Step):
    def __init__(self):
        super().__init__()
        self.parts = types.SimpleNamespace(first=Layer(), last=[Layer()])

    def step(self, x, caches):
        for i, layer in enumerate((self.parts.first, *self.parts.last)):
            x, caches[i] = layer(x, caches[i])
        return x


class Bound(nn.Module):
    """The method that is called is one of an object, also within a partial."""

    def __init__(self):
        super().__init__()
        self.step = Engine(Model()).run
        self.partial = functools.partial(self.step)

    def forward(self, x):
        return x


class Nested(Step):
    """An object in a dict of an object, and a private method that only the model names."""

    class Server:
        def __init__(self, engine):
            self.engines = {"main": engine}

        def _serve(self, x, caches):
            return self.engines["main"].run(x, caches)

    def __init__(self):
        super().__init__()
        self.server = self.Server(Engine(Model()))

    def step(self, x, caches):
        return self.server._serve(x, caches)


class Gone(Both):
    """An attribute, and an attribute of the object, of which nothing can be asked any more."""

    def __init__(self):
        super().__init__()
        lost = Engine(None)  # until the end of this function
        self.note = self.engine.note = weakref.proxy(lost)


class Weak(Both):
    """The object has its owner weakly."""

    def __init__(self):
        super().__init__()
        self.engine.owner = weakref.proxy(self)
        self.owners = [self.engine.owner]


class InAClosure(Step):
    """The model is a variable of a function, which the model's user may call himself."""

    def __init__(self):
        super().__init__()
        lm = Model()
        self.step = lambda x, caches: lm(x, caches)  # noqa: PLW0108


class CallsItself(Step):
    """The function is among its own variables, and the layers in a list among them."""

    def __init__(self):
        super().__init__()
        layers = [Layer(), Layer()]

        def run(x, caches, i=0):
            if i == len(layers):
                return x
            x, caches[i] = layers[i](x, caches[i])
            return run(x, caches, i + 1)

        self.engine = types.SimpleNamespace(run=run)


class ByKeyword(Step):
    def __init__(self):
        super().__init__()
        self.step = functools.partial(lambda x, caches, lm: lm(x, caches), lm=Model())


KINDS = [
    Holds, Both, Back, Slots, Dataclass, Delegates, Gone, Weak, CallsItself,
    *also("combination", Ring, Namespace, Bound, Nested, InAClosure, ByKeyword),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_object_calls_is_absorbed(kind):
    model = kind().eval()
    before = {name: value for name, value in vars(model).items() if name != "_modules"}
    want = one_step(model)
    fast = mla_compile.optimize(model, codegen="eager", verify=False)
    torch.testing.assert_close(one_step(fast), want, rtol=1e-4, atol=1e-5)
    absorbed = {site.where.module for site in fast.mla_report.sites if site.verdict == "absorbed"}
    assert len(absorbed) == 2
    compiled = fast.mla_report
    assert all(vars(model)[name] is value for name, value in before.items())
    torch.testing.assert_close(one_step(model), want, rtol=0, atol=0)
    assert fast.mla_report is compiled  # the original ran its own modules


def test_an_object_keeps_its_own_state_and_shares_weights():
    model = Both().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    one_step(fast)
    assert (model.engine.calls, fast.engine.calls) == (0, 1)
    assert all(p is q for p, q in zip(model.engine.lm.parameters(), fast.engine.lm.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "made"),
    [
        *((Both, copied), (Back, pickled), (Back, again)),
        *also("combination", (Both, again), (Ring, pickled), (Slots, copied), (Dataclass, pickled), (Bound, again)),
    ],
)
def test_a_copy_is_optimized_too(kind, made):
    model = kind().eval()
    fast = mla_compile.optimize(model, codegen="eager", verify=False)
    other = made(fast)
    torch.testing.assert_close(one_step(other), one_step(model), rtol=1e-4, atol=1e-5)
    assert other.mla_report.absorbed
    assert not fast.mla_report.sites


# Near misses: a copy would not do what the object does, so it stays, and one warning tells of the attention.


class HeldByALayer(Step):
    """A layer reads the state that the object keeps: with a copy, they would disagree."""

    class Gated(nn.Module):
        def __init__(self, context):
            super().__init__()
            self.context = context

        def forward(self, x):
            return x * self.context.calls

    def __init__(self):
        super().__init__()
        self.engine = Engine(Model())
        self.gate = self.Gated(self.engine)

    def step(self, x, caches):
        return self.gate(self.engine.run(x, caches))


class HeldByAHook(HeldByALayer):
    """The same through the variable of a function."""

    def __init__(self):
        super().__init__()
        engine, self.gate = self.engine, nn.Identity()
        self.gate.register_forward_hook(lambda module, args, output: output * engine.calls)


class HeldByAnother(HeldByALayer):
    """The same through an object that is not copied, because it closes something."""

    class Closing:
        def __init__(self, engine):
            self.engine = engine

        def __del__(self):
            pass

        def scaled(self, y):
            return y * self.engine.calls

    def __init__(self):
        super().__init__()
        self.gate = None
        self.closing = self.Closing(self.engine)

    def step(self, x, caches):
        return self.closing.scaled(self.engine.run(x, caches))


class Only(Step):
    """A class with one object."""

    class Single(type):
        def __call__(cls, *args):
            if "one" not in vars(cls):
                cls.one = super().__call__(*args)
            return cls.one

    def __init__(self):
        super().__init__()
        self.engine = Only.Single("Engine", (Engine,), {})(Model())


class Proxy(Step):
    """An object that is more than its attributes."""

    class Watched(Engine):
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    def __init__(self):
        super().__init__()
        self.engine = self.Watched(Model())


class ForAnotherFunction(HeldByALayer):
    """A function that is not replaced reads the state."""

    def __init__(self):
        super().__init__()
        self.gate = None
        engine = self.engine
        self._scale_forward = lambda y: y * engine.calls

    def step(self, x, caches):
        return self._scale_forward(self.engine.run(x, caches))


@pytest.mark.parametrize("kind", [HeldByALayer, HeldByAHook, HeldByAnother, ForAnotherFunction, Only, Proxy])
def test_an_object_that_cannot_be_copied_stays(kind):
    model = kind().eval()
    want = steps(model, rows=True)
    if "engine" in vars(model):
        model.engine.calls = 0
    fast = mla_compile.optimize(model, codegen="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MlaCompileWarning)
        torch.testing.assert_close(steps(fast, rows=True), want, rtol=0, atol=0)
    (message,) = [str(one.message) for one in caught]
    assert message.startswith(f"an attention ran uncompiled in {kind.__name__}.step(), in the forward of a Model;")
    assert vars(fast).get("engine") is vars(model).get("engine")


class Shared(Layers):
    """The layers read what the object keeps, and it holds the model."""

    class Context:
        def __init__(self, model):
            self.model, self.factor = model, 2

    class Scaled(nn.Module):
        def __init__(self, context):
            super().__init__()
            self.context, self.attention = context, Toy()

        def forward(self, x, past):
            return self.attention(x * self.context.factor, past)

    def __init__(self):
        super().__init__()
        self.context = self.Context(self)
        self.layers = nn.ModuleList(self.Scaled(self.context) for _ in range(2))

    def forward(self, x, caches):
        return super().step(x, caches)

    def step(self, x, caches):
        self.context.factor = 3
        return self.context.model(x, caches)


def test_an_object_that_leads_to_the_original_is_told_so():
    model = Shared().eval()
    want = one_step(model)
    fast = mla_compile.optimize(model, codegen="eager")
    with pytest.warns(MlaCompileWarning, match="leads to the original; let that object hold the optimized Shared"):
        torch.testing.assert_close(one_step(fast), want, rtol=0, atol=0)
    fast.context.model = fast
    torch.testing.assert_close(one_step(fast), want, rtol=1e-4, atol=1e-5)
    assert fast.mla_report.absorbed == 2


class Settings:
    """Holds no module that runs an attention."""

    def __init__(self):
        self.width, self.norm, self.cell = 3, nn.LayerNorm(4), {"act": nn.GELU()}


class WithSettings(Layers):
    def __init__(self):
        super().__init__()
        self.settings = Settings()

    def forward(self, x):
        return x

    def step(self, x, caches):
        assert self.settings.width == 3
        return super().step(x, caches)


def test_objects_that_lead_nowhere_are_shared():
    model = WithSettings().eval()
    assert mla_compile.optimize(model).settings is model.settings


class Chain(nn.Module):
    """Names the object, of which another module that is copied has the same."""

    class Part(nn.Module):
        def __init__(self, engine):
            super().__init__()
            self.engine, self.attention = engine, Toy()

        def forward(self, x, caches):
            self.engine.calls += 1
            y, caches[2] = self.attention(x, caches[2])
            return x + y

    def __init__(self):
        super().__init__()
        self.engine = Engine(Model())
        self.part = self.Part(self.engine)

    def forward(self, x):
        return x

    def step(self, x, caches):
        return self.part(self.engine.run(x, caches), caches)


def test_an_object_of_two_copies_stays_one():
    model = Chain().eval()
    want = one_step(model)
    fast = mla_compile.optimize(model, codegen="eager")
    torch.testing.assert_close(one_step(fast), want, rtol=1e-4, atol=1e-5)
    assert fast.part.engine is fast.engine is not model.engine
    assert (fast.engine.calls, model.engine.calls) == (4, 2)
    assert fast.mla_report.absorbed >= 3
