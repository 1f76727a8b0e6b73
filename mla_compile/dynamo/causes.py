"""Explains why Dynamo keeps recompiling a function. The explanation is parsed from the failed guard in Dynamo's log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CauseKind = Literal["number", "length", "size", "layers", "other"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n[ ]*(?P<code>[^\n]*)')
_COMMENT = re.compile(r"  # (?P<code>.+?)  # (?P<file>\S+):(?P<line>\d+) in (?P<function>\w+)")
_SIZE = re.compile(
    r"tensor '(?P<name>.+)' size mismatch at index (?P<axis>\d+)\. expected (?P<old>\d+), actual (?P<new>\d+)"
)
_WITHIN = re.compile(r"(?:args\[\d+\]|kwargs\['\w+'\]|(?!(?:args|kwargs)\[)\w+)[.\[]")
"""Matches the name of a value inside an argument, but not the name of an argument itself."""
_LENGTH = re.compile(r"(?:not )?len\((?P<name>.+?)\)(?: [=!]= \d+)?")
_NUMBER = re.compile(r"(?P<name>\S+) == (?P<number>-?\d+)")

_ADVICE: dict[CauseKind, str] = {
    "number": "pass it as a tensor, or as an argument of the model; if it is the only index of an axis, Dynamo "
    "makes it a constant: write to a slice, cache[:, n : n + 1] = ..., or index by a tensor of positions",
    "length": "keep its contents in one tensor, or read and change it only in a method decorated with "
    "@torch.compiler.disable, outside the attention",
    "size": "write into a tensor of fixed size, or keep it as a plain attribute and not as a buffer",
    "layers": "compile the model as a whole, or call mla_compile.optimize(model); to go on layer by layer, give "
    "torch.compile isolate_recompiles=True (torch 2.13 or later), or set torch._dynamo.config.recompile_limit to "
    "several times the number of layers",
    "other": "keep it the same in every call, or raise torch._dynamo.config.recompile_limit",
}
_OPTIMIZE = "call mla_compile.optimize(model), which compiles for any value of it"
_DYNAMIC = "leave out the option dynamic; without it, values that change are compiled for any value"


@dataclass(frozen=True)
class Cause:
    """What changes from call to call, and where it is used (``file:line in function: code``), if known."""

    kind: CauseKind
    what: str
    where: str | None

    def advice(self, *, optimized: bool, dynamic: bool | None) -> str:
        """Return what the user can do.

        ``optimized``: whether ``optimize`` made the module. ``dynamic``: the option ``dynamic`` of ``optimize``.
        """
        symbolic = self.kind in ("number", "size")
        if symbolic and not optimized:
            return _OPTIMIZE
        return _DYNAMIC if symbolic and dynamic is not None else _ADVICE[self.kind]


def cause(reason: str, places: Mapping[str, str], root: str | None = None) -> Cause:
    """Parse a failed guard as Dynamo logs it: ``0/7: GUARD  # CODE  # PLACE``, perhaps followed by the user's stack.

    Args:
        reason: the text of the log.
        places: where each tensor is used. This is needed for guards that are logged without a stack.
        root: the variable that holds the model in mla_compile's own entry, if any. The message says ``model`` instead.
    """
    guard = _guard(reason)
    where = place(reason) or _commented(reason)
    if found := _SIZE.match(guard):
        name, axis, old, new = found.group("name", "axis", "old", "new")
        kind: CauseKind = "size"
        what = f"axis {axis} of the tensor {_model(name, root)} changes its size from call to call ({old}, then {new})"
        where = where or places.get(readable(name))
    elif found := _LENGTH.fullmatch(guard):
        kind, what = "length", f"the length of {_model(found['name'], root)} changes from call to call"
    elif found := _NUMBER.fullmatch(guard):
        kind, what = "number", f"the int {_model(found['name'], root)} changes from call to call"
    else:
        kind, what = "other", f"the guard that failed is {_model(guard, root)}"
    return Cause(kind, what, where)


def changed_source(reason: str, *, of_axis: bool = False) -> str | None:
    """Return the int attribute or the tensor whose guard failed; ``None`` for any other guard.

    The result is a regular expression for Dynamo's name of the value (``L['model'].layers[0].pos``) with any layer
    number. ``of_axis``: append the axis whose size differed to a tensor's name, as in ``:1``.
    """
    guard = _guard(reason)
    found = _SIZE.match(guard) or _NUMBER.fullmatch(guard)
    if found is None:
        return None
    name = pattern(re.sub(r"^(\w\w+|[^\WLG])(?=[.\[])", r"L['\1']", found["name"]))
    return f"{name}:{found['axis']}" if name and of_axis and found.re is _SIZE else name


def pattern(name: str) -> str | None:
    """Return a regular expression for Dynamo's name of a value, with any layer number.

    Returns ``None`` if Dynamo's settings cannot contain the name.
    """
    if not name.startswith("L[") or {",", " "} & set(name):
        return None
    return re.sub(r"(?<=\\\[)('?)\d+(?=\1\\\])", r"\1\\d+", re.escape(name)) + "$"


def drained(reason: str) -> bool:
    """Whether a guard failed because a tensor that is kept between calls was or became empty.

    Empty first axes are ignored.
    """
    found = _SIZE.match(_guard(reason))
    return found is not None and found["axis"] != "0" and is_within(found["name"]) and "0" in found.group("old", "new")


def is_within(name: str) -> bool:
    """Whether a name, spelled as in a guard or as in Dynamo's source, names a value inside an argument."""
    return _WITHIN.match(re.sub(r"^L\['(\w+)'\]", r"\1", name)) is not None


def failed(reason: str) -> tuple[str, str]:
    """Return the source whose guard failed, and the value that the code was compiled for. Both identify the guard.

    For a guard that tests neither a size nor a number, return its text without digits, and its text.
    """
    guard = _guard(reason)
    if found := _SIZE.match(guard):
        return f"{found['name']}:{found['axis']}", found["old"]
    if found := _NUMBER.fullmatch(guard):
        return found["name"], found["number"]
    return re.sub(r"\d+", "", guard), guard


def _guard(reason: str) -> str:
    return re.sub(r"^\d+/\d+: ", "", reason.partition("\n")[0]).partition("  # ")[0].strip()


def of_layers(count: int) -> Cause:
    """Return the cause for ``count`` layers that share a function. Dynamo has one limit for all of them."""
    return Cause("layers", f"{count} layers that share this code were compiled, and Dynamo has one limit for all", None)


def place(stack: str) -> str | None:
    """Return the innermost frame of a stack trace as ``file:line in function: code``."""
    frames = list(_FRAME.finditer(stack))
    if not frames:
        return None
    last = frames[-1]
    return f"{last['file']}:{last['line']} in {last['function']}: {last['code'].strip()}"


def _commented(reason: str) -> str | None:
    """Return the place in the comment after a guard. Dynamo writes only the end of the file's path there."""
    found = _COMMENT.search(reason.partition("\n")[0])
    return None if found is None else "{file}:{line} in {function}: {code}".format(**found.groupdict())


def readable(source: str) -> str:
    """Shorten a name: ``L['model']._modules['layers']._modules['0']._buffers['cache']`` -> ``model.layers.0.cache``."""
    source = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    return re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", source)


def _model(text: str, root: str | None) -> str:
    return re.sub(rf"\b{root}\.", "model.", readable(text)) if root else readable(text)
