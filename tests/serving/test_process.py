"""``mla-compile serve`` as a process: from nothing to ready, and to its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import requests

from tests.support.server import alone, complete, words
from tests.support.tiers import full

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("-m", "mla_compile", "serve")
SMALL = ("--codegen", "eager", "--block-size", "16", "--num-blocks", "32", "--max-num-seqs", "8")
RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *COMMAND)
TRIES = int(os.environ.get("MLA_SERVER_STOPS", "1"))
REQUESTS = int(os.environ.get("MLA_SERVER_REQUESTS", "1000"))


@contextmanager
def started(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *command, "--port", str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()  # torchrun ends its processes then, which would outlive it otherwise
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=40)
        process.kill()
        process.communicate()


def ready(address: str) -> list[int]:
    """Waits until all is compiled; the answers of /health until then, each once in a row."""
    seen: list[int] = []
    for _ in range(1200):
        try:
            status = requests.get(f"{address}/health", timeout=60).status_code
        except requests.exceptions.ConnectionError:
            status = 0
        if seen[-1:] != [status]:
            seen.append(status)
        if status == 200:
            return seen
        time.sleep(0.1)
    raise AssertionError(seen)


@full("command")
def test_from_nothing_to_ready_and_to_its_end(folder, model):
    with started(*COMMAND, str(folder), *SMALL, "--served-model-name", "tiny") as (process, address):
        assert ready(address)[-2:] == [503, 200]
        assert complete(address, "w7 w8") == alone(model, "w7 w8", 6)
        requests_with_the_id_of_others(process, address, model)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def requests_with_the_id_of_others(process, address, model):
    """Half of the clients repeat an id, stream, or leave; the others get what ``generate()`` says, and memory stays."""
    want = [alone(model, f"w{n} w6", 12) for n in range(8)]
    memory, marks, wrong = psutil.Process(process.pid).memory_info, list[int](), list[object]()

    def ask(number: int) -> None:
        if number % (REQUESTS // 4) == 0:
            marks.append(memory().rss)
        if number % 2:
            said = complete(address, f"w{number % 8} w6", 12)
            wrong.extend([said] if said != want[number % 8] else [])
            return
        body = {"prompt": "w9 " * (number % 40 + 1), "max_tokens": number % 30 + 1, "stream": number % 3 == 0}
        with suppress(requests.exceptions.RequestException):
            timeout = 0.02 if number % 5 == 0 else 60
            requests.post(f"{address}/v1/completions", json=body, headers={"x-request-id": "same"}, timeout=timeout)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(REQUESTS)))
    assert not wrong
    assert memory().rss - marks[1] < 16 << 20
    assert requests.get(f"{address}/health", timeout=60).status_code == 200


@full("command")
def test_sigterm_under_load_ends_within_the_grace_period(folder):
    """With clients that wait, clients that have left, and streams; what runs is finished or cancelled."""
    for _ in range(TRIES):
        with started(*COMMAND, str(folder), *SMALL, "--grace", "2") as (process, address):
            ready(address)
            stop = threading.Event()

            def ask(seed: int, address: str = address, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    body = {"prompt": f"w{seed + 3}", "max_tokens": 400, "stream": seed % 2 == 0}
                    try:
                        requests.post(f"{address}/v1/completions", json=body, timeout=0.3 if seed % 3 else 30)
                    except requests.exceptions.RequestException:
                        time.sleep(0.02)

            clients = [threading.Thread(target=ask, args=(seed,)) for seed in range(12)]
            for client in clients:
                client.start()
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            begin = time.monotonic()
            assert process.wait(timeout=60) == 0
            took = time.monotonic() - begin
            stop.set()
            for client in clients:
                client.join()
            assert took < 2 + 20  # on a busy machine


@full("command")
def test_a_second_sigterm_ends_at_once(folder):
    with started(*COMMAND, str(folder), *SMALL) as (process, address):
        ready(address)

        def wait() -> None:
            body = {"prompt": "w5", "max_tokens": 500}
            with suppress(requests.exceptions.RequestException):
                while True:
                    requests.post(f"{address}/v1/completions", json=body, timeout=60)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) in (
            143,
            -15,
            0,
        )  # 0: it had ended before
        waiting.join()


@full("command")
def test_a_folder_that_is_none(tmp_path):
    with started(*COMMAND, str(tmp_path)) as (process, _):
        said = process.communicate(timeout=120)[1]
        assert process.returncode == 2
        assert "cannot be loaded" in said


@full("command")
def test_the_example(folder, model):
    command = ("examples/torch_server.py", str(folder), "--codegen", "eager", "--blocks", "64", "--page", "16")
    with started(*command) as (process, address):
        ready(address)
        assert complete(address, "w7 w8") == alone(model, "w7 w8", 6)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@full("command")
@pytest.mark.parametrize("how", [("-dcp", "2"), ("-tp", "1", "-dcp", "2")], ids=["heads and rows", "rows"])
def test_ranks_that_share_a_cache(folder, model, how):
    """The tokens of one process; what has no seed is drawn alike on all ranks; SIGTERM ends them together."""
    with started(*RANKS, str(folder), *SMALL, *how) as (process, address):
        answers_of_one_process(address, model)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 1, "torchrun's own"


def answers_of_one_process(address, model):
    assert ready(address)[-1] == 200
    prompts = [words(n, seed=n) for n in (5, 20, 1, 33)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: complete(address, prompt), prompts))
    assert found == [alone(model, prompt, 6) for prompt in prompts]
    assert len({tuple(complete(address, "w5", 6, temperature=2.0)) for _ in range(3)}) > 1
    assert len({tuple(complete(address, "w5", 6, temperature=2.0, seed=7)) for _ in range(3)}) == 1


@full("command")
def test_ranks(folder, model):
    """Each of them has half of the heads; one that dies ends the others."""
    with started(*RANKS, str(folder), *SMALL) as (process, address):
        answers_of_one_process(address, model)
        ranks = psutil.Process(process.pid).children(recursive=True)
        second = next(rank for rank in ranks if rank.environ().get("RANK") == "1")
        second.kill()
        assert process.wait(timeout=60) == 1
        assert not any(rank.is_running() for rank in ranks)
