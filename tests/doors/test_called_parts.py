"""Methods that call layers, models in lists, or an attention themselves: absorbed, or one warning of what ran."""

from __future__ import annotations

import collections
import copy
import functools
import pickle
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile
from mla_compile import MlaCompileWarning
from mla_compile.core.inner import called_within
from tests.support.tiers import also
from tests.support.toy import Buffered, D, H, L, N, R, Toy, V, decode_inputs

RAN = "an attention ran uncompiled"


class PerHead(Toy):
    """Keeps K and V of each head in a cache that its caller holds."""

    def forward(self, x, past):
        B, S, _ = x.shape
        q = self.q(x).view(B, S, H, N + R).transpose(1, 2)
        latent, rope = self.down(x).split([L, R], dim=-1)
        k, v = self.up(latent).view(B, S, H, N + V).transpose(1, 2).split([N, V], dim=-1)
        k = torch.cat([k, rope.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        o = F.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).reshape(B, S, H * V)), (k, v)


class Layer(nn.Module):
    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.attention, self.norm = attention(), nn.LayerNorm(D)

    def forward(self, x, past):
        y, past = self.attention(self.norm(x), past)
        return x + y, past


class Layers(nn.Module):
    """Calls its layers one by one."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attention) for _ in range(2))

    def step(self, x, caches):
        for i, layer in enumerate(self.layers):
            x, caches[i] = layer(x, caches[i])
        return x


class Inside(Layers):
    """Calls what is within the layers."""

    def step(self, x, caches):
        for i, layer in enumerate(self.layers):
            y, caches[i] = layer.attention(layer.norm(x), caches[i])
            x = x + y
        return x


class Model(Layers):
    def forward(self, x, caches):
        return self.step(x, caches)


class Several(nn.Module):
    """Models in a ModuleList."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Model(attention), Model(attention)])

    def step(self, x, caches):
        first, second = caches[:2], caches[2:]
        x = self.experts[1](self.experts[0](x, first), second)
        caches[:] = first + second
        return x


class Unregistered(nn.Module):
    """Models in a list, a tuple and a dict that torch does not know."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.first, self.others = [Layer(attention), (Layer(attention),)], {"last": Layer(attention)}

    def step(self, x, caches):
        for i, layer in enumerate((self.first[0], self.first[1][0], self.others["last"])):
            x, caches[i] = layer(x, caches[i])
        return x


Pair = collections.namedtuple("Pair", "first last")


class Collected(nn.Module):
    """Layers in the other collections of Python."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.pair, self.queue = Pair(Layer(attention), 1), collections.deque([Layer(attention)], maxlen=1)
        self.named = collections.OrderedDict(last=Layer(attention))

    def step(self, x, caches):
        assert self.queue.maxlen == self.pair.last == 1
        for i, layer in enumerate((self.pair.first, *self.queue, *self.named.values())):
            x, caches[i] = layer(x, caches[i])
        return x


class Hidden(nn.Module):
    """Not registered under any name that a method names: reached through a private method."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.parts = nn.Sequential(Layer(attention))

    def _run(self, x, past):
        return self.parts[0](x, past)

    def step(self, x, caches):
        x, caches[0] = self._run(x, caches[0])
        return x


class Chosen(Layers):
    """Which method runs is decided when the object is made."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__(attention)
        self.step = functools.partial(self.all, reverse=False)

    @property
    def blocks(self):
        return self.layers

    def all(self, x, caches, *, reverse):
        for i, layer in enumerate(reversed(self.blocks) if reverse else self.blocks):
            x, caches[i] = layer(x, caches[i])
        return x


def decorated(method):
    def other(*given):
        return method(*given)

    return other


def all_layers(model, x, caches):
    for i, layer in enumerate(model.layers):
        x, caches[i] = layer(x, caches[i])
    return x


class ByAHelper(Layers):
    """A function beside the class names the layers, behind a decorator that does not show what it decorates."""

    @staticmethod
    def _run(*given):
        return all_layers(*given)

    @decorated
    def step(self, x, caches):
        return self._run(self, x, caches)


