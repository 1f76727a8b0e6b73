"""Other programs beside ours: processes that answer, and weights in another program's format."""

from __future__ import annotations

import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers_cpu import __main__ as driver
from benchmarks.peers_cpu.protocol import Peer, PeerError
from tests.support import models
from tests.support.tiers import full

ANSWERS = """
import os, sys, threading, time
from benchmarks.peers_cpu.protocol import serve
def half(number):
    print("while they work, too")
    return number / 2
def spin(seconds):
    end = time.monotonic() + seconds
    def turn():
        while time.monotonic() < end:
            pass
    threading.Thread(target=turn).start()
    return end
serve({"half": half, "spin": spin, "waits": lambda: os.environ.get("OMP_WAIT_POLICY"), "end": lambda: os._exit(3)})
"""


@pytest.fixture
def peer() -> Any:
    started = Peer([sys.executable, "-c", ANSWERS])
    yield started
    started.close()


def test_a_peer_answers_and_tells_its_errors(peer: Peer) -> None:
    assert peer.ask("half", number=3) == 1.5
    with pytest.raises(PeerError, match="TypeError: unsupported operand"):
        peer.ask("half", number="x")
    with pytest.raises(PeerError, match="KeyError: 'third'"):
        peer.ask("third")
    assert peer.ask("resident") > 2**20
    with pytest.raises(PeerError, match="ended with 3"):
        peer.ask("end")
    with pytest.raises(PeerError, match="ended with 3"):
        peer.ask("half", number=1)


def test_threads_of_a_peer_wait_as_its_libraries_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    started = Peer([sys.executable, "-c", ANSWERS])
    assert started.ask("waits") is None
    started.close()


def test_a_peer_rests_once_its_threads_have_ended_their_work(peer: Peer) -> None:
    end = peer.ask("spin", seconds=0.5)  # the clock is the machine's, the same in both processes
    peer.rest()
    assert time.monotonic() >= end
    peer.ask("spin", seconds=1.0)
    begin = time.monotonic()
    peer.rest(most=0.2)
    assert time.monotonic() - begin < 0.9


def test_a_peer_that_does_not_start_is_told() -> None:
    with pytest.raises(PeerError, match="did not start"):
        Peer(["no-such-program"])


def test_weights_in_the_names_and_the_order_of_llama_cpp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("gguf", "llama_cpp"):  # in an environment of their own
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.syspath_prepend(str(Path(driver.__file__).parent))
    llama = importlib.import_module("benchmarks.peers_cpu.llama_peer")
    model = models.build("deepseek_v2", num_hidden_layers=2, first_k_dense_replace=2, q_lora_rank=None)
    config, weights = model.config, model.to(torch.bfloat16).state_dict()
    np.savez(tmp_path / "weights.npz", **{n: w.view(torch.uint16).numpy() for n, w in weights.items()})
    H, N, V, L = (
        config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim, config.kv_lora_rank,
    )  # fmt: skip
    with np.load(tmp_path / "weights.npz") as stored:
        found = dict(llama.tensors(stored, {"H": H, "N": N, "V": V, "L": L}))
    assert len(found) == len(weights) + 2  # W_kc and W_v apart, in each of two layers
    made = {n: torch.from_numpy(bits).view(torch.bfloat16) for n, bits in found.items()}
    up = weights["model.layers.1.self_attn.kv_b_proj.weight"].view(H, N + V, L)
    assert torch.equal(made["blk.1.attn_k_b.weight"].mT, up[:, :N])
    assert torch.equal(made["blk.1.attn_v_b.weight"], up[:, N:])
    assert torch.equal(made["blk.0.attn_output.weight"], weights["model.layers.0.self_attn.o_proj.weight"])
    assert torch.equal(made["token_embd.weight"], weights["model.embed_tokens.weight"])


@full("command")
def test_steps_and_prompts_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setattr(driver, "python_of", lambda *_: (_ for _ in ()).throw(PeerError("cannot be installed")))
    given = "--layers 1 --peers eager,llama_q8_0 --context 24 --prompt 16 --batch 2 --rounds 2 --budget 1"
    monkeypatch.setattr(sys, "argv", ["peers_cpu", *given.split(), "--out", str(tmp_path / "out.json")])
    driver.main()
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())["rows"]
    assert "llama_q8_0 is left out: cannot be installed" in said
    assert [(row["kind"], row["tokens"], row["batch"], set(row["ms"])) for row in rows] == [
        ("step", 24, 2, {"eager"}),
        ("prompt", 16, 2, {"eager"}),
    ]
    assert all(0 < row["error"]["eager"] < 0.08 for row in rows)
