"""The machines of ``plan``, described in ``devices.json`` or in a user's file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mla_compile.core.quantities import BYTES
from mla_compile.errors import InputError, nearest

_FILE = Path(__file__).with_name("devices.json")
_SUFFIXES = (".yaml", ".yml", ".json")
_REQUIRED = ("memory_bytes", "bytes_per_s", "flops_per_s")


@dataclass(frozen=True)
class Machine:
    """An accelerator or a CPU socket: data-sheet figures, and the shares that good kernels reach.

    Attributes:
        memory_bytes: the size of its memory.
        bytes_per_s: memory bandwidth.
        flops_per_s: dense peak by dtype (``fp32``, ``bf16``, ``fp16``, ``fp8``, ``fp4``).
        link_bytes_per_s: the bandwidth to the other machines in one direction; ``None`` if there is no link.
        node_machines: the number of machines that links connect into a node; ``None`` means any number.
        network_bytes_per_s: the bandwidth between nodes per machine, in one direction.
        memory_share, compute_share: the shares of bandwidth and peak that a good kernel reaches.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link_bytes_per_s: float | None
    memory_share: float
    compute_share: float
    source: str = ""
    node_machines: int | None = None
    network_bytes_per_s: float | None = None

    @property
    def bandwidth(self) -> float:
        """The bytes per second that a good kernel reads."""
        return self.bytes_per_s * self.memory_share

    def nodes(self, machines: int) -> int:
        """Return the number of nodes that hold this many machines."""
        return -(-machines // (self.node_machines or machines))

    def peak(self, dtype: str) -> float:
        """Return the FLOP/s of a good kernel. A dtype without hardware support is converted and computed in bf16."""
        return self.flops_per_s.get(dtype, self.flops_per_s["bf16"]) * self.compute_share


def machine(name: str) -> Machine:
    """Return the machine of this name in ``devices.json``, or the machine that a YAML or JSON file describes.

    Raises :class:`InputError` for an unknown name or a file with wrong fields.
    """
    table = _table()
    if name.lower() in table["devices"]:
        return _from_record(table["devices"][name.lower()], name)
    path = Path(name)
    if path.suffix.lower() in _SUFFIXES:
        return _from_record(_read(path), str(path))
    known = ", ".join(table["devices"])
    raise InputError(
        f"there is no machine {name!r}{nearest(name.lower(), table['devices'])}; known are {known}; "
        f"a .yaml or .json file with {', '.join(_REQUIRED)} describes another"
    )


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return table


def _read(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if path.suffix.lower() == ".json":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON: {error}") from error
    try:
        yaml: ModuleType = import_module("yaml")
    except ImportError:
        raise InputError(f'{path}: reading YAML needs pyyaml: pip install "mla-compile[demo]", or write JSON') from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def _from_record(record: object, where: str) -> Machine:
    if not isinstance(record, Mapping):
        raise InputError(f"{where} does not describe a machine: expected the fields {', '.join(_REQUIRED)}")
    known = {*_REQUIRED, "name", "link_bytes_per_s", "memory_share", "compute_share", "source", "node_machines",
             "network_bytes_per_s"}  # fmt: skip
    for field in record:
        if field not in known:
            raise InputError(f"{where}: there is no field {field!r}{nearest(str(field), known)}")
    missing = [field for field in _REQUIRED if field not in record]
    if missing:
        raise InputError(f"{where}: missing {', '.join(missing)}")
    peaks = record["flops_per_s"]
    known_peaks = (*BYTES, "fp4")
    if not isinstance(peaks, Mapping) or "bf16" not in peaks or not set(peaks) <= set(known_peaks):
        raise InputError(f"{where}: flops_per_s is {peaks!r}, expected bf16 and any of {', '.join(known_peaks)}")
    shares = _table()["attainable"]
    link, network, node = (record.get(name) for name in ("link_bytes_per_s", "network_bytes_per_s", "node_machines"))
    if node is not None and (isinstance(node, bool) or not isinstance(node, int) or node < 1):
        raise InputError(f"{where}: node_machines is {node!r}, expected a whole number from 1")
    return Machine(
        str(record.get("name", where)),
        _positive(record["memory_bytes"], f"{where}: memory_bytes"),
        _positive(record["bytes_per_s"], f"{where}: bytes_per_s"),
        {dtype: _positive(peak, f"{where}: flops_per_s {dtype}") for dtype, peak in peaks.items()},
        None if link is None else _positive(link, f"{where}: link_bytes_per_s"),
        _positive(record.get("memory_share", shares["memory"]), f"{where}: memory_share", 1.0),
        _positive(record.get("compute_share", shares["compute"]), f"{where}: compute_share", 1.0),
        str(record.get("source", "")),
        node,
        None if network is None else _positive(network, f"{where}: network_bytes_per_s"),
    )


def _positive(value: Any, what: str, most: float = 1e21) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # YAML reads 4.8e12 as a string
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= most:
        raise InputError(f"{what} is {value!r}, expected a number above 0 and at most {most:g}")
    return number
