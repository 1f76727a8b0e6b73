"""The forward of an optimized module: the original forward, compiled by the ``mla`` backend in its own Dynamo cache."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_map_only

from mla_compile.core.inner import called_within, models_within
from mla_compile.core.modules import shallow, share_marks
from mla_compile.core.places import Place
from mla_compile.core.reached import is_a
from mla_compile.core.tracing import is_traced, one_at_a_time
from mla_compile.core.wrapped import OwnForward, Unwrapped
from mla_compile.dynamo.compiler import GRADIENTS, Compiler
from mla_compile.dynamo.entry import compiled_entry
from mla_compile.dynamo.outside import Unseen
from mla_compile.dynamo.progress import Compilations
from mla_compile.dynamo.recompiles import Recompiles, running
from mla_compile.dynamo.trace import PassFailedError, trace
from mla_compile.dynamo.watch import compiled, unwatch, watch_methods
from mla_compile.dynamo.wrappers import take_off
from mla_compile.errors import InputError, MlaCompileError, warn
from mla_compile.options import Options
from mla_compile.report.report import LEFT_OUT, NOTHING_YET, Report
from mla_compile.runtime.own_buffers import FindKept, KeptBuffer, OwnBuffers

_GLOBAL_HOOKS = (
    "a global module hook is registered (register_module_forward_hook), and compiled code would not call another that "
    "is registered later; as long as there is one, the model runs in its original, uncompiled form"
)


class CompiledForward(OwnForward):
    """The ``forward`` of an optimized module.

    The module can be deep-copied and pickled. The copies are optimized with the same options, and compile anew.

    ``outer``: the optimized module that contains ``module``. If a method of ``outer`` (``generate()`` of a wrapper)
    calls ``module`` directly, ``module`` is compiled separately. Within a call of ``outer``, the plain forward of
    ``module`` runs.
    """

    name = "forward"

    def __init__(
        self,
        module: torch.nn.Module,
        options: Options,
        mode: str | None,
        settings: dict[str, Any],
        replaced: Callable[..., Any] | None = None,
        outer: torch.nn.Module | None = None,
        *,
        progress: bool | None = False,
    ) -> None:
        self.module = module
        self.outer = outer
        self.options = options
        self.mode = mode
        self.settings = settings
        # torch keeps every backend until Dynamo is reset, so a strong reference here would keep the weights alive.
        report = weakref.WeakMethod(self._report)

        def tell() -> None:
            if (alive := report()) is not None:
                alive()

        kind = type(module)
        function = getattr(kind, self.name)
        code = getattr(inspect.unwrap(function), "__code__", None)
        called = f"{kind.__name__}.{self.name}"
        place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        self.recompiles = Recompiles(dynamic=settings.get("dynamic"), function=f"'{called}'{place}", on_note=tell)
        self.compilations = Compilations(called, show=progress)
        self.compiler = Compiler(
            options, mode, on_report=tell, recompiles=self.recompiles, compilations=self.compilations
        )
        self.unseen = Unseen(tell)
        self.left_out: list[str] = []
        self._warned: set[str] = set()
        # A forward that was set on the object itself (a patch or wrapper) is part of the model, so it is compiled, too.
        self.replaced = replaced
        # generate() and other callers read the signature of forward to learn which arguments a model takes.
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(types.MethodType(function, module))
        self.__code__ = code  # torch.export reads it
        self._run = compiled_entry(self.compiler, **settings)
        self._unwrapped: Unwrapped | None = None
        self._buffers = self._own_buffers()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the module's forward.

        The forward runs uncompiled if gradients are needed, if a trace runs, if a global hook exists, or within a call
        of ``outer``.
        """
        if is_traced() or self._is_within():
            return self._plainly(*args, **kwargs)
        device = self._device_of_all()
        share_marks(self._copies)
        try:
            with compiled():
                return self._placed(device, args, kwargs)
        finally:
            share_marks(self._copies)

    def _placed(self, device: torch.device | None, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if device is None:
            return self._called(args, kwargs)
        if (hook := vars(self.module).get("_hf_hook")) is None:
            return self._called(*tree_map_only(torch.Tensor, lambda t: t.to(device), (args, kwargs)))
        return hook.post_forward(self.module, self._called(*hook.pre_forward(self.module, *args, **kwargs)))

    @functools.cached_property
    def _copies(self) -> list[torch.nn.Module]:
        return [self.module, *models_within(self.module)]

    def _device_of_all(self) -> torch.device | None:
        """Remove wrappers from forwards, and return the device to which these wrappers moved inputs.

        Returns None if no removed wrapper placed tensors. Wrappers are removed in the first call and not earlier,
        because the hooks of some libraries complete a model in its first call.
        """
        if self.outer is not None:
            outer = vars(self.outer).get("forward")
            return outer._device_of_all() if isinstance(outer, CompiledForward) else None
        if self._unwrapped is None:
            self._take_off()
        assert self._unwrapped is not None
        return self._unwrapped.device

    @one_at_a_time()
    def _take_off(self) -> None:
        if self._unwrapped is None:  # another thread may have removed the wrappers
            found = take_off(self.module)
            for part in (self, *self._parts):
                part.compiler.wrapped = found
                part.compiler.told, part._warned = self.compiler.told, self._warned
            self._unwrapped = found

    def _plainly(self, *args: object, **kwargs: object) -> object:
        forward = self.replaced or functools.partial(type(self.module).forward, self.module)
        return forward(*args, **kwargs)

    def _called(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if self._trains() or self._is_watched():
            return self._plainly(*args, **kwargs)
        with self.unseen.call(self._has_seen_attention), self.recompiles.settings(), self.compilations.of_this_thread():
            if self._buffers is not None:
                self._buffers.prepare(args, kwargs)
            done = self._run(self.module, args, kwargs, self.replaced)
        # The old entry would treat the sizes of the replaced weights as dynamic.
        if self.compiler.finishing.happened:
            self.compiler.finishing.happened = False
            self._run = compiled_entry(self.compiler, **self.settings)
        return done

    def _has_seen_attention(self) -> bool:
        if self.compiler.reports or self.compiler.failures or self.compiler.finishing.happened:
            return True
        whole = None if self.outer is None else vars(self.outer).get("forward")
        return isinstance(whole, CompiledForward) and any(part.compiler.reports for part in (whole, *whole._parts))

    def unwrap(self) -> None:
        """Remove wrappers now instead of in the first call."""
        self._device_of_all()

    def use(self, run: Callable[..., object], *, buffers: bool = False) -> None:
        """From now on, call ``run(module, args, kwargs, forward)`` instead of the code that Dynamo compiled.

        ``buffers``: whether rows may still replace buffers of K and V. Finding such buffers may require a trace.
        """
        self._run = run
        self._buffers = self._buffers if buffers else None

    @property
    def keeps_buffers(self) -> bool:
        """Whether rows have replaced buffers of K and V."""
        return self._buffers is not None and self._buffers.keeps

    def install(self) -> None:
        """Make this object the forward of its module. The module's ``mla_report`` is updated after each compilation."""
        if self.outer is None and not hasattr(self.module, "mla_report"):
            self._report()
        vars(self.module)["forward"] = self
        watch_methods(self.module)
        if hasattr(self.module, "get_compiled_call"):
            vars(self.module)["get_compiled_call"] = self.call_module
        if self.outer is None and not hasattr(self.module, "warm_up") and hasattr(self.module, "generate"):
            vars(self.module)["warm_up"] = self.warm_up

    def warm_up(self, batch: int = 1, prompt: int = 16, context: int | None = None) -> None:
        """Compile the graphs that ``generate()`` needs for ``batch`` prompts of about ``prompt`` tokens.

        This method calls ``generate()`` with prompts of different lengths. Sizes that differ between these calls are
        dynamic afterwards. ``context``: an additional prompt length, at which another form may be cheaper. Optimized
        language models of transformers have this method, unless their class has its own ``warm_up``. Raises
        :class:`InputError` for numbers below 1.
        """
        lengths = [prompt, prompt + 1, *(() if context is None else (context,))]
        if batch < 1 or min(lengths) < 1:
            raise InputError(
                f"warm_up() takes numbers from 1 on, got batch={batch}, prompt={prompt}, context={context}"
            )
        model: Any = self.module
        device = next(model.parameters()).device
        for length in lengths:
            ids = torch.arange(batch * length, device=device).reshape(batch, length) % 7 + 1
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False)

    def below(self, forward: Callable[..., object] | None) -> None:
        """Set the forward to compile; None is the forward of the module's class."""
        self.replaced = forward
        self._buffers = self._own_buffers()

    def _own_buffers(self) -> OwnBuffers | None:
        # A forward that was set on the object is bound to the original module, and would read the original's buffers.
        if self.compiler.options.cache != "latent" or self.replaced is not None:
            return None
        return OwnBuffers(self.module, self._plain, _kept_buffers(replace(self.options, verify=False)))

    def _plain(self) -> torch.nn.Module:
        """Return the module as it was before optimization, with the same weights, buffers and submodules."""
        plain = shallow(self.module)
        self.uninstall(plain)
        return plain

    def uninstall(self, module: torch.nn.Module) -> None:
        """Restore the previous forward in ``module``, a copy of this forward's module."""
        del vars(module)["forward"]
        if self.replaced is not None:
            vars(module)["forward"] = self.replaced
        unwatch(module)
        for name in ("get_compiled_call", "warm_up"):
            vars(module).pop(name, None)

    def _report(self) -> None:
        if self.outer is not None:
            if isinstance(outer := vars(self.outer).get("forward"), CompiledForward):
                outer._report()
            return
        all_parts = [self, *self._parts]
        found = ((self._called_within.get(part.module, ""), part.compiler.reports) for part in all_parts)
        report = Report.merged(one.within(path) for path, reports in found for one in reports)
        unseen = [part.unseen.message for part in all_parts if part.unseen.message is not None]
        unseen += [message for part in all_parts for message in part.left_out]
        unseen += [part.waits for part in all_parts if isinstance(part, CompiledMethod) and not part.compiler.graphs]
        first = unseen if unseen or any(part.compiler.graphs for part in all_parts) else [NOTHING_YET]
        told = [note for part in all_parts for note in (*part.recompiles.notes, *part.recompiles.left_out)]
        notes = dict.fromkeys((*first, *report.messages, *told))
        vars(self.module)["mla_report"] = replace(report, messages=tuple(notes))

    @functools.cached_property
    def _called_within(self) -> dict[torch.nn.Module, str]:
        return called_within(self.module)

    @functools.cached_property
    def _parts(self) -> list[CompiledForward]:
        found = (one for part in (self.module, *self._called_within) for one in vars(part).values())
        return [one for one in found if is_a(one, CompiledForward) and one is not self]

    def _is_within(self) -> bool:
        """Whether ``outer`` makes the current call. The compiler of ``outer`` then handles the call."""
        return self.outer is not None and running() is not None

    def call_module(self, *_: object) -> Callable[..., object]:
        """Return the module's call. This replaces transformers' ``get_compiled_call``, which would compile it again."""
        return self.module.__call__

    def _trains(self) -> bool:
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in self.module.parameters()):
            return False
        if not self.module.training:
            self._warn_once(GRADIENTS.format(what="the model runs uncompiled"))
        return True

    def _is_watched(self) -> bool:
        if not (global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks):
            return False
        self._warn_once(_GLOBAL_HOOKS)
        return True

    def tell_left_out(self, message: str) -> None:
        """Say once, in a warning and in the report, that a method runs an attention uncompiled."""
        if message not in self.left_out:
            self.left_out.append(message)
            self._report()
            warn(message)

    def compile_method(self, name: str) -> None:
        """Compile a method of the module's class from its next call on, in the same way as the forward."""
        shown = self.compilations.show
        made = CompiledMethod(self.module, name, self.options, self.mode, dict(self.settings), progress=shown)
        made.compiler.wrapped, made.compiler.told = self.compiler.wrapped, self.compiler.told
        vars(self.module)[name] = made
        whole = self if self.outer is None else vars(self.outer)["forward"]
        vars(whole).pop("_parts", None)
        whole._report()

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warn(message)

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledForward:
        module, replaced, outer = copy.deepcopy((self.module, self.replaced, self.outer), memo)
        settings, shown = dict(self.settings), self.compilations.show
        return CompiledForward(module, self.options, self.mode, settings, replaced, outer, progress=shown)

    def __reduce__(self) -> tuple[object, ...]:
        made = functools.partial(CompiledForward, progress=self.compilations.show)
        return made, (self.module, self.options, self.mode, self.settings, self.replaced, self.outer)


