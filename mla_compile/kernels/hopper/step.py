"""One launch of a Hopper kernel as data. Extends kernels/triton/step.py. Accepts meta tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.triton.step import TYPES, Arguments, Step

_I32 = (1 << 31) - 1


class Box(NamedTuple):
    """A TMA descriptor of a 3-D tensor, without its address; sizes and strides are in elements."""

    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    block: tuple[int, int, int]
    dtype: torch.dtype

    def of(self, T: int) -> Box:
        """Return the box for requests of T tokens. Dense requests stay dense; other requests keep their stride."""
        (B, tokens, width), (outer, row, column) = self.shape, self.strides
        return self._replace(shape=(B, T, width), strides=(T * row if outer == tokens * row else outer, row, column))


@dataclass(frozen=True)
class GluonStep(Step):
    """A launch of a Gluon kernel. ``boxes`` holds the arguments that are TMA descriptors."""

    boxes: dict[str, Box]


def reach(call: DecodeCall) -> int | None:
    """Return how many cache rows the query tokens of a request see in total; None if there is no window."""
    return min(call.window + call.sizes.S - 1, _I32) if call.window > 0 else None


def numbers(call: DecodeCall) -> dict[str, int | float | None]:
    """Return scale and softcap for scores in base 2, and the window's reach. None: the feature is not used."""
    factor, capped = math.log2(math.e), call.softcap > 0
    return {
        "scale": call.scale / call.softcap if capped else call.scale * factor,
        "softcap": call.softcap * factor if capped else None,
        "reach": reach(call),
    }


def tell(to: Arguments, told: dict[str, int | float | None]) -> None:
    """Add numbers to the arguments. None becomes a constant, so its code is compiled away."""
    to.scalars |= {name: x for name, x in told.items() if x is not None}
    to.constants |= {name: None for name, x in told.items() if x is None}


def begun(call: DecodeCall) -> Arguments:
    """Return the first arguments of a kernel that reads rows by pointers, not by TMA."""
    to = Arguments()
    to.pointer("query", call.query)
    to.strides({f"query_{axis}": call.query.stride(i) for i, axis in enumerate("bsh")})
    for name, rows in (("latent", call.latent), ("rope", call.rope)):
        to.pointer(name, rows)
        outer, row = (0, 0) if rows is None else rows.stride()[:2]
        to.strides({f"{name}_b": outer, f"{name}_t": row})
    to.pointer("table", call.block_table)
    to.strides({"table_b": 0 if call.block_table is None else call.block_table.stride(0)})
    to.pointer("lengths", call.seq_lens)
    tell(to, {**numbers(call), "S": call.sizes.S, "H": call.sizes.H, "T": call.sizes.T})
    return to


def written(call: DecodeCall, to: Arguments, *, parts: bool, final: bool) -> None:
    """Add the buffers for results: scratch if there are ``parts``, out and lse if there are ``final`` results."""
    to.scratch("o_part", "part", "*fp32", used=parts)
    to.scratch("lse_part", "part_lse", "*fp32", used=parts)
    to.scratch("out", "out", TYPES[call.query.dtype], used=final)
    to.scratch("lse", "lse", "*fp32", used=final)
