"""``save`` and ``load``: what was compiled for an optimized module, in a folder, for other processes."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from mla_compile.api import with_forward
from mla_compile.core import collector
from mla_compile.core.modules import models_within
from mla_compile.core.tracing import one_at_a_time
from mla_compile.dynamo import entry as entry_of_dynamo
from mla_compile.dynamo.entry import compiled_entry
from mla_compile.dynamo.forward import CompiledForward
from mla_compile.errors import ExportError, InputError, ModelFileError, OptionError
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.saved import folder as files
from mla_compile.saved import kernels, kind
from mla_compile.saved.entries import Entries, Entry
from mla_compile.saved.guards import guards_of_file
from mla_compile.saved.pickling import pickled, references, unpickled
from mla_compile.saved.record import Compiled, Recording

Model = TypeVar("Model", bound=torch.nn.Module)
Run = Callable[[Any], object]
"""Calls a model as it will be called."""

_OLDEST = "2.13"
_NATIVE = "native.so"
_REPORT = "report.pickle"


def save(model: torch.nn.Module, folder: str | os.PathLike[str], run: Run | None = None) -> None:
    """Compiles an optimized module for the calls of ``run`` and writes the code to a new folder, for :func:`load`.

    The calls run twice: while they are compiled, and once more with what was written, of which only what is called then
    is kept. Sizes that differ between calls are open in what is written.

    Args:
        model: what ``optimize`` returned. It stays as it is, and may have been called or not.
        folder: a path at which there is nothing yet, or an empty folder.
        run: calls the model that it is given as other processes will call theirs. By default two prompts with a
            growing cache, of one sequence and of two, are continued by ``generate()``: then any number of sequences,
            prompt and context fits.

    Raises:
        InputError: ``model`` is not what ``optimize`` returned for a module.
        ExportError: torch is older than 2.13, or what was compiled cannot be saved.
        TargetError: there is something in ``folder``, or it cannot be written.
    """
    forward = _forward_of(model)
    _check_means(model)
    options = _options(forward)
    where = Path(folder).absolute()
    files.check_new(where)
    twin = with_forward(model, forward.options, forward.mode, dict(forward.settings), forward.compilations.show)
    _only_whole(twin, ExportError)
    found = references(twin)
    recording = Recording({id(value): name for name, value in found.items()})
    made = _forward_of(twin)
    made.use(compiled_entry(made.compiler, package=recording, **made.settings), buffers=True)
    call = run or _generate
    call(twin)
    problem = recording.problem or (None if recording.compiled else "nothing was compiled")
    if made.keeps_buffers:
        problem = "it has a cache in buffers of its own, and which of these are kept as rows is found by tracing"
    if problem is not None:
        raise ExportError(f"{type(model).__name__} cannot be saved: {problem}")
    written = _tried(twin, recording, found, call)
    written[_REPORT] = pickled(vars(twin)["mla_report"], {})
    if (library := native.load() if forward.options.lowering == "op" else None) is not None:
        written[_NATIVE] = Path(library.path).read_bytes()
    files.write(where, _kind(twin, options) | {"code": kind.of_code(recording.traced)}, written)


def load(folder: str | os.PathLike[str], model: Model, **options: Any) -> Model:
    """What ``optimize`` would return for ``model``, with the code of a folder in the place of a compiler.

    Nothing is traced and nothing is compiled: a call like none that was saved is a :class:`ModelFileError`, which says
    what is different. The folder fits a model of the same class, names, shapes and dtypes, whatever its weights are,
    on the kind of machine, with the versions and the source code for which it was written. It holds native code:
    load only what you would run. Files that another user could have written are refused before they are read.

    Args:
        folder: what :func:`save` wrote.
        model: a module as it would be given to ``optimize``. It stays as it is.
        **options: those of ``optimize`` that must have been given when the folder was written; all of them are used.

    Raises:
        InputError: ``model`` is not a module.
        ModelFileError: the folder is damaged, somebody else's, or was not written for this model and machine.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"load() takes a folder and an nn.Module, got {type(model).__name__}")
    where = Path(folder).absolute()
    manifest = files.manifest(where, (*_names(0), _REPORT))
    saved = manifest["kind"]
    given = saved["options"]
    now = _kind(model, given | options) | {"code": saved["code"]}
    _refuse(where, kind.differences(saved, now))
    source = {name: kind.digest_of_module(name) for name in saved["code"]}
    _refuse(where, kind.differences({"code": saved["code"]}, {"code": source}))
    data = files.read(where, manifest["files"])
    mode, settings, parsed = _parsed(where, given)
    fast = with_forward(model, parsed, mode, settings, progress=False)
    _only_whole(fast, ModelFileError)
    place = tempfile.TemporaryDirectory(prefix="mla_compile_")
    with one_at_a_time(), collector.paused():
        entries = _entries(where, data, references(fast), Path(place.name), parsed.codegen == "inductor")
    weakref.finalize(entries, place.cleanup)
    _forward_of(fast).use(entries)
    vars(fast)["mla_report"] = unpickled(data[_REPORT], {})
    return fast


def _forward_of(model: object) -> CompiledForward:
    forward = vars(model).get("forward") if isinstance(model, torch.nn.Module) else None
    if not isinstance(forward, CompiledForward) or forward.outer is not None:
        raise InputError(f"save() takes a module that optimize() returned, got {type(model).__name__}")
    return forward


