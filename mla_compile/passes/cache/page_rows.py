"""For a call with a prompt: reads the rows of one request from pages, and writes new rows to pages.

If ranks share pages (:class:`mla_compile.core.sharing.Sharing`), a page holds this rank's rows of a block of tokens.
"""

from __future__ import annotations

import torch

from mla_compile.core.sharing import Sharing
from mla_compile.passes.cache.packed import FLOAT8, at_once, pack, place_of_scale
from mla_compile.passes.cache.pages import PagedRows


def rows_of_pages(
    pool: torch.Tensor, table: torch.Tensor, tokens: int, rows: PagedRows, sharing: Sharing | None = None
) -> torch.Tensor:
    """Return the first ``tokens`` rows [tokens,width] of one request from a pool of pages, in the model's dtype.

    With ``sharing``, this is a collective unless ``tokens`` is 0.
    """
    page, own = pool.shape[1], tokens if sharing is None else sharing.capacity(tokens)
    taken = pool[table[: -(-own // page)].long()].reshape(-1, pool.shape[2])[:own]
    if sharing is not None and tokens:
        taken = sharing.all_rows(taken, tokens)
    if pool.dtype != torch.uint8:
        return taken
    scale = taken[:, place_of_scale(rows.width)].contiguous().view(torch.float32)
    return (taken[:, : rows.width].view(FLOAT8).float() * scale).to(rows.dtype)


def write_to_pages(
    pool: torch.Tensor,
    table: torch.Tensor,
    start: int,
    values: torch.Tensor,
    rows: PagedRows,
    sharing: Sharing | None = None,
) -> None:
    """Write ``values`` [S,width] to a pool as the rows of one request from row ``start`` on.

    If the pool holds packed rows, the values are packed. With ``sharing``, only this rank's rows are written.
    """
    at = torch.arange(start, start + len(values), device=values.device)
    if sharing is not None:
        first = (sharing.rank - start) % sharing.size
        at, values = at[first :: sharing.size] // sharing.size, values[first :: sharing.size]
    page = pool.shape[1]
    packed = pack(values, rows.width, at_once) if pool.dtype == torch.uint8 else values
    pool[table[at // page].long(), at % page] = packed
