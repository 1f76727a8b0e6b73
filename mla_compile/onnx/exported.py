"""What an export gives back: where it is, what was done to the model, how it was checked."""

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
    """What was compared, and how far apart it was.

    Attributes:
        error: largest difference of logits (of any output, for a traced program) over the largest value.
        tolerance: what was allowed.
        tokens, equal_tokens: greedy tokens compared, and how many were the original's.
        reason: why the ONNX graphs were not run, where they were not. With an ``error``, the rewritten program was run
            by torch instead; only its translation to ONNX is then unchecked.
    """

    error: float | None = None
    tolerance: float | None = None
    tokens: int = 0
    equal_tokens: int = 0
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
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
    """What came of an export: where it is, what became of every attention, and how it was verified."""

    directory: Path
    profile: str
    report: Report
    verification: Verification

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``report.json`` of the directory."""
        return {
            "created_by": f"mla_compile {__version__}",
            "profile": self.profile,
            "verification": self.verification.to_dict(),
            "report": self.report.to_dict(),
        }

    def text(self) -> str:
        """For a person; ``report.txt`` of the directory."""
        return f"profile {self.profile}\n{self.verification}\n\n{self.report}\n"