def _check_means(model: torch.nn.Module) -> None:
    if TorchVersion(torch.__version__) < _OLDEST:
        raise ExportError(f"saving compiled code takes torch {_OLDEST} or newer, this is {torch.__version__}")
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise ExportError("code of several ranks is not saved: each compiles its own")
    if elsewhere := {str(t.device) for t in (*model.parameters(), *model.buffers()) if t.device.type != "cpu"}:
        raise ExportError(f"code is saved for CPUs alone, and the model is on {', '.join(sorted(elsewhere))}")


def _generate(model: Any) -> None:
    if not hasattr(model, "warm_up"):
        raise ExportError(
            f"{type(model).__name__} has no generate(): give run=, a function that calls the model as it will be called"
        )
    model.warm_up(batch=1)
    model.warm_up(batch=2)


def _only_whole(model: torch.nn.Module, kind_of_error: type[Exception]) -> None:
    """Has a model within ``model`` that is called by itself, past the forward of ``model``, say so."""
    for part in models_within(model):
        if isinstance(forward := vars(part).get("forward"), CompiledForward):
            forward.use(_Refusing(type(part).__name__, type(model).__name__, kind_of_error))


@dataclass(frozen=True)
class _Refusing:
    part: str
    whole: str
    kind_of_error: type[Exception]

    def __call__(self, *_: Any) -> Any:
        raise self.kind_of_error(
            f"{self.part} was called by itself, and code is saved for calls of {self.whole} alone: save {self.part}"
        )


def _tried(twin: torch.nn.Module, recording: Recording, found: Mapping[str, object], run: Run) -> dict[str, bytes]:
    """What was compiled, as files, after a run of what they hold; what is not called in it is left out."""
    # The last first: it is open where earlier ones are not.
    written = [_written(one, recording.names) for one in reversed(recording.compiled)]
    used: list[dict[str, Path]] = [{} for _ in written]
    made = _forward_of(twin)
    with tempfile.TemporaryDirectory(prefix="mla_compile_") as place:
        with one_at_a_time():
            entries = []
            for at, (call, guards) in enumerate(written):
                fresh = Path(place, str(at))
                fresh.mkdir()
                inductor = made.options.codegen == "inductor"
                with kernels.noting(used[at], fresh) if inductor else nullcontext():
                    entries.append(_entry(call, guards, found))
        made.use(Entries(entries, "what was compiled"))
        try:
            run(twin)
        except ModelFileError as error:
            raise ExportError(
                f"{type(twin).__name__} cannot be saved, as calls differ when repeated: {error}"
            ) from error
    data: dict[str, bytes] = {}
    kept = [at for at, entry in enumerate(entries) if entry.hits]
    for number, at in enumerate(kept):
        data |= dict(zip(_names(number), written[at], strict=True))
        data |= {f"kernel_{key}.so": file.read_bytes() for key, file in used[at].items()}
    return data


def _names(number: int) -> tuple[str, str]:
    return f"call_{number}.pickle", f"guards_{number}.pickle"


def _written(one: Compiled, names: Mapping[int, str]) -> tuple[bytes, bytes]:
    return pickled((one.code, one.modules, one.values), names), one.guards


def _entry(call: bytes, guards: bytes, found: Mapping[str, object]) -> Entry:
    code, modules, values = unpickled(call, found)
    scope = {**vars(entry_of_dynamo), **values}
    scope |= {alias: importlib.import_module(name) for alias, name in modules.items()}
    checks = guards_of_file(guards, found, code, scope)
    return Entry(checks, FunctionType(code, scope, code.co_name, (None,)))


def _entries(
    where: Path, data: Mapping[str, bytes], found: Mapping[str, object], place: Path, inductor: bool
) -> Entries:
    """The calls of a folder, whose files are ``data``; native code is copied to ``place`` and loaded from there."""
    libraries = {name: place / name for name in data if name.endswith(".so")}
    for name, path in libraries.items():
        path.write_bytes(data[name])
    if _NATIVE in libraries:
        native.offer(str(libraries[_NATIVE]))
        native.load()
    of_inductor = {name[len("kernel_") : -len(".so")]: path for name, path in libraries.items() if name != _NATIVE}
    entries = []
    with kernels.given(of_inductor, place) if inductor else nullcontext():
        while (names := _names(len(entries)))[0] in data:
            try:
                entries.append(_entry(*(data[name] for name in names), found))
            except ModelFileError as error:
                raise ModelFileError(f"{where} does not fit: {error}") from error
    return Entries(entries, str(where))


def _kind(model: torch.nn.Module, options: Mapping[str, Any]) -> kind.Kind:
    return {
        "versions": kind.of_versions(),
        "machine": kind.of_machine(),
        "options": dict(options),
        "model": kind.of_model(model),
    }


def _options(forward: CompiledForward) -> dict[str, Any]:
    """The options as plain data. Raises :class:`ExportError` for one that is not."""
    given = {field.name: getattr(forward.options, field.name) for field in fields(Options)}
    given |= {"inductor": dict(forward.options.inductor), "mode": forward.mode, **forward.settings}
    for name, value in given.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ExportError(f"{name}={value!r} cannot be saved") from error
    return given


def _parsed(where: Path, given: Mapping[str, Any]) -> tuple[str | None, dict[str, Any], Options]:
    """Mode, settings of Dynamo and options of a manifest."""
    ours = {field.name: given[field.name] for field in fields(Options) if field.name in given}
    settings = {name: value for name, value in given.items() if name in ("dynamic", "fullgraph")}
    try:
        return given.get("mode"), settings, Options(**ours)
    except OptionError as error:
        raise ModelFileError(f"{where}: {error}") from error


def _refuse(where: Path, differences: list[str]) -> None:
    if differences:
        raise ModelFileError(f"{where} does not fit: {'; '.join(differences)}. Save it again here, or use optimize()")
