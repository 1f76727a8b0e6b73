"""Compile a graph with symbolic sizes using Inductor, and check the guards of the compiled code in each call.

The graphs come from ``torch.export``, so Dynamo does not check whether Inductor specialised a size. For example,
Inductor specialises complex rotations to the number of example tokens. If no compiled code fits a call's sizes, the
graph is compiled again, up to a limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mla_compile.core.counting import count
from mla_compile.core.guards import guards_of
from mla_compile.core.program import Call, Program
from mla_compile.core.tracing import one_at_a_time

logger = logging.getLogger("mla_compile")
Sizes = tuple[int, ...]


class Compiled:
    """A callable that takes a program's flat inputs. ``count`` is the number of compilations, at most ``limit``.

    After ``limit`` compilations, calls with sizes that no compiled code fits run the graph uncompiled.
    """

    def __init__(self, program: Program, patches: Mapping[str, object], limit: int, name: str) -> None:
        self.count, self.limit, self.name = 0, limit, name
        self._program, self._patches = program, dict(patches)
        values = [node.meta["val"] for node in program.placeholders]
        tensors = [(k, v) for k, v in enumerate(values) if isinstance(v, torch.Tensor)]
        self._open = [(k, axis) for k, v in tensors for axis, n in enumerate(v.shape) if isinstance(n, torch.SymInt)]
        self._made: list[tuple[Callable[[Sizes], bool], Call]] = []
        self._known: dict[Sizes, Call] = {}

    def __call__(self, *inputs: Any) -> object:
        """Return the graph's results."""
        given = list(inputs)
        for index in {k for k, _ in self._open}:
            given[index] = _dense(given[index])
        sizes = tuple(int(given[index].shape[axis]) for index, axis in self._open)
        call = self._known.get(sizes)
        return (call or self._find(sizes, given))(*given)

    def _find(self, sizes: Sizes, inputs: Sequence[object]) -> Call:
        call = self._fitting(sizes) or self._made_for(sizes, inputs)
        if len(self._known) > 4096:  # prompt lengths are unbounded
            self._known.clear()
        self._known[sizes] = call
        return call

    def _fitting(self, sizes: Sizes) -> Call | None:
        return next((call for holds, call in self._made if holds(sizes)), None)

    @one_at_a_time()
    def _made_for(self, sizes: Sizes, inputs: Sequence[object]) -> Call:
        call = self._fitting(sizes)  # another thread may have compiled the graph meanwhile
        if call is None and self.count < self.limit:
            self.count += 1
            count("compilations", graph=self.name)
            holds, call = self._compile(inputs)
            self._made.append((holds, call))
        if call is None:
            count("fallbacks", reason="too many sizes")
            logger.warning("%s: compiled %d times, the limit; sizes %s run uncompiled", self.name, self.count, sizes)
            call = self._program.gm.forward
        return call

    def _compile(self, inputs: Sequence[Any]) -> tuple[Callable[[Sizes], bool], Call]:
        from torch._inductor.compile_fx import compile_fx  # imported here, because it loads all of Inductor

        env = ShapeEnv()
        mode = FakeTensorMode(shape_env=env)
        examples: list[torch.Tensor] = []
        for index, (node, value) in enumerate(zip(self._program.placeholders, inputs, strict=True)):
            kinds = [DimDynamic.STATIC] * value.dim()
            for k, axis in self._open:
                if k == index and value.shape[axis] > 1:  # torch specialises 0 and 1 in any case
                    kinds[axis] = DimDynamic.DYNAMIC
            context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
            examples.append(mode.from_tensor(value, symbolic_context=context, source=ConstantSource(node.name)))
        with tracing(TracingContext(mode)), torch.no_grad():
            code: Any = compile_fx(self._program.gm, examples, config_patches=self._patches)
        shown = [examples[index].shape[axis] for index, axis in self._open]
        fixed = {at: n for at, n in enumerate(shown) if isinstance(n, int)}
        symbols = [n for n in shown if not isinstance(n, int)]
        fits = guards_of(env, symbols)

        def holds(sizes: Sizes) -> bool:
            if any(sizes[at] != n for at, n in fixed.items()):
                return False
            return fits([n for at, n in enumerate(sizes) if at not in fixed])

        call: Call = code
        return holds, call


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` with contiguous strides, because compiled code checks strides even of axes of length 1."""
    strides = make_contiguous_strides_for(tensor.shape)
    if tensor.stride() == strides:
        return tensor
    return tensor.contiguous().as_strided(tensor.shape, strides)
