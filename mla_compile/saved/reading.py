"""Implements :func:`mla_compile.load`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from mla_compile.api import with_forward
from mla_compile.core import collector
from mla_compile.core.modules import Module
from mla_compile.core.tracing import one_at_a_time
from mla_compile.errors import ModelFileError, OptionError
from mla_compile.kernels.cpu import native
from mla_compile.options import Options
from mla_compile.saved import folder as files
from mla_compile.saved import kernels
from mla_compile.saved.calls import NATIVE, REPORT, entry_of, forward_of, kind_of, names, only_whole
from mla_compile.saved.entries import Entries, Entry
from mla_compile.saved.kind import differences, digest_of_module
from mla_compile.saved.pickling import unpickled


def read(folder: Path, model: Module, options: Mapping[str, object]) -> Module:
    """Return an optimized module for ``model`` that runs saved code from a folder."""
    manifest = files.manifest(folder, (*names(0), REPORT))
    saved = manifest["kind"]
    given = saved["options"]
    now = {**kind_of(model, {**given, **options}), "code": saved["code"]}
    _refuse(folder, differences({"versions": saved["versions"]}, {"versions": now["versions"]}))
    _refuse(folder, differences(saved, now))  # comparable, because the same version of mla_compile made both
    source = {name: digest_of_module(name) for name in saved["code"]}  # imports the modules
    _refuse(folder, differences({"code": saved["code"]}, {"code": source}))
    data = files.read(folder, manifest["files"])
    mode, settings, parsed = _parsed(folder, given)
    fast = with_forward(model, parsed, mode, settings, progress=False)
    only_whole(fast, ModelFileError)
    forward = forward_of(fast)
    forward.unwrap()
    with (
        tempfile.TemporaryDirectory(prefix="mla_compile_") as place,
        one_at_a_time(),
        collector.paused(),
        forward.recompiles.settings(),  # Dynamo then also guards hooks
    ):
        entries = _entries(folder, data, fast, Path(place), inductor=parsed.codegen == "inductor")
    forward.use(entries)
    vars(fast)["mla_report"] = unpickled(data[REPORT], {})
    return fast


def _entries(where: Path, data: Mapping[str, bytes], model: torch.nn.Module, place: Path, *, inductor: bool) -> Entries:
    """Return the calls in the files ``data``. Native code is copied to ``place`` and loaded from this copy."""
    libraries = {name: place / name for name in data if name.endswith(".so")}
    for name, path in libraries.items():
        path.write_bytes(data[name])
    if NATIVE in libraries:
        native.offer(str(libraries[NATIVE]))
        native.load()
    of_inductor = {name[len("kernel_") : -len(".so")]: path for name, path in libraries.items() if name != NATIVE}
    entries: list[Entry] = []
    with kernels.given(of_inductor, place) if inductor else nullcontext():
        while (pair := names(len(entries)))[0] in data:
            call, guards = (data[name] for name in pair)
            entries.append(entry_of(call, guards, model))
    try:
        _ = entries[0].guards  # the guards of the other calls are built and checked on first use
    except ModelFileError as error:
        raise ModelFileError(f"{where} does not fit: {error}") from error
    return Entries(entries, str(where))


def _parsed(where: Path, given: Mapping[str, Any]) -> tuple[str | None, dict[str, object], Options]:
    """Return the mode, the settings for Dynamo and the :class:`Options` that a manifest contains."""
    ours = {field.name: given[field.name] for field in fields(Options) if field.name in given}
    settings = {name: value for name, value in given.items() if name in ("dynamic", "fullgraph")}
    try:
        return given.get("mode"), settings, Options(**ours)
    except OptionError as error:
        raise ModelFileError(f"{where}: {error}") from error


def _refuse(where: Path, differences: list[str]) -> None:
    if differences:
        raise ModelFileError(f"{where} does not fit: {'; '.join(differences)}. Save it again here, or use optimize()")
