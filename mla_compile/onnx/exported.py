"""The result of an export: its directory, what was done to the model, and how it was checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mla_compile.report.report import Report
from mla_compile.version import __version__

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Verification:
    """What was compared, and by how much the results differed.

    Attributes:
        error: the largest difference divided by the largest value, for logits or for all outputs of a traced program.
        tolerance: the largest error that was allowed.
        tokens, equal_tokens: how many greedy tokens were compared, and how many equal the original's.
        reason: why the ONNX graphs were not run; empty if they were. If ``reason`` and ``error`` are both set, torch
            ran the rewritten program. Only its translation to ONNX is then unchecked.
    """

    error: float | None = None
    tolerance: float | None = None
    tokens: int = 0
    equal_tokens: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, object]:
        """Return a JSON-able record."""
        return asdict(self)

    def __str__(self) -> str:
        if self.error is None:
            return f"not verified: {self.reason}"
        tokens = f"{self.equal_tokens} of {self.tokens} greedy tokens equal, " if self.tokens else ""
        what = f"the rewritten program, before its translation ({self.reason}), " if self.reason else ""
        return (
            f"{what}verified against the original: {tokens}results differ by at most {self.error:.1e} of the largest "
            f"(allowed {self.tolerance:.0e})"
        )


@dataclass(frozen=True)
class Exported:
    """The result of an export: its directory, the report on every attention, and the verification."""

    directory: Path
    profile: str
    report: Report
    verification: Verification

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able record, which is the content of ``report.json`` in the directory."""
        return {
            "created_by": f"mla_compile {__version__}",
            "profile": self.profile,
            "verification": self.verification.to_dict(),
            "report": self.report.to_dict(),
        }

    def text(self) -> str:
        """Return the content of ``report.txt`` in the directory, a text for people."""
        return f"profile {self.profile}\n{self.verification}\n\n{self.report}\n"
