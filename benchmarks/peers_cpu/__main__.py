"""Decode steps and prompts of whole models, each peer in a process of its own, asked in turns.

    python -m benchmarks.peers_cpu --layers 27
    python -m benchmarks.peers_cpu --peers ours,llama_bfloat16 --context 512,4096 --batch 1

All peers have the same seeded weights, those of eight and four bits rounded from them. Nothing is timed before the
logits of a step agree with a float32 run of these weights; what the rounding to few bits costs stands beside the times.
A peer that does not install, start or agree is left out, and the data says why. Contexts of peers in PyTorch are random
rows; llama.cpp reads a prompt. A peer is asked once the threads of all others rest, but all of them stay in memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import MODELS, Times, in_turns, machine, names, table, words, write
from benchmarks.peers_cpu.environments import python_of
from benchmarks.peers_cpu.protocol import Peer, PeerError
from benchmarks.peers_cpu.torch_peer import weights

import torch  # isort: skip  # after common, which sets the environment

import numpy as np

from mla_compile.workbench.decode_steps import differences

TORCH = {"ours": "mla", "inductor": "inductor", "eager": "eager", "ours_int8": "mla int8", "ours_int4": "mla int4"}
LLAMA = {"llama_bfloat16": "bfloat16", "llama_q8_0": "q8_0", "llama_q4_k_m": "q4_k_m"}
PEERS = (*TORCH, *LLAMA)
ALLOWED = {"bfloat16": 0.08, "mla int8": 0.2, "mla int4": 1.5, "q8_0": 0.2, "q4_k_m": 1.0}
"""The largest difference of a logit from the float32 run, relative to the largest logit.

