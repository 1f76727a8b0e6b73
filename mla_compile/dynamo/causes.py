"""Explains why Dynamo keeps recompiling a function, from the failed guard in its log line."""

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
"""Matches the name of a value inside an argument, as opposed to an argument itself."""
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
    """The value that changes from call to call, and where it is used, as ``file:line in function: code``, if known."""

    kind: CauseKind
    what: str
    where: str | None

    def advice(self, *, optimized: bool, dynamic: bool | None) -> str:
        """What the user can do. ``optimized``: the module came from ``optimize``, which was given ``dynamic``."""
        symbolic = self.kind in ("number", "size")
        if symbolic and not optimized:
            return _OPTIMIZE
        return _DYNAMIC if symbolic and dynamic is not None else _ADVICE[self.kind]


def cause(reason: str, places: Mapping[str, str], root: str | None = None) -> Cause:
    """Parse a failed guard as Dynamo logs it: ``0/7: GUARD  # CODE  # PLACE``, perhaps followed by the user's stack.

    Args:
        reason: the text of the log.
        places: where each tensor is used, for guards that come without a stack.
        root: the variable of our own entry that holds the model, if any; the message says ``model`` instead.
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
    """The int attribute or the tensor whose guard failed; ``None`` for any other guard.

    The result is a regular expression for Dynamo's own name (``L['model'].layers[0].pos``) with any layer number;
    ``of_axis``: a tensor's name is followed by the axis whose size differed, as ``:1``.
    """
    guard = _guard(reason)
    found = _SIZE.match(guard) or _NUMBER.fullmatch(guard)
    if found is None:
        return None
    name = pattern(re.sub(r"^(\w\w+|[^\WLG])(?=[.\[])", r"L['\1']", found["name"]))
    return f"{name}:{found['axis']}" if name and of_axis and found.re is _SIZE else name


def pattern(name: str) -> str | None:
    """A regular expression for Dynamo's name of a value, with any layer number; ``None`` if no setting can name it."""
    if not name.startswith("L[") or {",", " "} & set(name):
        return None
    return re.sub(r"(?<=\\\[)('?)\d+(?=\1\\\])", r"\1\\d+", re.escape(name)) + "$"


def drained(reason: str) -> bool:
    """Whether a tensor that is kept between calls was or became empty along an axis other than the first."""
    found = _SIZE.match(_guard(reason))
    return found is not None and found["axis"] != "0" and is_within(found["name"]) and "0" in found.group("old", "new")


def is_within(name: str) -> bool:
    """Whether a name, spelled as in a guard or in Dynamo's source, names a value inside an argument."""
    return _WITHIN.match(re.sub(r"^L\['(\w+)'\]", r"\1", name)) is not None


def failed(reason: str) -> tuple[str, str]:
    """The source whose guard failed, and the value that code was compiled for; together they identify the guard.

    For a guard on anything but a size or a number: its text without digits, and its text.
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
    """The cause if ``count`` layers share a function: Dynamo counts the compilations of all of them together."""
    return Cause("layers", f"{count} layers that share this code were compiled, and Dynamo has one limit for all", None)


def place(stack: str) -> str | None:
    """``file:line in function: code`` of the innermost frame in a stack trace."""
    frames = list(_FRAME.finditer(stack))
    if not frames:
        return None
    last = frames[-1]
    return f"{last['file']}:{last['line']} in {last['function']}: {last['code'].strip()}"


def _commented(reason: str) -> str | None:
    """The place in the comment after a guard, with only the end of the file's path."""
    found = _COMMENT.search(reason.partition("\n")[0])
    return None if found is None else "{file}:{line} in {function}: {code}".format(**found.groupdict())


def readable(source: str) -> str:
    """``model.layers.0.cache`` for ``L['model']._modules['layers']._modules['0']._buffers['cache']``."""
    source = re.sub(r"^L\['(\w+)'\]", r"\1", source)
    return re.sub(r"\._(?:modules|buffers|parameters)\['([^']+)'\]", r".\1", source)


def _model(text: str, root: str | None) -> str:
    return re.sub(rf"\b{root}\.", "model.", readable(text)) if root else readable(text)
