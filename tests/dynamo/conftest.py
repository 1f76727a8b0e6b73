"""What several tests of this room need."""

from __future__ import annotations

from typing import Any

import pytest

from mla_compile.dynamo.compiler import Compiler


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every run of a rewritten graph."""
    counted: list[int] = []
    assemble = Compiler._assemble

    def spied(self: Compiler, *args: Any) -> Any:
        call = assemble(self, *args)

        def counting(*inputs: Any) -> Any:
            counted.append(1)
            return call(*inputs)

        return counting

    monkeypatch.setattr(Compiler, "_assemble", spied)
    return counted
