"""Methods whose own code runs an attention: the one that is a step is compiled; of any other one warning tells."""

from __future__ import annotations

import asyncio
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mla_compile
from mla_compile import MlaCompileWarning
from tests.doors.test_called_parts import ByHand, Itself, Layer, PerHead, again, copied, pickled
from tests.support.tiers import also
from tests.support.toy import H, L, N, R, Toy, V, decode_inputs


def inputs(count=5):
    return [decode_inputs(queries=4 if one == 0 else 1, seed=one)[0] for one in range(count)]


class Loop(Toy):
    """A method that calls a step in a loop."""

    cached = 0

    def step(self, x, rows):
        rows = torch.cat([rows, self.down(x)], dim=1)
        return self.attend(x, rows, None), rows

    def generate(self, given):
        rows, out = decode_inputs(cached=self.cached)[1], []
        for x in given:
            y, rows = self.step(x, rows)
            out.append(y)
        return out


class Windowed(Loop):
    """Forgets a row with each new one, so that all steps are one graph of fixed sizes."""

    cached = 19

    def step(self, x, rows):
        rows = torch.cat([rows[:, 1:], self.down(x)], dim=1)
        return self.attend(x, rows, None), rows


class InParts(Windowed):
    """The step is the method that names no module, but methods that do."""

    def _expand(self, rows):
        latent, rope = rows.split([L, R], dim=-1)
        k, v = self.up(latent).unflatten(-1, (H, -1)).transpose(1, 2).split([N, V], dim=-1)
        return torch.cat([k, rope.unsqueeze(1).expand(-1, H, -1, -1)], dim=-1), v

    def _mix(self, x, k, v):
        q = self.q(x).unflatten(-1, (H, -1)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def _rows(self, x, rows):
        return torch.cat([rows[:, 1:], self.down(x)], dim=1)

    def step(self, x, rows):
        rows = self._rows(x, rows)
        return self._mix(x, *self._expand(rows)), rows


class Comprehension(Windowed):
    def _next(self, x, cache):
        y, cache[0] = self.step(x, cache[0])
        return y

    def generate(self, given):
        cache = [decode_inputs(cached=self.cached)[1]]
        return [self._next(x, cache) for x in given]


class Generator(Windowed):
    def stream(self, given):
        rows = decode_inputs(cached=self.cached)[1]
        for x in given:
            y, rows = self.step(x, rows)
            yield y

    def generate(self, given):
        return list(self.stream(given))


class Coroutine(Windowed):
    async def chat(self, given):
        rows, out = decode_inputs(cached=self.cached)[1], []
        for x in given:
            y, rows = self.step(x, rows)
            await asyncio.sleep(0)
            out.append(y)
        return out


class AsyncStream(Windowed):
    async def chat(self, given):
        rows = decode_inputs(cached=self.cached)[1]
        for x in given:
            y, rows = self.step(x, rows)
            await asyncio.sleep(0)
            yield y


class HeadsCached(PerHead):
    """K and V of each head in a cache that grows."""

    def step(self, x, past):
        return PerHead.forward(self, x, past)

    def generate(self, given):
        past, out = None, []
        for x in given:
            y, past = self.step(x, past)
            out.append(y)
        return out


def run(model, given):
    with torch.no_grad():
        if inspect.iscoroutinefunction(chat := getattr(model, "chat", None)):
            return asyncio.run(chat(given))
        if inspect.isasyncgenfunction(chat):

            async def collected():
                return [y async for y in chat(given)]

            return asyncio.run(collected())
        if inspect.isgeneratorfunction(stream := getattr(model, "stream", None)):
            return list(stream(given))
        return model.generate(given)


@pytest.mark.parametrize("kind", [Loop, InParts, Comprehension, Generator, Coroutine, AsyncStream])
def test_the_step_of_a_loop_is_compiled(kind):
    model, given = kind().eval(), inputs() if kind is Loop else inputs()[1:]
    before, want = dict(vars(model)), run(model, given)
    fast = mla_compile.optimize(model, codegen="eager")
    torch.testing.assert_close(run(fast, given), want, rtol=1e-4, atol=1e-5)
    step = "_next" if kind is Comprehension else "step"
    in_pieces = kind in (Generator, Coroutine, AsyncStream)  # what follows the first piece is compiled
    assert in_pieces or fast.mla_report.summary() == (
        f"an attention ran uncompiled in {kind.__name__}.{step}(), which is compiled from its next call on"
    )
    for _ in range(2):
        torch.testing.assert_close(run(fast, given), want, rtol=1e-4, atol=1e-5)
        of = ["cost_prefill", "absorbed"] if kind is Loop else ["absorbed"]  # of the prompt and of steps
        assert [site.code.value for site in fast.mla_report.sites] == of
    assert dict(vars(model)) == before


def test_a_cache_per_head_keeps_rows_from_the_second_text_on():
    model, given = HeadsCached().eval(), inputs()
    want = run(model, given)
    fast = mla_compile.optimize(model, codegen="eager")
    for _ in range(2):
        torch.testing.assert_close(run(fast, given), want, rtol=1e-4, atol=1e-5)
    assert {site.code.value for site in fast.mla_report.sites} == {"absorbed", "cost_prefill"}


@pytest.mark.parametrize("kind", [Itself, ByHand])
def test_a_method_that_is_called_by_itself(kind):
    model = kind().eval()
    fast = mla_compile.optimize(model, codegen="eager")
    with torch.no_grad():
        for x in inputs(3)[1:]:
            caches, others = [decode_inputs()[1]], [decode_inputs()[1]]
            torch.testing.assert_close(fast.step(x, caches), model.step(x, others), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(caches, others)
    assert fast.mla_report.absorbed


@pytest.mark.parametrize("made", [copied, pickled, again])
@pytest.mark.parametrize("kind", [Windowed, *also("combination", Generator)])
def test_a_copy_compiles_its_own(kind, made):
    model, given = kind().eval(), inputs()[1:]
    fast = mla_compile.optimize(model, codegen="eager")
    run(fast, given)
    other = made(fast)
    before = len(fast.mla_report.sites)
    for _ in range(2):
        torch.testing.assert_close(run(other, given), run(model, given), rtol=1e-4, atol=1e-5)
    assert other.mla_report.absorbed
    assert len(fast.mla_report.sites) == before


def test_with_gradients_the_step_runs_as_it_came():
    model, given = Loop(), inputs()
    fast = mla_compile.optimize(model, codegen="eager")
    run(fast, given)
    fast.train()
    assert fast.step.name == "step"
    torch.stack([y.sum() for y in fast.generate(given)]).sum().backward()
    assert model.up.weight.grad is not None


# Near misses: there is no step that could be compiled, and one warning says what to do.


class Inline(Toy):
    def generate(self, given):
        rows, out = decode_inputs(cached=0)[1], []
        for x in given:
            rows = torch.cat([rows, self.down(x)], dim=1)
            k, v = self.up(rows[..., :16]).unflatten(-1, (4, -1)).transpose(1, 2).split([12, 10], dim=-1)
            q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)[..., :12]
            out.append(F.scaled_dot_product_attention(q, k, v))
        return out


class InlineStream(Toy):
    def stream(self, given):
        for x in given:
            rows = self.down(x)
            k, v = self.up(rows[..., :16]).unflatten(-1, (4, -1)).transpose(1, 2).split([12, 10], dim=-1)
            q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)[..., :12]
            yield F.scaled_dot_product_attention(q, k, v)


