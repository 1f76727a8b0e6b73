"""Threads that compile and run at the same time, and a process that forks after compiling."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mla_compile import optimize
from tests.support.tiers import also
from tests.support.toy import Toy, decode_inputs

EAGER: dict[str, Any] = {"codegen": "eager", "lowering": "aten", "verify": False}
INDUCTOR: dict[str, Any] = {"codegen": "inductor", "lowering": "aten", "verify": False}


def at_once(works: Sequence[Callable[[], Any]]) -> None:
    """Run all in threads that start together; the first error is raised here."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> None:
        try:
            barrier.wait()
            with torch.no_grad():
                work()
        except BaseException as error:  # noqa: BLE001  it is raised again in the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def decoding(fast: Any, model: Any, seed: int, *, growing: bool = True) -> Callable[[], None]:
    def work() -> None:
        for step in range(4):
            inputs = decode_inputs(cached=7 + (seed + step if growing else 0), seed=10 * seed + step)
            torch.testing.assert_close(fast(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)

    return work


@pytest.mark.parametrize(
    "options", [{**EAGER, "fold": "always"}, *also("combination", EAGER), *also("inductor", INDUCTOR)]
)
def test_two_threads_share_one_optimized_model(options: dict[str, Any]) -> None:
    model = Toy().eval()
    fast = optimize(model, **options)
    growing = options is not INDUCTOR  # one graph is enough there: it takes seconds
    at_once([decoding(fast, model, seed, growing=growing) for seed in (1, 2)])
    assert fast.mla_report.absorbed
    assert fast.mla_report.refused == 0


def test_two_threads_compile_two_models_each_with_its_own_options() -> None:
    models = [Toy(seed).eval() for seed in (1, 2)]
    forms = ("absorbed", "expanded")
    fasts = [optimize(model, forms=form, **EAGER) for model, form in zip(models, forms, strict=True)]
    pairs = enumerate(zip(fasts, models, strict=True))
    at_once([decoding(fast, model, seed, growing=False) for seed, (fast, model) in pairs])
    absorbed, expanded = (fast.mla_report for fast in fasts)
    # That another thread compiles is no reason to run the original: both were compiled in these few calls.
    assert absorbed.absorbed
    assert absorbed.kept == 0
    assert expanded.kept
    assert expanded.absorbed == 0


def in_child(fast: Any, model: Any, answers: Any) -> None:
    # The pool of OpenMP stayed with the parent, and torch's own batched product waits for it for ever (its DataLoader's
    # workers do the same). Nothing of ours may wait for what the parent had.
    torch.set_num_threads(1)
    # Other sizes are other graphs: one for all sizes takes three times as long.
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        errors = []
        for inputs in (decode_inputs(), decode_inputs(batch=3, cached=30)):  # compiled before the fork, and after it
            errors.append(float((fast(*inputs)[0] - model(*inputs)[0]).abs().max()))
        other = optimize(model, forms="absorbed", **EAGER)
        errors.append(float((other(*inputs)[0] - model(*inputs)[0]).abs().max()))
        answers.put((max(errors), other.mla_report.absorbed))


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_runs_what_was_compiled_and_compiles_more() -> None:
    model = Toy().eval()
    fast = optimize(model, fold="always", **EAGER)
    with torch.no_grad():
        fast(*decode_inputs())
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=in_child, args=(fast, model, answers), daemon=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # a pool of OpenMP that the child lacks, whatever the machine and the environment give
    try:
        with torch.no_grad():
            fast(*decode_inputs())
        child.start()
    finally:
        torch.set_num_threads(threads)
    error, absorbed = answers.get(timeout=120)
    child.join(timeout=30)
    assert child.exitcode == 0
    assert error < 1e-5
    assert absorbed == 1
