"""Many users of one model: continuous batching over latent pages, against ``generate()`` one by one and in batches.

    python benchmarks/serving.py
    python benchmarks/serving.py --users 16 --models v2lite
    python benchmarks/serving.py --leak 2000

Each user sends requests at random times (Poisson), so ``--users 16`` sends sixteen times as many as one. Prompts have
log-normal, answers geometric lengths. All ways to serve get the same requests at the same times, in one process:

* ``one_by_one``: ``generate()`` of the model as it is, the next request when one has ended;
* ``optimized``: the same with ``mla_compile.optimize(model)``;
* ``padded``: all that wait (up to the number of users) as one left-padded batch, until its longest answer has ended;
* ``continuous``: ``mla_compile.continuous_batching(model)`` and the manager of transformers.

Tokens per second count the answers' tokens from the first arrival to the last answer; the time to the first token is
counted from the arrival. Before that, greedy tokens of the first and the last way have to agree.

``--leak`` sends so many requests to a tiny model, some of them cancelled, impossible or with clients that never look,
and follows the memory of the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import DTYPES, MODELS, build, machine, names, table, words, write

import torch  # isort: skip  # after common, which sets the environment

import psutil

import mla_compile

PROMPT, ANSWER = (16, 512), (4, 96)  # tokens, the least and the most
MEAN_ANSWER = 32
WAYS = ("one_by_one", "optimized", "padded", "continuous")


@dataclass
class Job:
    """One request: when it comes, what it asks, and when its tokens came."""

    arrives: float
    ids: list[int]
    new: int
    came: list[float]


def load(users: int, count: int, rate: float, vocabulary: int, seed: int = 0) -> list[Job]:
    """Requests of so many users, ``rate`` per user and second."""
    rng, at, jobs = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate * users)
        length = min(max(int(rng.lognormvariate(math.log(120), 0.8)), PROMPT[0]), PROMPT[1])
        new = min(max(int(rng.expovariate(1 / MEAN_ANSWER)), ANSWER[0]), ANSWER[1])
        jobs.append(Job(at, [rng.randrange(3, vocabulary) for _ in range(length)], new, []))
    return jobs


def figures(jobs: Sequence[Job]) -> dict[str, float]:
    """What a load came to."""
    end = max(job.came[-1] for job in jobs)
    first = sorted(job.came[0] - job.arrives for job in jobs)
    each = sorted((job.came[-1] - job.came[0]) / (len(job.came) - 1) for job in jobs if len(job.came) > 1)
    return {
        "tokens_per_second": sum(len(job.came) for job in jobs) / (end - jobs[0].arrives),
        "first_token_median_s": first[len(first) // 2],
        "first_token_p99_s": first[min(len(first) - 1, int(0.99 * len(first)))],
        "token_median_ms": 1e3 * each[len(each) // 2],
        "token_p99_ms": 1e3 * each[min(len(each) - 1, int(0.99 * len(each)))],
        "seconds": end,
    }


def _wait(start: float, until: float) -> None:
    time.sleep(max(0.0, start + until - time.perf_counter()))


def by_generate(model: Any, jobs: Sequence[Job], most: int) -> None:
    """Up to ``most`` waiting requests at a time, through ``generate()``."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    start, left = time.perf_counter(), list(jobs)

    class Clock(StoppingCriteria):
        def __init__(self, batch: Sequence[Job]) -> None:
            self.batch = batch

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            now = time.perf_counter() - start
            for job in self.batch:
                if len(job.came) < job.new:
                    job.came.append(now)
            return torch.zeros(len(self.batch), dtype=torch.bool)

    while left:
        _wait(start, left[0].arrives)
        now = time.perf_counter() - start
        batch = [job for job in left[:most] if job.arrives <= now]
        del left[: len(batch)]
        longest = max(len(job.ids) for job in batch)
        ids = torch.tensor([[0] * (longest - len(job.ids)) + job.ids for job in batch])
        mask = torch.tensor([[0] * (longest - len(job.ids)) + [1] * len(job.ids) for job in batch])
        model.generate(
            ids, attention_mask=mask, max_new_tokens=max(job.new for job in batch), do_sample=False,
            stopping_criteria=StoppingCriteriaList([Clock(batch)]), pad_token_id=0, eos_token_id=None,
        )  # fmt: skip


def by_manager(manager: Any, jobs: Sequence[Job]) -> None:
    """All requests as they come, through the manager; transformers notes the time of each token."""
    start = time.perf_counter()
    by_name: dict[str, Job] = {}

    def send() -> None:
        for number, job in enumerate(jobs):
            _wait(start, job.arrives)
            by_name[f"job{number}"] = job
            manager.add_request(job.ids, f"job{number}", max_new_tokens=job.new, record_timestamps=True)

    sender = threading.Thread(target=send)
    sender.start()
    for _ in jobs:
        while (one := manager.get_result(timeout=1)) is None:
            if not manager.is_running():
                raise SystemExit("the manager has stopped")
        if one.error is not None:
            raise SystemExit(f"a request failed: {one.error}")
        by_name[one.request_id].came = [at - start for at in one.timestamps]
    sender.join()


