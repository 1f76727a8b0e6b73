"""A sparse attention exported to ONNX, on one CPU thread: all rows and a mask, against the rows of a list.

One attention of DeepSeek-V3.2's sizes: 128 heads, and an indexer of 64 heads of 128 columns that chooses 2,048 keys,
whose keys are cached too. The same module is exported with ``sparse="never"`` and with ``sparse="auto"``, and both
graphs take the same step in turns, after their results were found to agree. ``portable`` copies the caches in each
step, ``inplace`` writes one row.

    python -m benchmarks.onnx_sparse
    python -m benchmarks.onnx_sparse --tokens 8192 --rounds 5
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.onnx_cpu import Bound, L, N, R, V

import numpy as np  # isort: skip  # after common, which sets the environment
import torch
from torch import Tensor, nn

import mla_compile

OUT = Path(__file__).parent / "results" / "onnx_sparse.json"
H, J, D, TOP = 128, 64, 128, 2048
VARIANTS = {"mask": "never", "list": "auto"}
HEAD = ("profile", "queries", "tokens", "mask ms", "list ms", "mask/list")


class Core(nn.Module):
    """One decode step as models write it: K and V of every head, and a choice that is a mask over all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(L, H * (N + V), bias=False)

    def forward(
        self,
        query: Tensor,
        latent: Tensor,
        rope: Tensor,
        index_query: Tensor,
        index_key: Tensor,
        weights: Tensor,
        mask: Tensor,
        past_latent: Tensor,
        past_rope: Tensor,
        past_index: Tensor,
    ) -> Any:
        """Takes query [B,S,H,N+R]; latent, rope, index_key [B,S,.] of the new tokens; past_* [B,P,.].

        index_query is [B,S,J,D], weights [B,S,J], mask bool [B,1,S,T].
        """
        c = torch.cat([past_latent, latent], 1)
        r = torch.cat([past_rope, rope], 1)
        keys = torch.cat([past_index, index_key], 1)
        B, T = c.shape[0], c.shape[1]
        scores = torch.relu(torch.matmul(index_query, keys.transpose(1, 2).unsqueeze(1)) * D**-0.5)
        scores = torch.matmul(weights.unsqueeze(2), scores).squeeze(2).masked_fill(~mask[:, 0], -torch.inf)
        chosen = scores.topk(min(TOP, T), dim=-1).indices
        hidden = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
        k, v = self.up(c).view(B, T, H, N + V).transpose(1, 2).split([N, V], -1)
        k = torch.cat([k, r[:, None].expand(B, H, T, R)], -1)
        seen = mask & ~hidden[:, None]
        out = nn.functional.scaled_dot_product_attention(query.transpose(1, 2), k, v, seen, scale=(N + R) ** -0.5)
        return out.transpose(1, 2), c, r, keys


def inputs_of(S: int, T: int, rows: int | None = None, B: int = 1) -> dict[str, np.ndarray]:
    """Random inputs of S tokens behind T - S; ``rows``: of the buffers."""
    random = np.random.default_rng(0)
    rows = T - S if rows is None else rows

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    return {
        "query": normal(B, S, H, N + R), "latent": normal(B, S, L), "rope": normal(B, S, R),
        "index_query": normal(B, S, J, D), "index_key": normal(B, S, D), "weights": normal(B, S, J),
        "mask": np.broadcast_to(np.arange(T) <= np.arange(T - S, T)[:, None], (B, 1, S, T)).copy(),
        "past_latent": normal(B, rows, L), "past_rope": normal(B, rows, R), "past_index": normal(B, rows, D),
    }  # fmt: skip


def export(folder: Path, profile: str) -> dict[str, Path]:
    """The decode graph of each variant, for any number of queries and length of the past."""
    torch.manual_seed(0)
    core = Core().eval().requires_grad_(False)
    batch, new, past = torch.export.Dim("batch"), torch.export.Dim("new"), torch.export.Dim("past", min=0)
    example = tuple(torch.from_numpy(value) for value in inputs_of(3, 2 * TOP, B=2).values())
    tokens, auto = {0: batch, 1: new}, torch.export.Dim.AUTO
    shapes = (*(tokens,) * 6, {0: batch, 2: new, 3: auto}, *({0: batch, 1: past},) * 3)
    program = torch.export.export(core, example, dynamic_shapes=shapes, strict=False)
    files = {}
    for name, sparse in VARIANTS.items():
        target = folder / profile / name
        target.parent.mkdir(exist_ok=True)
        mla_compile.export_onnx(program, target, profile=profile, sparse=sparse, prefill=False, verify=False)
        files[name] = target / "decode.onnx"
    return files


def measured(files: dict[str, Path], profile: str, S: int, T: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both variants in turns; raises SystemExit where their results differ."""
    in_place = profile == "inplace"
    feeds = inputs_of(S, T, T if in_place else None)
    runs = {name: Bound(file, feeds, in_place) for name, file in files.items()}
    results = [run().copy() for run in runs.values()]
    error = float(np.abs(results[0] - results[1]).max() / np.abs(results[0]).max())
    if not error < 1e-4:
        raise SystemExit(
            f"{profile}, {T} tokens: the variants differ by {error:.1e}; nothing is timed on wrong results"
        )
    seconds = common.in_turns({n: partial(common.timed, r) for n, r in runs.items()}, args.rounds, args.budget, least=3)
    return {
        "profile": profile, "queries": S, "tokens": T, "error": error,
        "ms": {name: asdict(common.Times.of(times)) for name, times in seconds.items()},
        "over_list": common.median_ratio(seconds["mask"], seconds["list"]),
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    cells = [str(common.Times(**row["ms"][name])) for name in VARIANTS]
    return [row["profile"], str(row["queries"]), str(row["tokens"]), *cells, f"{row['over_list']:.2f}"]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=common.words(int), default=[1024, 4096, 8192, 32768])
    parser.add_argument("--prompt", type=int, default=16, help="queries of a call that is no step; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=15, help="at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each row, after three rounds")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    about = {"benchmark": "onnx_sparse", "machine": common.machine_without_transformers(), "threads": 1}
    with tempfile.TemporaryDirectory() as name:
        for profile in ("portable", "inplace"):
            files = export(Path(name), profile)
            cases = [(1, T) for T in args.tokens]
            if args.prompt:
                cases += [(args.prompt, T) for T in args.tokens if T <= 8192]
            for S, T in cases:
                rows.append(measured(files, profile, S, T, args))
                print("  " + "  ".join(describe(rows[-1])), flush=True)
                common.write(args.out, about, rows)
    print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
