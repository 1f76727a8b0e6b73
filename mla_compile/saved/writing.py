"""Implements :func:`mla_compile.save`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import PackageError

from mla_compile.api import with_forward
from mla_compile.core.tracing import one_at_a_time
from mla_compile.dynamo.entry import compiled_entry
from mla_compile.dynamo.forward import CompiledForward
from mla_compile.errors import ExportError, ModelFileError, brief
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.saved import folder as files
from mla_compile.saved import kernels
from mla_compile.saved.calls import NATIVE, REPORT, entry_of, forward_of, kind_of, names, only_whole
from mla_compile.saved.entries import Entries
from mla_compile.saved.kind import of_code
from mla_compile.saved.pickling import pickled, references
from mla_compile.saved.record import Recording

Calls = Callable[[Any], object]
"""A function that calls a model in the way in which other processes will call it."""


def write(model: torch.nn.Module, folder: Path, run: Calls | None) -> None:
    """Compile the calls of ``run``, repeat them with the compiled code, and write the code that the repetition used."""
    forward = forward_of(model)
    _check_means(model)
    options = _options(forward)
    files.check_new(folder)
    twin = with_forward(
        model, forward.options, forward.mode, dict(forward.settings), progress=forward.compilations.show
    )
    only_whole(twin, ExportError)
    recording = _recorded(twin, run or _generate)
    code = of_code(recording.traced)
    written = _tried(twin, recording, run or _generate)
    written[REPORT] = pickled(vars(twin)["mla_report"], {})
    if (library := native.load() if forward.options.lowering == "op" else None) is not None:
        written[NATIVE] = Path(library.path).read_bytes()
    files.write(folder, {**kind_of(twin, options), "code": code}, written)


def _recorded(twin: torch.nn.Module, run: Calls) -> Recording:
    """Record the code compiled for the calls of ``run``. Raises :class:`ExportError` if it cannot be saved."""
    forward = forward_of(twin)
    forward.unwrap()
    recording = Recording({id(value): name for name, value in references(twin).items()})
    forward.use(compiled_entry(forward.compiler, package=recording, **forward.settings), buffers=True)
    try:
        run(twin)
    except PackageError as error:
        raise ExportError(f"{type(twin).__name__} cannot be saved: {brief(error)}") from error
    problem = recording.problem or (
        None if recording.compiled else "nothing was compiled: run= has to call it, without gradients"
    )
    if forward.keeps_buffers:
        problem = "it has a cache in buffers of its own, and which of these are kept as rows is found by tracing"
    if problem is not None:
        raise ExportError(f"{type(twin).__name__} cannot be saved: {problem}")
    return recording


def _tried(twin: torch.nn.Module, recording: Recording, run: Calls) -> dict[str, bytes]:
    """Repeat ``run`` with the compiled calls. Return the files of the calls that were used, by name."""
    # The last call is tried first, because more sizes are dynamic in later calls.
    written = [
        (pickled((one.code, one.modules, one.values), recording.names), one.guards)
        for one in reversed(recording.compiled)
    ]
    forward = forward_of(twin)
    used: list[dict[str, Path]] = [{} for _ in written]
    with tempfile.TemporaryDirectory(prefix="mla_compile_") as place:
        entries = []
        with one_at_a_time():
            for number, (call, guards) in enumerate(written):
                fresh = Path(place, str(number))
                fresh.mkdir()
                with kernels.noting(used[number], fresh):
                    entries.append(entry_of(call, guards, twin))
        forward.use(Entries(entries, "what was compiled"))
        try:
            run(twin)
        except ModelFileError as error:
            raise ExportError(f"{type(twin).__name__} cannot be saved: when its calls are repeated, {error}") from error
        data: dict[str, bytes] = {}
        # Calls are numbered in the order of compilation, which is also the likely order of use.
        for number, at in enumerate(at for at in reversed(range(len(entries))) if entries[at].hits):
            data |= dict(zip(names(number), written[at], strict=True))
            data |= {f"kernel_{key}.so": file.read_bytes() for key, file in used[at].items()}
    return data


def _generate(model: object) -> None:
    if not hasattr(model, "warm_up"):
        raise ExportError(
            f"{type(model).__name__} has no generate(): give run=, a function that calls the model as it will be called"
        )
    model.warm_up(batch=1)
    if forward_of(model).recompiles.drains:
        raise ExportError(
            f"{type(model).__name__} has a cache that fills and drains, and a few tokens do not show all its sizes: "
            "give run=, a function of the model that generates until each has come twice"
        )
    model.warm_up(batch=2)


def _check_means(model: torch.nn.Module) -> None:
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise ExportError("code of several ranks is not saved: each compiles its own")
    if elsewhere := {str(t.device) for t in (*model.parameters(), *model.buffers()) if t.device.type != "cpu"}:
        raise ExportError(f"code is saved for CPUs alone, and the model is on {', '.join(sorted(elsewhere))}")


def _options(forward: CompiledForward) -> dict[str, object]:
    """Return the options as plain data. Raises :class:`ExportError` for an option that JSON cannot hold."""
    given = {field.name: getattr(forward.options, field.name) for field in fields(Options)}
    given |= {"inductor": dict(forward.options.inductor), "mode": forward.mode, **forward.settings}
    for name, value in given.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ExportError(f"{name}={value!r} cannot be saved") from error
    return given