def _kept_buffers(options: Options) -> FindKept:
    """Return a function that traces a call with these options and finds the buffers that may be kept as rows."""

    def kept(
        module: torch.nn.Module, args: Sequence[object], kwargs: Mapping[str, object], empty: Collection[Place]
    ) -> list[KeptBuffer]:
        try:
            return trace(module, args, kwargs, options, empty).kept
        except InputError:
            raise
        except PassFailedError as error:  # the graphs that the call itself compiles may still succeed
            if options.strict:
                raise
            warn(f"buffers of K and V stay as they are, because of a failure: {error}")
            return []
        except MlaCompileError:  # when the call is compiled, the reason is reported
            return []

    return kept


class CompiledMethod(CompiledForward):
    """A compiled method of an optimized module, other than ``forward``, that runs an attention in its own code."""

    def __init__(
        self,
        module: torch.nn.Module,
        name: str,
        options: Options,
        mode: str | None,
        settings: dict[str, Any],
        *,
        progress: bool | None = False,
    ) -> None:
        self.name = name
        method = types.MethodType(getattr(type(module), name), module)
        super().__init__(module, options, mode, settings, method, module, progress=progress)
        called = f"{type(module).__name__}.{name}()"
        self.waits = f"{LEFT_OUT} in {called}, which is compiled from its next call on"

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledMethod:
        shown = self.compilations.show
        module = copy.deepcopy(self.module, memo)
        return CompiledMethod(module, self.name, self.options, self.mode, dict(self.settings), progress=shown)

    def __reduce__(self) -> tuple[object, ...]:
        made = functools.partial(CompiledMethod, progress=self.compilations.show)
        return made, (self.module, self.name, self.options, self.mode, self.settings)
