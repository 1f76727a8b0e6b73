"""Define which kernels a native library holds, and how each kernel is compiled without a GPU.

The kernels are those of kernels/triton/decode_triton.py, combine_triton.py and tiles_triton.py. They are compiled from
the same description as a launch in Python (kernels/triton/steps.py), at sizes that Triton cannot turn into constants.
In Python each kind of call has its own kernel. A library has fewer kernels:

* Sizes and strides are arguments. Widths, dtype, tile and kind of mask are constants. Lengths are always passed, as
  int64. A call without ``seq_lens`` passes lengths beyond any capacity, which the kernel limits to the capacity.
* The kernel for causal calls also serves calls that are not causal: S tokens of H heads become one token of S*H heads.
  Only masks that differ between query rows, and windows, need separate kernels for causal and other calls.
* A single split writes the result directly (``direct``), unless the mask differs between query rows.
* For masks that differ between query rows in a causal call, only the largest tile is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from mla_compile.errors import OptionError
from mla_compile.kernels.call import DecodeCall
from mla_compile.kernels.devices import PRESETS
from mla_compile.kernels.plan import Plan
from mla_compile.kernels.tiles import RowLayout, fitted, padded, starting_row
from mla_compile.kernels.triton.step import Source, Step
from mla_compile.kernels.triton.steps import steps
from mla_compile.kernels.tuned import TunedTile, table

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NO_MASK, LISTED, BOOL, FLOAT = "none", "listed", "bool", "float"  # what the attention loop reads of a mask
MASKS = (NO_MASK, LISTED, BOOL, FLOAT)
_WIDE = ("query_b", "query_s", "latent_b", "rope_b", "values_b", "mask_b", "mask_h", "mask_s")  # 64-bit arguments
_B, _S, _H, _T = 3, 2, 5, 48  # sizes of the described call; Triton would make a stride of 0 or 1 a constant


@dataclass(frozen=True, order=True)
class NodeWidths:
    """The widths of a node, and whether it has a soft-cap or a window. If ``Lv`` is None, the values are the latent."""

    La: int
    Lb: int
    Lv: int | None = None
    softcap: bool = False
    window: bool = False

    def __post_init__(self) -> None:
        if self.La < 1 or self.Lb < 0 or (self.Lv is not None and self.Lv < 1):
            raise OptionError(f"dims {self}: expected La >= 1, Lb >= 0 and Lv >= 1, as in 512,64 or 192,0,128")

    @property
    def out(self) -> int:
        """The number of columns of the result."""
        return self.La if self.Lv is None else self.Lv

    def __str__(self) -> str:
        more = f"->{self.Lv}" if self.Lv is not None else ""
        return f"{self.La}+{self.Lb}{more}{' softcap' * self.softcap}{' window' * self.window}"


TUNED = (NodeWidths(512, 64), NodeWidths(256, 32), NodeWidths(256, 64), NodeWidths(512, 0))


@dataclass(frozen=True)
class Tile:
    """A row of the tuned table, fitted to a node's widths, for at most ``max_rows`` query rows (0: any number)."""

    row: TunedTile
    smem: int
    max_rows: int


@dataclass(frozen=True)
class Variant:
    """One kernel for one architecture. ``step`` names the kernel. The other fields say what it is compiled for.

    ``dtype``: the dtype of the rows. ``query``: the dtype of query and result. ``mask``: one of ``MASKS`` for the
    attention, and ``bool`` or ``float`` for ``scan_mask``.
    """

    step: str
    arch: str
    dtype: str
    query: str
    dims: NodeWidths
    mask: str = NO_MASK
    causal: bool = True
    direct: bool = False
    sinks: bool = False
    tile: Tile | None = None

    def __str__(self) -> str:
        parts = [self.arch, self.step]
        if self.step == "attend" and self.tile is not None:
            row = self.tile.row
            parts += [
                self.dtype,
                *[f"{self.query} query"] * (self.query != self.dtype),
                str(self.dims),
                f"mask {self.mask}",
                f"{row.block_m}x{row.block_n}",
            ]
            parts += ["causal"] * self.causal + ["direct"] * self.direct
        elif self.step == "scan_mask" and self.tile is not None:
            parts += ["bool" if self.mask == BOOL else self.dtype, f"x{self.tile.row.block_n}"]
            parts += ["causal"] * self.causal + ["window"] * self.dims.window
        elif self.step == "combine":
            parts += [self.query, str(self.dims.out), *["sinks"] * self.sinks]
        return " ".join(parts)

    def described(self) -> Step:
        """Return the description of a launch of this kernel, at arbitrary sizes."""
        dtype, dims = DTYPES[self.dtype], self.dims

        def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device="meta")

        mask = None
        if self.mask != NO_MASK:
            shape = (_B, 1, 1, _T) if self.mask == LISTED else (_B, _H, _S, _T)
            mask = empty(*shape, of=dtype if self.mask == FLOAT else torch.bool)
        call = DecodeCall(
            empty(_B, _S, _H, dims.La + dims.Lb, of=DTYPES[self.query]),
            empty(_B, _T, dims.La),
            empty(_B, _T, dims.Lb) if dims.Lb else None,
            None if dims.Lv is None else empty(_B, _T, dims.Lv),
            mask,
            seq_lens=empty(_B, of=torch.int64),
            sinks=empty(_H, of=torch.float32) if self.sinks else None,
            scale=0.1,
            causal=self.causal,
            softcap=30.0 if dims.softcap else 0.0,
            window=7 if dims.window else 0,
        )
        row = self.tile.row if self.tile is not None else table()[0]
        plan = Plan("triton", row.block_m, row.block_n, row.num_warps, row.num_stages, 1 if self.direct else 2, None, 0)
        return next(s for s in steps(call, plan, PRESETS[self.arch]) if s.name == self.step)

    def source(self) -> Source:
        """Return what Triton compiles: function, signature, constants, attributes and options."""
        step, dims = self.described(), self.dims
        fn, signature, constants, _, options = step.source()
        width = dims.La + dims.Lb  # all strides of a query row are multiples of this
        multiples = {"query_b": width, "query_s": width, "query_h": width, "latent_b": dims.La, "rope_b": dims.Lb}
        aligned = {name for name, of in multiples.items() if of % 16 == 0}
        if dims.out % 16 == 0:
            aligned.add("values_b")
        attributes = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(fn.arg_names)
            if name in step.buffers or (name in step.scalars and name in aligned)
        }
        signature |= {name: "i64" for name in _WIDE if name in step.scalars}
        return fn, signature, constants, attributes, options

    def arguments(self) -> list[str]:
        """Return the names of the buffers and numbers that the host passes, in order, without constants."""
        step = self.described()
        given = {**{name: name for name in step.scalars}, **step.buffers}
        return [given[name] for name in step.fn.arg_names if name in given]


