"""Profile ``genai``: which caches it has no form for. test_export.py runs its files."""

from __future__ import annotations

from types import SimpleNamespace

import onnx_ir as ir
import pytest

from mla_compile import ExportError
from mla_compile.onnx import rewrites


@pytest.mark.parametrize(
    ("caches", "rows", "read"),
    [
        (3, [(0, 1)], 2),  # an indexer's keys
        (1, [(0, None)], 1),  # latent rows without a rotary key
        (3, [(0, 1), (2, 1)], 3),  # one rotary key of two layers
    ],
)
def test_rows_of_another_kind_have_no_form_in_genai(caches, rows, read):
    found = [SimpleNamespace(latent=latent, rope=rope) for latent, rope in rows]
    said = f"one row of latent and rotary key per layer; this model has {caches} caches, .*{len(rows)} .* read {read} "
    with pytest.raises(ExportError, match=said):
        rewrites.halves(ir.Graph([], [], nodes=[]), [None] * caches, found)