class SetLater(Layers):
    """The method was no function of the class."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__(attention)
        self.step = types.MethodType(all_layers, self)


class Indexed(nn.ModuleList):
    """Is a list of its layers, and has no forward."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__(Layer(attention) for _ in range(2))

    def step(self, x, caches):
        for i in range(len(self)):
            x, caches[i] = self[i](x, caches[i])
        return x


class Iterated(nn.ModuleDict):
    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__({"first": attention(), "last": attention()})

    def step(self, x, caches):
        for i, name in enumerate(self):
            y, caches[i] = self[name](x, caches[i])
            x = x + y
        return x


class ByOperator(Layers):
    """Has an operator of its own, which leads to the layers."""

    def __getitem__(self, i):
        return self.layers[i]

    def __len__(self):
        return len(self.layers)

    def forward(self, x):
        return x

    step = Indexed.step


class Bag(nn.Module):
    """The operator reaches all submodules, and names none."""

    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        for i in range(2):
            self.add_module(f"layer{i}", Layer(attention))

    def __iter__(self):
        return (self._modules[f"layer{i}"] for i in range(2))

    def step(self, x, caches):
        for i, layer in enumerate(self):
            x, caches[i] = layer(x, caches[i])
        return x


class OfABag(nn.Module):
    def __init__(self, attention: type[nn.Module] = Toy) -> None:
        super().__init__()
        self.bag = Bag(attention)

    def step(self, x, caches):
        for i, layer in enumerate(self.bag):
            x, caches[i] = layer(x, caches[i])
        return x


KINDS = [Layers, Inside, Unregistered, Collected, Hidden, Chosen, ByAHelper, Indexed, ByOperator, OfABag]
OTHER_KINDS = [Several, SetLater, Iterated, Bag]
ABSORBED = {Several: 4, Unregistered: 3, Collected: 3, Hidden: 1}


@torch.no_grad()
def steps(model, *, rows: bool, count: int = 3):
    """What a prompt and steps return; every cache begins empty."""
    caches = [decode_inputs(cached=0)[1] if rows else None for _ in range(4)]
    inputs = [decode_inputs(queries=5 if one == 0 else 1, seed=one)[0] for one in range(count)]
    return [model.step(x, caches) for x in inputs]


@torch.no_grad()
def one_step(model):
    """What a step returns and leaves in the caches: one graph of fixed sizes, which takes a third of the time."""
    caches = [decode_inputs(seed=number)[1] for number in range(4)]
    return model.step(decode_inputs(seed=4)[0], caches), caches


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        *((kind, Toy) for kind in KINDS),
        (Hidden, PerHead),
        *also("combination", *((kind, Toy) for kind in OTHER_KINDS)),
        *also("combination", *((kind, PerHead) for kind in (Layers, Collected, Several, OfABag))),
    ],
)
def test_what_a_method_calls_is_absorbed(kind, attention):
    model = kind(attention).eval()
    before = [set(vars(module)) for module in model.modules()]
    run = one_step if attention is Toy else functools.partial(steps, rows=False)  # K and V of a prompt become rows
    want = run(model)
    fast = mla_compile.optimize(model, codegen="eager")
    torch.testing.assert_close(run(fast), want, rtol=1e-4, atol=1e-5)
    sites, parts = fast.mla_report.sites, called_within(fast).values()
    assert {site.code.value for site in sites} <= {"absorbed", "cost_prefill"}
    absorbed = {site.where.module for site in sites if site.verdict == "absorbed"}
    assert len(absorbed) == len([one for one in absorbed if any(one.startswith(path) for path in parts)]) > 0
    assert len(absorbed) == ABSORBED.get(kind, 2)
    assert not any("forward" in path for path in absorbed)  # paths in the model, not in what compiles it
    assert [set(vars(module)) for module in model.modules()] == before
    assert all(p is q for p, q in zip(model.parameters(), fast.parameters(), strict=True))


def copied(fast):
    return copy.deepcopy(fast)


def pickled(fast):
    return pickle.loads(pickle.dumps(fast))


def again(fast):
    return mla_compile.optimize(fast, codegen="eager")