def tiles(arch: str, dtype: str, dims: NodeWidths, mask: str) -> list[Tile]:
    """Return the tiles that kernels/tiles.py has for these rows. Tiles for few query rows come first.

    Raises :class:`NoPlanError` if no tile fits the architecture's shared memory.
    """
    device, of = PRESETS[arch], DTYPES[dtype]
    kind = "float32" if of == torch.float32 else "half"
    read = {BOOL: 1, FLOAT: of.itemsize}.get(mask, 0)
    layout = RowLayout(
        padded(dims.La), padded(dims.Lb), padded(dims.Lv or 0), of.itemsize, of.itemsize, paged=False, mask_bytes=read
    )
    known = [r for r in table() if (r.kernel, r.cache) == ("triton", kind) and r.capability <= device.capability]
    newest = max(r.capability for r in known)
    limits = sorted({r.max_rows for r in known if r.capability == newest and r.max_rows and r.suits(1, paged=False)})
    found: list[Tile] = []
    for limit in (*limits, 0):
        row, smem = fitted(starting_row(kind, limit or 1 << 30, layout, device, "triton"), layout, device)
        if found and found[-1].row == row:
            found.pop()  # both limits have the same tile, so keep only the larger limit
        found.append(Tile(row, smem, limit))
    return found


def variants(archs: tuple[str, ...], dtypes: tuple[str, ...], dims: tuple[NodeWidths, ...]) -> list[Variant]:
    """Return every kernel of a library once, in the order in which the host code searches for a kernel.

    Rows in half precision get kernels for float32 queries, which absorption makes, and for queries of the rows' dtype.
    """
    found: dict[str, Variant] = {}
    for arch in archs:
        for dtype in dtypes:
            for query in dict.fromkeys(("float32", dtype)):
                for of in dims:
                    plain = Variant("attend", arch, dtype, query, of)
                    for variant in (*_attention(plain), *_small(plain)):
                        found.setdefault(str(variant), variant)
    return list(found.values())


def _attention(plain: Variant) -> Iterator[Variant]:
    for mask in MASKS:
        fitting = tiles(plain.arch, plain.dtype, plain.dims, mask)
        by_row = mask in (BOOL, FLOAT)
        for causal in (False, True) if by_row or plain.dims.window else (True,):
            for tile in fitting[-1:] if by_row and causal else fitting:
                for direct in (False,) if by_row else (True, False):
                    yield replace(plain, mask=mask, causal=causal, direct=direct, tile=tile)


def _small(plain: Variant) -> Iterator[Variant]:
    for sinks in (False, True):
        yield replace(plain, step="combine", sinks=sinks)
    blocks: dict[tuple[str, int], Tile] = {}
    for mask in (LISTED, BOOL, FLOAT):
        for tile in tiles(plain.arch, plain.dtype, plain.dims, mask):
            blocks.setdefault((FLOAT if mask == FLOAT else BOOL, tile.row.block_n), tile)
    for (mask, _), tile in blocks.items():
        for causal in (False, True):
            yield replace(plain, step="scan_mask", mask=mask, causal=causal, tile=tile)
    yield replace(plain, step="list_tiles", mask=BOOL, tile=next(iter(blocks.values())))