Random weights round badly to few bits. That the weights of llama.cpp lie where they belong is seen in bfloat16.
"""

PROMPT, TOKEN = list(range(3, 51)), 7
OUT = Path(__file__).parent.parent / "results" / "peers_cpu.json"


class Peers:
    """What runs in this benchmark: their processes, and the reasons of those that are left out."""

    def __init__(self, args: argparse.Namespace, batch: int, folder: Path) -> None:
        self.args, self.batch, self.folder = args, batch, folder
        self.longest = max(*args.context, *args.prompt, len(PROMPT)) + 2
        self.left_out: dict[str, str] = {}
        self.errors: dict[str, float] = {}
        self.running: dict[str, Peer] = {}

    def start(self, name: str, dtype: str = "bfloat16") -> Peer:
        """A process for a peer; raises :class:`PeerError`."""
        sizes = [str(self.batch), str(self.longest)]
        if name in LLAMA:
            python, script = python_of("llama", self.args.environments), Path(__file__).parent / "llama_peer.py"
            given = [str(self.folder), LLAMA[name], *sizes, str(torch.get_num_threads())]
            return Peer([python, str(script), *given])
        given = [TORCH[name], self.args.model, dtype, str(self.args.layers)]
        return Peer([sys.executable, "-m", "benchmarks.peers_cpu.torch_peer", *given, *sizes])

    def begin(self) -> None:
        """Start all that agree with the float32 run."""
        reference = self.start("eager", "float32")
        expected = torch.tensor(reference.ask("logits", prompt=PROMPT, token=TOKEN))
        reference.close()  # its memory is free before others are timed
        for name in self.args.peers:
            if (peer := self._trying(name, lambda name=name: self.start(name))) is None:
                continue
            said = self._trying(name, lambda peer=peer: peer.ask("logits", prompt=PROMPT, token=TOKEN))
            if said is None:
                peer.close()
                continue
            error = differences({"float32": expected, name: torch.tensor(said)})[name]
            allowed = ALLOWED.get({**TORCH, **LLAMA}[name], ALLOWED["bfloat16"])
            if error > allowed:
                self.left_out[name] = f"its logits are off by {error:.1e}, allowed {allowed:.0e}"
                peer.close()
                continue
            self.running[name], self.errors[name] = peer, error

    def row(self, kind: str, tokens: int) -> dict[str, Any]:
        """One kind of question to all in turns, after one of each that is not counted."""
        first = {name: self._trying(name, lambda peer=peer: peer.ask(kind, tokens=tokens)) for name, peer in self}
        calls = {name: (lambda peer=peer: self._alone(peer, kind, tokens)) for name, peer in self}
        times = in_turns(calls, self.args.rounds, self.args.budget)
        return {
            "model": self.args.model, "layers": self.args.layers, "batch": self.batch, "kind": kind, "tokens": tokens,
            "first_s": first, "ms": {name: asdict(Times.of(t)) for name, t in times.items()}, "error": self.errors,
            "resident_bytes": {name: peer.ask("resident") for name, peer in self}, "left_out": dict(self.left_out),
        }  # fmt: skip

    def _alone(self, peer: Peer, kind: str, tokens: int) -> float:
        for other in self.running.values():
            other.rest()
        return float(peer.ask(kind, tokens=tokens))

    def __iter__(self) -> Any:
        return iter({name: peer for name, peer in self.running.items() if name not in self.left_out}.items())

    def _trying(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except PeerError as error:
            self.left_out[name] = str(error)
            return None

    def close(self) -> None:
        """End all processes."""
        for peer in self.running.values():
            peer.close()


def store(args: argparse.Namespace, folder: Path) -> None:
    """Write the weights that all peers have, for those that run without torch."""
    model = weights(args.model, args.layers, max(*args.context, *args.prompt))
    d, config = MODELS[args.model].dims, model.config
    sizes = {"H": d.H, "L": d.L, "R": d.R, "N": d.N, "V": d.V, "D": d.D, "Q": d.Q, "layers": args.layers}
    sizes |= {"ffn": config.intermediate_size, "vocabulary": config.vocab_size, "eps": config.rms_norm_eps}
    sizes |= {"theta": config.rope_parameters["rope_theta"], "context": config.max_position_embeddings}
    (folder / "sizes.json").write_text(json.dumps(sizes))
    arrays = {name: weight.view(torch.uint16).numpy() for name, weight in model.state_dict().items()}
    np.savez(folder / "weights.npz", **arrays)


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """All rows, written as they come."""
    rows: list[dict[str, Any]] = []
    for batch in args.batch:
        peers = Peers(args, batch, folder)
        try:
            peers.begin()
            for kind, sizes in (("step", args.context), ("prompt", args.prompt)):
                for tokens in sorted(sizes):
                    rows.append(peers.row(kind, tokens))
                    write(args.out, {"benchmark": "peers_cpu", "machine": machine()}, rows)
        finally:
            peers.close()
    return rows


def described(row: dict[str, Any], peers: list[str]) -> list[str]:
    """One row as text."""
    found = {n: f"{t['best']:.1f} / {t['median']:.1f}" for n, t in row["ms"].items()}
    return [row["kind"], str(row["tokens"]), str(row["batch"]), *(found.get(n, "") for n in peers)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=names(PEERS), default=list(PEERS))
    parser.add_argument("--model", choices=("v2lite",), default="v2lite")
    parser.add_argument("--layers", type=int, default=27, help="llama.cpp knows DeepSeek-V2-Lite by its 26 or 27")
    parser.add_argument("--context", type=words(int), default=[512, 4096, 16384])
    parser.add_argument("--prompt", type=words(int), default=[512, 4096], help="tokens of prompts that are timed")
    parser.add_argument("--batch", type=words(int), default=[1, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of timing per row")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "mla_compile" / "peers")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store(args, Path(folder))
        rows = measure(args, Path(folder))
    head = ("kind", "tokens", "batch", *(f"{name} ms" for name in args.peers))
    print(table([described(row, args.peers) for row in rows], head))
    for name, why in sorted({pair for row in rows for pair in row["left_out"].items()}):
        print(f"{name} is left out: {why}")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