class InlineChat(Inline):
    async def chat(self, given):
        rows = self.down(given[0])
        k, v = self.up(rows[..., :16]).unflatten(-1, (4, -1)).transpose(1, 2).split([12, 10], dim=-1)
        q = self.q(given[0]).unflatten(-1, (4, -1)).transpose(1, 2)[..., :12]
        return F.scaled_dot_product_attention(q, k, v)


class Computed(nn.Module):
    """A name that no code has."""

    def __init__(self):
        super().__init__()
        self.layer_0 = Layer()

    def forward(self, x):
        return x

    def generate(self, given):
        rows = decode_inputs(cached=0)[1]
        return getattr(self, f"layer_{len(given) * 0}")(given[0], rows)[0]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Inline, "Inline.generate() itself; move one step of it"),
        (InlineStream, "InlineStream.stream() itself; move one step of it"),
        (InlineChat, "InlineChat.chat() itself; move one step of it"),
        (Computed, "Computed.generate(), in the forward of layer_0, a Layer; pass that Layer to optimize()"),
    ],
)
def test_what_has_no_step_is_told_once(kind, says):
    model, given = kind().eval(), inputs()
    fast = mla_compile.optimize(model, codegen="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MlaCompileWarning)
        got = [run(fast, given) for _ in range(2)]
    (message,) = [str(one.message) for one in caught]
    assert says in message
    for one in got:
        torch.testing.assert_close(one, run(model, given), rtol=0, atol=0)


class Helped(Toy):
    """What a forward calls belongs to it."""

    def forward(self, x, rows):
        return self.step(x, rows)

    step = Loop.step


def test_what_only_the_forward_calls_is_not_compiled_by_itself():
    fast = mla_compile.optimize(Helped().eval(), codegen="eager")
    with torch.no_grad():
        Helped.forward(fast, *decode_inputs())
        assert not fast.mla_report.sites
        fast(*decode_inputs())
    assert fast.mla_report.absorbed == 1


# Methods that run in pieces are driven as they were.


class Pieces(Loop):
    """Takes what is sent and thrown, and says how it ends."""

    def talk(self, x):
        self.down(x)
        try:
            got = yield 1
            yield got
        except KeyError:
            yield "caught"
        finally:
            self.ended = True
        return "end"

    def all(self, x):
        return (yield from self.talk(x))

    async def stream(self, x):
        self.down(x)
        try:
            got = yield 1
            yield got
        except KeyError:
            yield "caught"
        finally:
            self.ended = True

    async def wait(self, x):
        self.down(x)
        await asyncio.sleep(0)
        raise KeyError(x.shape)


@pytest.fixture
def pieces():
    return mla_compile.optimize(Pieces().eval(), codegen="eager"), inputs()[0]


def test_a_generator_is_driven_as_it_was(pieces):
    fast, x = pieces
    assert inspect.isgeneratorfunction(fast.talk)
    assert list(inspect.signature(fast.talk).parameters) == ["x"]
    steps = fast.all(x)
    assert (next(steps), steps.send(2)) == (1, 2)
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value == "end"
    steps = fast.talk(x)
    next(steps)
    assert steps.throw(KeyError()) == "caught"
    fast.ended = False
    steps.close()
    assert fast.ended


def test_coroutines_are_driven_as_they_were(pieces):
    fast, x = pieces
    assert inspect.iscoroutinefunction(fast.wait)
    assert inspect.isasyncgenfunction(fast.stream)

    async def all_of_it():
        steps = fast.stream(x)
        assert (await steps.asend(None), await steps.asend(2)) == (1, 2)
        with pytest.raises(StopAsyncIteration):
            await anext(steps)
        steps = fast.stream(x)
        await anext(steps)
        assert await steps.athrow(KeyError()) == "caught"
        fast.ended = False
        await steps.aclose()
        assert fast.ended
        with pytest.raises(KeyError):
            await fast.wait(x)

    asyncio.run(all_of_it())
