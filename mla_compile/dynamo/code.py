"""Generate code for a graph with Inductor, or run the graph itself. Each kind of layer is compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import fx
from torch._dynamo.exc import RestartAnalysis

from mla_compile.capture.emit import constants_as_inputs
from mla_compile.core.counting import count
from mla_compile.core.program import Call, Inputs
from mla_compile.dynamo.progress import Compilations
from mla_compile.errors import OptionError, brief, warn
from mla_compile.options import Options
from mla_compile.repeats.split import split


class CodeGenerator:
    """Compiles graphs with Inductor in a user's mode and options. With ``codegen="eager"``, graphs run as they are."""

    def __init__(self, options: Options, mode: str | None, compilations: Compilations) -> None:
        self.options = options
        self.patches = _inductor_patches(mode, options)
        self.compilations = compilations

    def whole(self, gm: fx.GraphModule, example_inputs: Inputs, layers: int = 1) -> Call:
        """Compile the graph as a whole. ``layers``: how many equal layers of the model run the graph."""
        if self.options.codegen == "eager":
            return gm
        self.compilations.stage("code" if layers == 1 else f"code of {layers} equal layers")
        count("compilations", graph="forward")
        from torch._inductor import compile_fx, exc  # imported on use: loads all of Inductor

        # Code that is saved loses the constants of its graph (torch 2.13), and would take its inputs for these.
        saved = torch._functorch.config.bundled_autograd_cache
        constants = constants_as_inputs(gm) if saved else ()
        inputs = [*example_inputs, *(fake for fake, _ in constants)]
        try:
            code: object = compile_fx.compile_fx(gm, inputs, config_patches=self.patches)
        except exc.InductorError as error:
            if self.options.strict or not isinstance(error.inner_exception, exc.InvalidCxxCompiler):
                raise
            count("fallbacks", reason="no C++ compiler")
            warn(
                "torch finds no C++ compiler, which Inductor needs: graphs run uncompiled, and slower; install g++, "
                'or choose codegen="eager"'
            )
            code = gm
        call, values = cast("Call", code), tuple(value for _, value in constants)
        return (lambda *given: call(*given, *values)) if values else call

    def by_parts(self, emitted: Callable[[], fx.GraphModule], example_inputs: Inputs) -> Call | None:
        """Compile one layer of each kind in a graph, and return code that calls the compiled layers.

        Returns None if the graph has to be compiled as a whole, and after a failure (with a warning). ``emitted``
        returns the graph in ATen, with ``meta["val"]`` on every node.
        """
        if self.options.codegen == "eager" or self.options.layers == "whole" or self._whole_is_asked():
            return None
        try:
            found = split(emitted(), example_inputs)
            if found is None:
                return None
            calls, examples = found
            for name, values in examples.items():
                layers = len(calls.graph.find_nodes(op="call_module", target=name))
                code = self.whole(cast("fx.GraphModule", calls.get_submodule(name)), values, layers)
                # The code is set as a plain attribute, because a user's global module hooks would see calls of a
                # submodule.
                delattr(calls, name)
                setattr(calls, name, code.forward if isinstance(code, fx.GraphModule) else code)
        except RestartAnalysis:  # not a failure: Dynamo traces again with what it has learnt
            raise
        except Exception as error:  # after any failure, the graph can be compiled as a whole
            if self.options.strict:
                raise
            message = f"a graph is compiled as a whole instead of layer by layer, because of a failure: {brief(error)}"
            warn(message)
            return None
        return calls.forward

    def _whole_is_asked(self) -> bool:
        """Whether the user's Inductor options require compiling the whole graph.

        A CUDA graph holds the addresses of one layer's weights, and folded constants belong to one layer.
        """
        from torch._inductor import config  # imported on use: loads all of Inductor

        settings = ((config.triton.cudagraphs, "triton.cudagraphs"), (config.freezing, "freezing"))
        return any(self.patches.get(name, default) for default, name in settings)


def _inductor_patches(mode: str | None, options: Options) -> dict[str, object]:
    """Return the Inductor settings of a mode, overridden by explicit Inductor options."""
    patches: dict[str, object] = {}
    if mode is not None and not isinstance(mode, str):
        raise OptionError(f"mode is {mode!r}, expected a string")
    if mode is not None and mode != "default":
        from torch._inductor import list_mode_options  # imported on use: loads all of Inductor

        try:
            patches.update(list_mode_options(mode))
        except RuntimeError as error:
            raise OptionError(str(error)) from error
    patches.update({name.replace("-", "_"): value for name, value in options.inductor.items()})
    return patches
