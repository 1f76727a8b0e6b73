"""What a report tells beside its sites, and where it tells nothing."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from mla_compile import pipeline
from mla_compile.core.sharing import Sharing
from mla_compile.options import Options
from tests.support.programs import export
from tests.support.toy import Toy, decode_inputs


class NoAttention(nn.Module):
    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, rows


@pytest.mark.parametrize(
    ("kind", "options", "told"),
    [
        (Toy, {}, ()),
        (
            Toy,
            {"appends": "in_place"},
            ("new rows are appended in place to 1 cached tensor, whose rows are not copied in every call",),
        ),
        (Toy, {"cache_dtype": "fp8"}, ('cache_dtype="fp8" changes nothing here: no K and V are kept as rows',)),
        (NoAttention, {"cache_dtype": "fp8"}, ()),
    ],
)
def test_messages(kind: type[nn.Module], options: dict[str, Any], told: tuple[str, ...]) -> None:
    assert pipeline.run(export(kind(), decode_inputs()), Options(**options)).report.messages == told


def test_nothing_is_told_of_ranks_that_share_no_rows() -> None:
    program = export(Toy(), decode_inputs())
    program.know(sharing=Sharing("all", (0, 1), 0))
    assert pipeline.run(program, Options()).report.messages == ()
