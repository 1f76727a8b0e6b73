"""Results against the truth in float64: an element passes by its absolute or relative error, the whole by its cosine.

Tolerances for half precision are those of FlashMLA's test_flash_mla_dense_decoding.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.common import Row

# Output: absolute, relative, cosine difference; LSE: absolute, relative.
TOLERANCE = {
    torch.bfloat16: (8e-4, 2.01 / 128, 5e-6, 1e-6, 8.01 / 65536),
    torch.float16: (8e-4, 2.01 / 128, 5e-6, 1e-6, 8.01 / 65536),
    torch.float32: (2e-5, 1e-4, 1e-9, 1e-5, 1e-5),
}


def compare_out(out: Tensor, want: Tensor, dtype: torch.dtype) -> Row:
    """Errors of an output [B,S,H,*] against the truth in float64; status ``failed`` and why when it is wrong."""
    absolute, relative, cosine, *_ = TOLERANCE[dtype]
    if out.shape != want.shape:
        return {"status": "failed", "error": f"out is {list(out.shape)}, expected {list(want.shape)}"}
    problems = []
    out = out.double()
    if not torch.isfinite(out).all():
        problems.append(f"{int((~torch.isfinite(out)).sum())} elements of out are not finite")
        out = torch.nan_to_num(out)
    row, problem_ = _elementwise("out", out, want, absolute, relative)
    problems += problem_
    norm, both = float((want**2).sum()), float((out**2 + want**2).sum())
    row["out_relative"] = float(((out - want) ** 2).sum() / norm) ** 0.5 if norm else 0.0
    row["out_cosine"] = 1 - 2 * float((out * want).sum()) / both if both else 0.0
    if row["out_cosine"] > cosine:
        problems.append(f"cosine difference {row['out_cosine']:.1e}, allowed {cosine:.0e}")
    return _verdict(row, problems)


def compare(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], dtype: torch.dtype) -> Row:
    """The same for ``out`` and ``lse``, and for rows that see nothing: ``out`` 0, ``lse`` minus infinity."""
    (out, lse), (true_out, true_lse) = got, want
    if lse.shape != true_lse.shape:
        return {"status": "failed", "error": f"lse is {list(lse.shape)}, expected {list(true_lse.shape)}"}
    row = compare_out(out, true_out, dtype)
    problems = [row.pop("error")] if row.pop("status", "ok") == "failed" else []
    empty = true_lse == -torch.inf
    if not torch.equal(lse == -torch.inf, empty):
        problems.append("lse is minus infinity in other rows than it should be")
    if out.shape == true_out.shape and bool((out[empty] != 0).any()):
        problems.append("a row that sees nothing is not zero")
    found, problem_ = _elementwise(
        "lse", torch.nan_to_num(lse.double().masked_fill(empty, 0), nan=1e9), true_lse.masked_fill(empty, 0),
        *TOLERANCE[dtype][3:],
    )  # fmt: skip
    return _verdict(row | found, problems + problem_)


def _elementwise(name: str, a: Tensor, b: Tensor, absolute: float, relative: float) -> tuple[Row, list[str]]:
    error = (a - b).abs()
    largest = float(error.max()) if error.numel() else 0.0
    bad = int(((error > absolute) & (error > relative * b.abs())).sum())
    row = {f"{name}_max_error": largest}
    return row, [f"{bad} of {error.numel()} elements of {name} off, by up to {largest:.2e}"] if bad else []


def _verdict(row: Row, problems: list[str]) -> Row:
    return {**row, "status": "failed", "error": "; ".join(problems)} if problems else row