def measure(args: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    """All numbers of users and all ways, after the rows that are kept."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    tokens = PROMPT[1] + ANSWER[1]
    model = untied(build(name, DTYPES[args.dtype], args.layers, 4 * tokens))
    vocabulary = model.config.vocab_size
    fast = mla_compile.continuous_batching(model, codegen=args.codegen)
    optimized = mla_compile.optimize(model, codegen=args.codegen)
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    blocks = math.ceil(max(args.users) * tokens / args.page)
    pool = ContinuousBatchingConfig(page_size=args.page, num_blocks=blocks, max_batch_tokens=args.batch_tokens)
    rows = args.kept
    with fast.continuous_batching_context_manager(greedy, continuous_batching_config=pool) as manager:
        check(model, manager, load(4, 4, 1.0, vocabulary, seed=7))
        for ways in (lambda jobs: by_generate(model, jobs, 1), lambda jobs: by_generate(optimized, jobs, 1)):
            ways(load(1, 3, 100.0, vocabulary, seed=8))  # what is compiled is compiled here
        for users in args.users:
            served: dict[str, Callable[[list[Job]], None]] = {
                "one_by_one": lambda jobs: by_generate(model, jobs, 1),
                "optimized": lambda jobs: by_generate(optimized, jobs, 1),
                "padded": lambda jobs, users=users: by_generate(model, jobs, users),
                "continuous": lambda jobs: by_manager(manager, jobs),
            }
            row: dict[str, Any] = {"model": name, "dtype": args.dtype, "layers": args.layers, "users": users}
            row |= {"requests": max(args.least, users * args.each), "rate": args.rate, "codegen": args.codegen}
            for way, serve in ((way, served[way]) for way in args.ways):
                jobs = load(users, row["requests"], args.rate, vocabulary)
                serve(jobs)
                row[way] = figures(jobs)
                print("  " + "  ".join(describe(row, way)), flush=True)
            rows.append(row)
            pool_bytes = fast.mla_batching.bytes_of_token * args.page
            row["pool"] = {"blocks": blocks, "bytes_of_block": pool_bytes}
            row["graphs"] = [str(graph) for graph in fast.mla_batching.graphs]
            write(args.out, {"benchmark": "serving", "machine": machine()}, rows)
    return rows


def untied(model: Any) -> Any:
    """The model with a head of its own: with tied random embeddings it would say its last token again and again."""
    order = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(0))
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight[order].clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    return model


def check(model: Any, manager: Any, jobs: Sequence[Job]) -> None:
    """The same greedy tokens, or no figures. Numbers this close to each other are rounded alike only in float32."""
    by_name = {manager.add_request(job.ids, max_new_tokens=8): job for job in jobs}
    for _ in jobs:
        while (one := manager.get_result(timeout=1)) is None:
            pass
        ids = by_name[one.request_id].ids
        want = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, len(ids) :]
        if model.dtype == torch.float32 and one.generated_tokens != want.tolist():
            raise SystemExit(f"tokens differ: {one.generated_tokens}, expected {want.tolist()}")


def leak(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Memory of the process over many requests."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    fast = mla_compile.continuous_batching(build("tiny", torch.float32, 1, 2048), codegen="eager")
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1)
    pool = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=128)
    rng, process, rows = random.Random(0), psutil.Process(), []
    vocabulary = fast.config.vocab_size
    with fast.continuous_batching_context_manager(greedy, continuous_batching_config=pool) as manager:
        for sent in range(0, args.leak, 100):
            waited = 0
            for number in range(100):
                kind = rng.random()
                ids = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(1, 120))]
                if kind < 0.05:
                    ids = [vocabulary + 5]  # fails
                request = manager.add_request(ids, f"r{sent + number}", streaming=kind > 0.9)
                if kind > 0.95:
                    manager.cancel_request(request)  # a client that is gone
                else:
                    waited += 1
            done = 0
            end = time.monotonic() + 120
            while done < waited and time.monotonic() < end:
                one = manager.get_result(timeout=1)
                done += one is not None and one.is_finished() and (one.request_id is not None)
                if not manager.batch_processor.has_pending_requests() and manager.input_queue.empty():
                    break
            _drain(manager.output_router.output_queue)
            gc.collect()
            cache = manager.batch_processor.cache
            held = sum(map(len, cache.blocks.block_table.values()))
            rss = process.memory_info().rss
            rows.append({"model": "tiny", "requests": sent + 100, "rss_mib": rss / 2**20, "blocks_held": held})
            print(f"  {sent + 100} requests, {rss / 2**20:.1f} MiB, {held} blocks held", flush=True)
    return rows


def _drain(results: queue.Queue[Any]) -> None:
    while not results.empty():
        results.get_nowait()


def describe(row: dict[str, Any], way: str) -> list[str]:
    """One way to serve as text."""
    f = row[way]
    return [
        row["model"], str(row["users"]), str(row["requests"]), way, f"{f['tokens_per_second']:.1f}",
        f"{f['first_token_median_s']:.2f}", f"{f['first_token_p99_s']:.2f}", f"{f['token_median_ms']:.1f}",
        f"{f['token_p99_ms']:.1f}",
    ]  # fmt: skip


HEAD = ("model", "users", "requests", "way", "tokens/s", "first s", "p99", "token ms", "p99")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(list(MODELS)), default=["minicpm3"])
    parser.add_argument("--users", type=words(int), default=[1, 4, 16, 64])
    parser.add_argument("--each", type=int, default=1, help="requests of each user")
    parser.add_argument("--least", type=int, default=16, help="requests at least")
    parser.add_argument("--rate", type=float, default=0.2, help="requests of a user in a second")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=512)
    parser.add_argument("--ways", type=names(WAYS), default=list(WAYS), help="leave out what takes too long")
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--codegen", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--leak", type=int, default=0, metavar="REQUESTS", help="follow the memory instead")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out = args.out or Path(__file__).parent / "results" / ("serving_leak.json" if args.leak else "serving.json")
    with torch.no_grad():
        if args.leak:
            write(args.out, {"benchmark": "serving_leak", "machine": machine()}, leak(args))
        else:
            args.kept = json.loads(args.out.read_text())["rows"] if args.append else []
            for name in args.models:
                rows = measure(args, name)
            print("\n" + table([describe(row, way) for row in rows for way in WAYS if way in row], HEAD))
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
