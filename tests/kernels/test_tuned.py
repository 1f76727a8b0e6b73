"""The table of tiles."""

from __future__ import annotations

import json
from dataclasses import replace

from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.tuned import TABLE, table
from tests.support.plans import FLOAT, FP8, HALF, make


def test_the_table_says_where_it_comes_from_and_every_row_is_used_as_it_stands():
    content = json.loads(TABLE.read_text())
    assert content["provenance"]
    assert all(row.provenance == "not yet run on a GPU" or row.provenance.startswith("measured on") for row in table())
    dtypes = {"half": HALF, "float32": FLOAT, "float8": FP8}
    for row in table():
        device = next(d for d in PRESETS.values() if d.capability == row.capability)
        for page in (None, 64):
            if row.paged not in (None, page is not None):
                continue
            got = make(
                H=row.max_rows or 128, L=row.max_width or 512, cache_dtype=dtypes[row.cache], page_size=page,
                device=device, gluon=row.kernel == "gluon", listed=row.listed,
            )  # fmt: skip
            shape = (got.block_m, got.block_n, got.num_warps, got.num_stages)
            assert shape == (row.block_m, row.block_n, row.num_warps, row.num_stages), row


def test_rows_are_for_so_many_query_rows():
    row = replace(table()[0], min_rows=17, max_rows=64, paged=None)
    assert [row.suits(rows, paged=True) for rows in (16, 17, 64, 65)] == [False, True, True, False]
