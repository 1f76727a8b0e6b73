"""K and V cut to some of their tokens after the up-projection: the same map of a slice of the rows."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim

from mla_compile.codes import Code
from tests.modules import MLA, UPS, D, H, L, N, R, V, causal, inputs, padded
from tests.programs import absorbed, assert_equal, calls, assert_untouched, codes, export, optimized, refused, seeded
from tests.test_absorb import no_expansion
from tests.test_negatives import rotate

DYN = Dim.DYNAMIC
S, T, USED = 3, 9, 7


class Used(MLA):
    """K [B,H,T,N+R] and V are made of the whole cache and cut to what is used of it."""

    cut = staticmethod(lambda y, n: y[:, :, :n])

    def forward(self, x, c, r=None, mask=None, n=USED):
        k, v = self.expand(self.latent(c))
        k, v = self.spoil(self.join(k, self.rotary(r)), v)
        return self.finish(self.attend(self.query(x), self.cut(k, n), self.cut(v, n), mask), x)


def used(B=2, S=1, T=T, **more):
    return inputs(B, S, T, **more)


def of_used_rows(program):
    """Nothing is expanded, and only the rows that are used are read."""
    assert no_expansion(program, H, T, N)
    assert no_expansion(program, H, USED, N)
    return program


@pytest.mark.parametrize("core", ["sdpa", "matmul", "heads_last", "bmm"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_beginning_of_a_cache(core, bias):
    program = absorbed(Used(core=core, bias=bias), [*used(S=S), padded(2, S, USED)])
    of_used_rows(program)


@pytest.mark.parametrize("up", UPS)
@pytest.mark.parametrize("share", ["expand", "assign"])
def test_every_up_projection(up, share):
    if share == "assign" and up != "joint":
        pytest.skip("one is enough")
    of_used_rows(absorbed(Used(up=up, share=share), used()))


CUTS = {
    "from_the_end": lambda y, n: y[:, :, -n:],
    "from_the_middle": lambda y, n: y[:, :, 1 : n - 1],
    "every_other": lambda y, n: y[:, :, ::2],
    "narrow": lambda y, n: y.narrow(2, 1, n),
    "twice": lambda y, n: y[:, :, :-1][:, :, 1:],
    "some_sequences": lambda y, n: y[:1, :, :n],
    "one_token": lambda y, n: y[:, :, 4:5],
}


@pytest.mark.parametrize("name", CUTS)
def test_other_slices(name):
    module = Used()
    module.cut = CUTS[name]
    B = 1 if name == "some_sequences" else 2
    x, c, r = used()
    absorbed(module, [x[:B], c, r])


class AsLongAsTheMask(Used):
    """The length in use is the mask's; K and V each work it out."""

    def forward(self, x, c, r, mask):
        return super().forward(x, c, r, mask, mask.shape[-1])


@pytest.mark.parametrize("capacity", [T, None], ids=["static", "dynamic"])
def test_symbolic_lengths(capacity):
    """What is used, and perhaps what there is room for, is known in each call only."""
    dynamic = {"x": None, "c": {1: DYN}, "r": {1: DYN}, "mask": {3: DYN}}
    dynamic |= {} if capacity is None else {"c": None, "r": None}
    given = [*used(S=S), padded(2, S, USED)]
    module = AsLongAsTheMask()
    program = of_used_rows(absorbed(module, given, dynamic))
    if capacity is None:
        given = [*used(S=S, T=12), padded(2, S, 5)]
    assert_equal(module, program, [*given[:3], padded(2, S, 5)])


class Window(Used):
    """The newest four tokens: no shape says which."""

    def forward(self, x, c, r, mask=None):
        end = mask.shape[-1]
        k, v = self.expand(c)
        return self.finish(self.attend(self.query(x), self.join(k, r)[:, :, end - 4 : end], v[:, :, end - 4 : end], None), x)


def test_a_window_that_moves():
    module, dynamic = Window(), {"x": None, "c": None, "r": None, "mask": {3: DYN}}
    program = absorbed(module, [*used(), causal(1, 7)], dynamic)
    assert_equal(module, program, [*used(), causal(1, 5)])


def test_prompt_is_kept():
    """In an empty cache with room for more: K and V are cut to the prompt, which is cheaper expanded."""

    class Prompt(Used):
        def forward(self, x, c, r):
            k, v = self.expand(c)
            k, v = self.join(k, r)[:, :, : x.shape[1]], v[:, :, : x.shape[1]]
            return self.finish(F.scaled_dot_product_attention(self.query(x), k, v, is_causal=True), x)

    module, given = Prompt(H=4, L=16, N=12, V=12), inputs(2, 30, 40, L=16)
    for dynamic in (None, {"x": {1: DYN}, "c": None, "r": None}):
        program = export(module, given, dynamic)
        outcome = optimized(program)
        assert codes(outcome) == [Code.COST_PREFILL]
        assert_untouched(program, outcome)
