"""Where a node of the graph comes from: its module and the line of the user's source."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from mla_compile.core.records import Location
from mla_compile.passes.ir.graph import operator_name

_TORCH = str(Path(torch.__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def locate(node: fx.Node) -> Location:
    """Return the node, its module path and the user's source line, as far as the trace recorded them."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    # The user's call is the innermost frame outside of torch. Python functions such as F.pad add frames of torch.
    called = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    file, line, code = called[-1] if called else (None, None, None)
    # The last entry is the innermost module.
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    return Location(
        node=node.name,
        op=_operator(node) if node.op == "call_function" else node.op,
        module=_module_path(modules[-1][0]) if modules else "",
        file=file,
        line=int(line) if line is not None else None,
        code=code.strip() if code else None,
    )


def _operator(node: fx.Node) -> str:
    name = operator_name(node)
    return name if "::" in name else f"aten.{name}"


def _module_path(name: str) -> str:
    """Turn ``L['self'].model.layers.0.self_attn`` and its variants into ``model.layers.0.self_attn``."""
    name = re.sub(r"^L\[['\"]\w+['\"]\]", "", name)  # the local variable that holds the model
    name = name.replace(".forward.module", "")  # the `forward` of an optimized module is an object with a `module`
    name = re.sub(
        r"\.?_modules\[['\"](\w+)['\"]\]|\[['\"]?(\w+)['\"]?\]", lambda m: f".{m.group(1) or m.group(2)}", name
    )
    return re.sub(r"^(self\.)+|slice\(None, [^)]*\)", "", name).strip(".")
