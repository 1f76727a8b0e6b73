"""The attention of a piece of a prompt whose queries have a list of keys each, in the forms there are.

    python -m benchmarks.sparse_prompts
    python -m benchmarks.sparse_prompts --pieces 16x8192,128x8192 --threads 2

One attention of DeepSeek-V3.2's sizes over random rows; the last S of T tokens are the queries, and each sees 2,048 of
the tokens up to itself. In turns in one process, after their results were found to agree: K and V made of all rows and
attended to with the mask, the operator with the mask, the operator with the lists; and which of them the cost model
picks. Choosing is left out: it costs the same in all three.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import MODELS, Times

import torch  # isort: skip  # after common, which sets the environment
import torch.nn.functional as F
from torch import Tensor

from mla_compile import ops
from mla_compile.passes.cost.cost import choose, default_device

OUT = Path(__file__).parent / "results" / "sparse_prompts.json"
NAME = "v32"
PIECES = "16x8192,128x8192,512x8192,128x32768"
FORMS = ("expanded", "mask", "lists")
HEAD = ("queries", "tokens", *(f"{form} ms" for form in FORMS), "picked")
TOLERANCE = 1e-4


def calls(S: int, T: int) -> dict[str, Callable[[], Tensor]]:
    """Each form as a function that returns [1,H,S,V]."""
    random = torch.Generator().manual_seed(6)
    d, k = MODELS[NAME].dims, MODELS[NAME].extra["index_topk"]
    latent, rope = (torch.randn(1, T, n, generator=random) for n in (d.L, d.R))
    w_k, w_v = (torch.randn(d.H, n, d.L, generator=random) * d.L**-0.5 for n in (d.N, d.V))
    query = torch.randn(1, S, d.H, d.N + d.R, generator=random)
    seen = torch.arange(T) <= torch.arange(T - S, T)[:, None]
    ranks = torch.randn(1, S, T, generator=random).masked_fill(~seen, -torch.inf)
    lists = ranks.topk(k, dim=-1).indices
    mask = torch.zeros(1, S, T, dtype=torch.bool).scatter(-1, lists, True)[:, None] & seen
    indices, scale = lists.to(torch.int32), (d.N + d.R) ** -0.5

    def expanded() -> Tensor:
        keys, values = (latent[:, None] @ w.mT for w in (w_k, w_v))
        keys = torch.cat([keys, rope[:, None].expand(-1, d.H, -1, -1)], -1)
        return F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask, scale=scale)

    def absorbed(**told: Any) -> Tensor:
        wide = torch.cat([torch.einsum("bshn,hnl->bshl", query[..., : d.N], w_k), query[..., d.N :]], -1)
        out = ops.decode_attention(wide, latent, rope, scale=scale, causal=True, **told)[0]
        return torch.einsum("bshl,hvl->bhsv", out, w_v)

    return {"expanded": expanded, "mask": lambda: absorbed(mask=mask), "lists": lambda: absorbed(indices=indices)}


def piece(S: int, T: int, rounds: int, budget: float) -> dict[str, Any]:
    """All forms in turns; raises SystemExit where their results differ."""
    forms = calls(S, T)
    results = {name: call() for name, call in forms.items()}
    truth = results["expanded"]
    errors = {name: float((result - truth).norm() / truth.norm()) for name, result in results.items()}
    if not max(errors.values()) <= TOLERANCE:
        raise SystemExit(f"{S} of {T} tokens: results differ by {errors}; nothing is timed on wrong results")
    times = common.in_turns({n: (lambda f=f: common.timed(f)) for n, f in forms.items()}, rounds, budget, least=3)
    dims, k = MODELS[NAME].dims, MODELS[NAME].extra["index_topk"]
    choice = choose(dims, B=1, S=S, T=T, element_bytes=4, device=default_device("cpu"), chosen=k)
    picked = "lists" if choice.sparse else "mask" if choice.absorbed else "expanded"
    return {
        "queries": S, "tokens": T, "k": k, "picked": picked,
        "ms": {name: asdict(Times.of(t)) for name, t in times.items()},
    }  # fmt: skip


def describe(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    return [str(row["queries"]), str(row["tokens"]), *(str(Times(**row["ms"][f])) for f in FORMS), row["picked"]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pieces", type=common.words(str), default=common.words(str)(PIECES), help="queries x tokens")
    parser.add_argument("--rounds", type=int, default=7, help="at most")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each row, after three rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for text in args.pieces:
            S, T = map(int, text.split("x"))
            rows.append(piece(S, T, args.rounds, args.budget))
            print("  " + "  ".join(describe(rows[-1])), flush=True)
            common.write(args.out, {"benchmark": "sparse_prompts", "machine": common.machine()}, rows)
    print("\n" + common.table([describe(row) for row in rows], HEAD))


if __name__ == "__main__":
    main()
