"""Import ONNX Runtime, choose the device on which a model runs, and create its sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mla_compile.errors import ModelFileError, OptionError, nearest
from mla_compile.onnx import native
from mla_compile.onnx.manifest import Manifest

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, SessionOptions

Provider = str | tuple[str, Mapping[str, object]]

_PREFERRED = ("CUDAExecutionProvider", "CPUExecutionProvider")


@dataclass(frozen=True)
class Decision:
    """The native library to register (None for no library), and the reason."""

    library: Path | None
    reason: str

    def __str__(self) -> str:
        return f"{self.library or 'no native library'}: {self.reason}"


@dataclass(frozen=True)
class OrtDevice:
    """The device that holds the caches: the type and number that an OrtValue uses."""

    type: str = "cpu"
    id: int = 0


def onnxruntime() -> ModuleType:
    """Import and return ``onnxruntime``. If it is missing, raise :class:`ModelFileError` and say what to install."""
    try:
        return import_module("onnxruntime")
    except ImportError:
        raise ModelFileError(
            'running an exported model needs onnxruntime, which is not installed: pip install "mla-compile[onnx]" '
            '(for CUDA: "mla-compile[onnx-gpu]")'
        ) from None


def errors(ort: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions of ONNX Runtime, which have no common base class. IO binding raises RuntimeError."""
    state = vars(ort.capi.onnxruntime_pybind11_state)
    return RuntimeError, *(kind for kind in state.values() if isinstance(kind, type) and issubclass(kind, Exception))


def choose(ort: ModuleType, wanted: Sequence[Provider] | None) -> list[tuple[str, dict[str, object]]]:
    """Return the execution providers to request, with their options.

    ``wanted`` may use short names, such as ``cuda`` for ``CUDAExecutionProvider``. None means CUDA (if available) and
    CPU.
    """
    available = list(ort.get_available_providers())
    if wanted is None:
        return [(name, {}) for name in _PREFERRED if name in available]
    pairs = [(entry, {}) if isinstance(entry, str) else (entry[0], dict(entry[1])) for entry in wanted]
    if not pairs:
        raise OptionError(f"providers is empty, expected some of {', '.join(available)}")
    full = {name.removesuffix("ExecutionProvider").lower(): name for name in available}
    pairs = [(full.get(name.lower(), name), options) for name, options in pairs]
    for name, _ in pairs:
        if name not in available:
            raise OptionError(
                f"provider {name!r} is not in this onnxruntime {ort.__version__}{nearest(name, available)}; "
                f"it has {', '.join(available)} (for CUDA: pip uninstall onnxruntime, then "
                'pip install "mla-compile[onnx-gpu]")'
            )
    return pairs


def working(
    ort: ModuleType, asked: Sequence[tuple[str, dict[str, object]]], *, required: bool
) -> list[tuple[str, dict[str, object]]]:
    """Return the ``asked`` providers that start on this machine.

    ONNX Runtime silently skips a provider whose libraries are missing, so a graph of one node tests the providers.
    Otherwise a native library could be registered without its device. ``required``: raise an error if a provider does
    not start.
    """
    if all(name == "CPUExecutionProvider" for name, _ in asked):
        return list(asked)
    import onnx

    value = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "probe", value[:1], value[1:])
    probe = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    try:
        started = ort.InferenceSession(probe.SerializeToString(), providers=list(asked)).get_providers()
    except errors(ort) as error:
        raise ModelFileError(f"onnxruntime cannot start {', '.join(name for name, _ in asked)}: {error}") from error
    missing = [name for name, _ in asked if name not in started]
    if missing and required:
        raise ModelFileError(
            f"{', '.join(missing)} does not start on this machine, onnxruntime fell back to {', '.join(started)}; "
            "its driver or its CUDA libraries are missing, or name another provider"
        )
    return [(name, options) for name, options in asked if name in started]


def device_of(providers: Sequence[tuple[str, Mapping[str, object]]]) -> OrtDevice:
    """Return the device for the caches: the CUDA device if CUDA is the first provider, otherwise main memory."""
    name, options = providers[0]
    return OrtDevice("cuda", int(str(options.get("device_id", 0)))) if name == "CUDAExecutionProvider" else OrtDevice()


def decide(
    manifest: Manifest, providers: Sequence[str], device: OrtDevice, ort_version: str, library: str | Path | None
) -> Decision:
    """Decide whether to register a native library.

    ``library``: ``"auto"`` looks for a library, ``None`` uses none, and a path names one. A registered library replaces
    the function in the file for all nodes, so the library must cover every node. Raises :class:`ModelFileError` if a
    library that the user named cannot be used.
    """
    if library is None:
        return Decision(None, "none was wanted")
    if not manifest.attention:
        return Decision(None, "the model has no attention node")
    named = library != "auto"
    path = Path(library) if named else native.find()
    if path is None:
        return Decision(None, "none was found")
    if not path.is_file():
        raise ModelFileError(f"native library {path} is missing; build it, or leave the library out")
    try:
        found = native.inspect(path)
        refusal = native.usable(found, manifest.attention, manifest.dtype, providers, ort_version, device=device.id)
    except ModelFileError as error:
        if named:
            raise
        refusal = str(error)
    if refusal is None:
        return Decision(path.resolve(), "it has a kernel for every attention node and provider")
    if named:
        raise ModelFileError(f"native library {path} cannot be used here: {refusal}")
    return Decision(None, f"{path.name} was left out: {refusal}")


def options_with(ort: ModuleType, given: SessionOptions | None, decision: Decision) -> SessionOptions:
    """Return session options. If a library was chosen, register it in these options."""
    options = given
    if options is None:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # no warnings about exported graphs, and no log of errors that are raised
    if decision.library is not None:
        try:
            options.register_custom_ops_library(str(decision.library))
        except errors(ort) as error:
            raise ModelFileError(f"native library {decision.library} does not load: {error}") from error
    return options


def cpu_session(ort: ModuleType, model: str | bytes) -> InferenceSession:
    """Open a CPU session without warnings, for mla_compile's own checks. ``model``: a path or a serialized model."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def open_graph(
    ort: ModuleType,
    path: Path,
    dtype: str,
    options: SessionOptions,
    providers: Sequence[tuple[str, Mapping[str, object]]],
) -> InferenceSession:
    """Open an InferenceSession. Raises :class:`ModelFileError` with ONNX Runtime's reason."""
    try:
        return ort.InferenceSession(str(path), options, providers=list(providers))
    except errors(ort) as error:
        names = [name for name, _ in providers]
        todo = ""
        if dtype == "bfloat16" and names == ["CPUExecutionProvider"]:
            todo = "; its CPU provider computes little in bfloat16: export with float32, or run on CUDA"
        raise ModelFileError(
            f"onnxruntime {ort.__version__} cannot load {path} with {', '.join(names)}: {error}{todo}"
        ) from error
