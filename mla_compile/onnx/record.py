"""Read a JSON object field by field. A :class:`ModelFileError` names the file, the field and what was expected."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mla_compile.errors import ModelFileError

_HASH = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # excludes path separators, drives, `.` and `..`


@dataclass(frozen=True)
class Record:
    """An object in the JSON file ``source``. ``where``: the object's path in the file, for error messages."""

    content: dict[str, object]
    source: str
    where: str = ""

    @classmethod
    def of(cls, content: object, source: str, where: str = "") -> Record:
        """Wrap ``content``, which must be an object."""
        if not isinstance(content, dict):
            raise ModelFileError(f"{source}: {where or 'the file'} is {_shown(content)}, expected an object")
        return cls(content, source, where)

    def wrong(self, name: str, got: object, expected: str) -> ModelFileError:
        """Return the error for field ``name``, which the caller has to raise."""
        return ModelFileError(f"{self.source}: {self._place(name)} is {_shown(got)}, expected {expected}")

    def get(self, name: str) -> Any:
        """Return the field unchecked."""
        if name not in self.content:
            raise ModelFileError(f"{self.source}: {self._place(name)} is missing; export the model again")
        return self.content[name]

    def names(self) -> Iterator[str]:
        """Return the names of the fields."""
        return iter(self.content)

    def text(self, name: str) -> str:
        """Read a non-empty string."""
        value = self.get(name)
        if not isinstance(value, str) or not value:
            raise self.wrong(name, value, "a non-empty string")
        return value

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """Read one of ``known``."""
        value = self.get(name)
        if value not in known:
            raise self.wrong(name, value, f"one of {', '.join(known)}")
        return str(value)

    def optional_choice(self, name: str, known: tuple[str, ...]) -> str | None:
        """Read one of ``known``, or null."""
        return None if self.get(name) is None else self.choice(name, known)

    def number(self, name: str, *, lowest: int) -> int:
        """Read a whole number of at least ``lowest``."""
        value = self.get(name)
        if type(value) is not int or value < lowest:  # isinstance would accept a bool
            raise self.wrong(name, value, f"a whole number of at least {lowest}")
        return value

    def optional_number(self, name: str, *, lowest: int) -> int | None:
        """Read a whole number of at least ``lowest``, or null."""
        return None if self.get(name) is None else self.number(name, lowest=lowest)

    def numbers(self, name: str) -> list[int]:
        """Read a list of whole numbers."""
        values = self.items(name)
        if any(type(value) is not int for value in values):
            raise self.wrong(name, values, "a list of whole numbers")
        return values

    def real(self, name: str) -> float:
        """Read a finite number."""
        value = self.get(name)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Read true or false."""
        value = self.get(name)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def hash(self, name: str) -> str:
        """Read a SHA-256 in lower-case hexadecimal digits."""
        value = self.get(name)
        if not isinstance(value, str) or not _HASH.fullmatch(value):
            raise self.wrong(name, value, "64 hexadecimal digits")
        return value

    def file_name(self, name: str) -> str:
        """Read a file name without a path."""
        return self.plain_name(self.text(name))

    def plain_name(self, value: str) -> str:
        """Return ``value`` if it is a file name without a path."""
        if not _NAME.fullmatch(value):
            raise ModelFileError(
                f"{self.source}: {self.where} names the file {_shown(value)}, expected a name without a path"
            )
        return value

    def items(self, name: str) -> list[Any]:
        """Read a list."""
        value = self.get(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def child(self, name: str) -> Record:
        """Read the object in a field."""
        return Record.of(self.get(name), self.source, self._place(name))

    def children(self, name: str) -> list[Record]:
        """Read the objects in a list."""
        return [
            Record.of(entry, self.source, f"{self._place(name)}[{at}]") for at, entry in enumerate(self.items(name))
        ]

    def _place(self, name: str) -> str:
        return f"{self.where}.{name}" if self.where else name


def _shown(value: object) -> str:
    """Shorten a value to fit one line of an error."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