@pytest.mark.parametrize("made", [copied, *also("combination", pickled, again)])
@pytest.mark.parametrize("kind", [Layers, Unregistered])
def test_a_copy_is_optimized_too(kind, made):
    model = kind().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    other = made(fast)
    torch.testing.assert_close(one_step(other), one_step(model), rtol=1e-4, atol=1e-5)
    assert other.mla_report.absorbed
    assert not fast.mla_report.sites


class Keeps(nn.Module):
    """Layers that own a cache of rows, written in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Buffered(), Buffered()])

    def step(self, x, position):
        for layer in self.layers:
            x = x + layer(x, position)["y"]
        return x


def test_layers_with_a_cache_of_their_own():
    model, original = Keeps().eval(), Keeps().eval()
    original.load_state_dict(model.state_dict())
    fast = mla_compile.optimize(model, codegen="eager")
    with torch.no_grad():
        for position in range(3):
            x, at = decode_inputs(seed=position)[0], torch.tensor([position])
            torch.testing.assert_close(fast.step(x, at), original.step(x, at), rtol=1e-4, atol=1e-5)
    assert len({site.where.module for site in fast.mla_report.sites if site.verdict == "absorbed"}) == 2


# What is found by no name: one warning.


class Holder:
    """Not a module, and not copied: the end of a copy would be taken for its own."""

    def __init__(self, model):
        self.model = model

    def __del__(self):
        pass

    def run(self, x, caches):
        return self.model(x, caches)


class InAnObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.holder = Holder(Model())

    def forward(self, x):
        return x

    def step(self, x, caches):
        return self.holder.run(x, caches)


class AmongChildren(Layers):
    def forward(self, x):
        return x

    def step(self, x, caches):
        (layers,) = self.children()
        for i, layer in enumerate(layers):
            x, caches[i] = layer(x, caches[i])
        return x


class Empty(nn.Module):
    def forward(self, x):
        return x


GLOBAL = Model().eval()


class Global(Empty):
    """The model is a global of this file."""

    def step(self, x, caches):
        return GLOBAL(x, caches)


class OfTheClass(Empty):
    """The model is an attribute of the class."""

    models = (GLOBAL,)

    def step(self, x, caches):
        return self.models[0](x, caches)


def in_a_variable(lm):
    class InAVariable(Empty):
        """The model is a variable of the function that made the class."""

        def step(self, x, caches):
            return lm(x, caches)

    return InAVariable


class Itself(Toy):
    def step(self, x, caches):
        caches[0] = torch.cat([caches[0], self.down(x)], dim=1)
        return self.attend(x, caches[0], None)


class ByHand(Itself):
    def attend(self, x, rows, mask):
        q, (latent, rope) = self.q(x).unflatten(-1, (H, -1)), rows.split([L, R], dim=-1)
        k, v = self.up(latent).unflatten(-1, (H, -1)).split([N, V], dim=-1)
        scores = torch.einsum("bshn,bthn->bhst", q[..., :N], k) + torch.einsum("bshr,btr->bhst", q[..., N:], rope)
        return self.out(torch.einsum("bhst,bthv->bshv", scores.softmax(-1), v).flatten(2))


@pytest.mark.parametrize(
    ("kind", "ran"),
    [
        (InAnObject, "in the forward of a Model;"),
        (AmongChildren, "in the forward of layers.0, a Layer;"),
        (Global, "in the forward of a Model;"),
        (OfTheClass, "in the forward of a Model;"),
        (in_a_variable(GLOBAL), "in the forward of a Model;"),
    ],
)
def test_what_is_not_found_is_told_once(kind, ran):
    model = kind().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MlaCompileWarning)
        got = [steps(fast, rows=True) for _ in range(2)]
    (message,) = [str(one.message) for one in caught]
    assert message.startswith(f"{RAN} in {kind.__name__}.step()")
    assert ran in message
    assert caught[0].filename == __file__
    assert fast.mla_report.summary() == message
    want = steps(model, rows=True)
    for one in got:
        torch.testing.assert_close(one, want)


class InAnOperator(Empty):
    """The code of the operator attends: no attribute of an object takes the place of an operator of its class."""

    def __init__(self):
        super().__init__()
        toy = Toy()
        self.q, self.down, self.up, self.out = toy.q, toy.down, toy.up, toy.out

    def __getitem__(self, given):
        return ByHand.attend(self, *given, None)

    def step(self, x, caches):
        caches[0] = torch.cat([caches[0], self.down(x)], dim=1)
        return self[x, caches[0]]


class InALoop(InAnOperator):
    def step(self, x, caches):
        for _ in range(2):
            y = super().step(x, caches)
        return y


def test_an_operator_that_attends_is_compiled_in_its_method_or_told():
    want = [steps(kind().eval(), rows=True) for kind in (InAnOperator, InALoop)]
    fast = mla_compile.optimize(InAnOperator().eval(), codegen="eager")
    torch.testing.assert_close(steps(fast, rows=True), want[0], rtol=1e-4, atol=1e-5)
    assert fast.mla_report.absorbed
    fast = mla_compile.optimize(InALoop().eval(), codegen="eager")
    with pytest.warns(MlaCompileWarning, match=r"ran uncompiled in InALoop.step\(\) itself") as caught:
        torch.testing.assert_close(steps(fast, rows=True), want[1])
    assert len(caught) == 1


def test_containers_of_torch_have_no_methods_of_their_own():
    model = nn.Sequential(nn.Sequential(nn.Linear(D, D), nn.GELU()), nn.Linear(D, D)).eval()
    assert not called_within(model)
    assert mla_compile.optimize(model)[0] is model[0]
    with pytest.raises(mla_compile.InputError, match="has none"):
        mla_compile.optimize(nn.ModuleList([Layer()]))


def test_what_an_operator_gives_is_absorbed():
    fast = mla_compile.optimize(Indexed().eval(), codegen="eager")
    x, rows = decode_inputs()
    with torch.no_grad():
        fast[1](x, rows)
    assert fast.mla_report.absorbed == 1


def test_the_advice_works_for_a_module():
    model = InAnObject().eval()
    want = one_step(model)
    model.holder.model = mla_compile.optimize(model.holder.model, codegen="eager")
    torch.testing.assert_close(one_step(mla_compile.optimize(model)), want, rtol=1e-4, atol=1e-5)
    assert model.holder.model.mla_report.absorbed == 2


def test_the_advice_works_for_a_method(caplog):
    caplog.set_level("INFO", logger="mla_compile")
    model = Itself().eval()
    want = steps(model, rows=True)
    model.step = torch.compile(model.step, backend="mla", options={"codegen": "eager"})
    torch.testing.assert_close(steps(model, rows=True), want, rtol=1e-4, atol=1e-5)
    assert ": 1 absorbed" in caplog.text


class Harmless(Layers):
    """Near misses: methods that run no attention, and methods that only the forward calls."""

    def forward(self, x, caches):
        return self._all(x, caches)

    def _all(self, x, caches):
        for i, layer in enumerate(self.layers):
            x, caches[i] = layer(x, caches[i])
        return x

    def gate(self, x):
        self.layers[0].norm(x)
        return x.softmax(-1) @ torch.ones(D, 3)

    def size(self):
        return sum(p.numel() for p in self.layers.parameters())

    def weigh(self, x):
        return F.softmax(x, dim=-1).sum(1) @ self.layers[0].norm.weight


class Private(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x, caches):
        return self._all(x, caches)

    _all = Harmless._all


def test_methods_without_an_attention_have_nothing_to_tell():
    model = Private().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    assert not called_within(model)
    with torch.no_grad():
        x, rows = decode_inputs()
        torch.testing.assert_close(fast(x, [rows, rows]), model(x, [rows, rows]), rtol=1e-4, atol=1e-5)
        Private.forward(fast, x, [rows, rows])  # asked for, so there is nothing to tell
        Itself.forward(mla_compile.optimize(Itself().eval()), x, rows)
    assert fast.layers is model.layers


def test_a_gate_is_no_attention():
    fast = mla_compile.optimize(Harmless().eval(), codegen="eager")
    x = decode_inputs()[0]
    with torch.no_grad():
        fast.size(), fast.weigh(x)
    assert fast.mla_report.summary().startswith("nothing was compiled yet")
