"""What goes wrong for one request stays with it: it is cancelled, impossible, too long, or fails in the model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest
from transformers import GenerationConfig

from mla_compile.batching.sampling import Sampling
from mla_compile.errors import InputError, OptionError
from tests.support.serving import alone, free_blocks, prompts, results, running, tokens


def test_a_cancelled_request_gives_its_pages_back(served):
    model, fast = served
    ids = prompts((30, 9))
    with running(fast, new=400, blocks=64, max_batch_tokens=64) as manager:
        long = manager.add_request(ids[0], streaming=True)
        while manager.get_result(timeout=60).request_id != long:
            pass
        short = manager.add_request(ids[1], max_new_tokens=6)
        manager.cancel_request(long)
        while True:
            one = manager.get_result(timeout=60)
            if one.request_id == short:
                break
        assert one.generated_tokens == alone(model, ids[1], 6)
        _wait(lambda: not manager.batch_processor.scheduler.active_requests)
        assert free_blocks(manager) == 64


def test_a_request_that_is_cancelled_before_it_runs(served):
    _, fast = served
    ids = prompts((30, 9))
    with running(fast, new=8, max_requests_per_batch=1) as manager:
        first, second = manager.add_request(ids[0]), manager.add_request(ids[1])
        manager.cancel_request(second)
        assert set(results(manager, 1)) == {first}
        _wait(lambda: not manager.batch_processor.has_pending_requests())


BAD = {
    "no tokens": ([], "the prompt is empty"),
    "a token that does not exist": ([5, 100_000], "the prompt holds 100000, expected token ids below 199"),
    "a negative token": ([5, -3], "the prompt holds -3"),
    "no token": ([5, "x"], "the prompt holds 'x'"),
    "more than the pool holds": ([7] * 2000, "may grow to 2005 tokens, and the pool has room for 1024"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_request_fails_alone(served, bad):
    model, fast = served
    ids, told = bad
    good = prompts((20, 4))
    with running(fast, new=6) as manager:
        names = [manager.add_request(good[0]), manager.add_request(ids), manager.add_request(good[1])]
        found = results(manager, 3)
        assert told in found[names[1]].error
        assert [found[names[k]].generated_tokens for k in (0, 2)] == [alone(model, one, 6) for one in good]
        assert free_blocks(manager) == 64


WRONG = {
    "no token wanted": ({"max_new_tokens": 0}, "max_new_tokens is 0, expected a number from 1 on"),
    "tokens that are no number": ({"max_new_tokens": "5"}, "max_new_tokens is '5'"),
    "a setting that nobody knows": ({"spam": 1}, "Unknown logit_processor_kwargs"),
    "a sampling that is none": ({"mla_sampling": 0.7}, "expected Sampling"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_request_that_wants_what_is_not_there_fails_alone(served, wrong):
    model, fast = served
    how, told = wrong
    ids = prompts((9,))[0]
    with running(fast, new=6) as manager:
        bad, good = manager.add_request(ids, **how), manager.add_request(ids)
        found = results(manager, 2)
        assert told in found[bad].error
        assert found[good].generated_tokens == alone(model, ids, 6)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": 0.0}, "temperature is 0, expected more"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 1 << 40}, "expected a number below 2\\*\\*31"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"seed": 1 << 64}, "expected a number below 2\\*\\*64"),
    ],
)
def test_settings_that_nothing_can_be_drawn_with_are_refused_before_a_step(settings, told):
    with pytest.raises(OptionError, match=told):
        Sampling(**settings)


def test_transformers_own_settings_of_a_request_fail_alone(served):
    _, fast = served
    config = GenerationConfig(max_new_tokens=4, do_sample=True, eos_token_id=-1, temperature=0.7, top_k=5, top_p=0.9)
    bad = {"temperature": 0.0}, {"top_k": 1 << 40}, {"top_p": 0.0}
    with running(fast, generation=config, per_request_processors=True) as manager:
        names = [manager.add_request([5, 6, 7], **how) for how in (*bad, {"temperature": 0.5})]
        found = results(manager, 4)
        for name, how in zip(names, bad, strict=False):
            assert f"{next(iter(how))} is" in found[name].error
        assert len(found[names[3]].generated_tokens) == 4


def test_an_id_that_is_taken_is_replaced(served):
    """As long as a request of that id is under way; each is answered, by what its id says."""
    model, fast = served
    ids = prompts((9, 5, 14))
    with running(fast, new=6) as manager:
        with manager.pause():
            names = [manager.add_request(one, request_id="same") for one in ids]
        found = results(manager, 3)
        assert names[0] == "same"
        assert len(set(names)) == 3
        assert [found[name].generated_tokens for name in names] == [alone(model, one, 6) for one in ids]
        assert manager.add_request(ids[1], "same", 5) == "same"
        assert results(manager, 1)["same"].generated_tokens == alone(model, ids[1], 5)
        manager.cancel_request(manager.add_request(ids[0], request_id="gone"))
        _wait(lambda: len(manager.output_router) == 0)
        for wrong in (7, ["same"]):
            with pytest.raises(InputError, match="the id of a request is"):
                manager.add_request(ids[0], request_id=wrong)
            with pytest.raises(InputError, match="the id of a request is"):
                manager.cancel_request(wrong)


def test_ids_of_copies_and_of_several_requests_are_not_given_twice(served):
    _, fast = served
    config = GenerationConfig(max_new_tokens=3, do_sample=True, eos_token_id=-1, num_return_sequences=2)
    with running(fast, generation=config) as manager:
        with manager.pause():
            first = manager.add_request([5, 6, 7], request_id="one")
            second = manager.add_request([5, 6, 8], request_id="one__child#0")
            manager.add_request([5, 6, 9], request_id="req_1")
            several = manager.add_requests([[7, 8], [7, 9]])
        assert second != "one__child#0"
        assert not {"req_1"} & set(several)
        found = results(manager, 10)
        assert {first, second, f"{first}__child#0", f"{second}__child#0", *several} <= set(found)
        assert all(one.error is None for one in found.values())


def test_a_handler_is_not_taken_from_a_request(served):
    _, fast = served

    async def twice(manager):
        manager.register_result_handler("same", print)
        with pytest.raises(InputError, match="'same' is under way"):
            manager.register_result_handler("same", print)

    with running(fast) as manager:
        asyncio.run(twice(manager))


def test_each_request_is_drawn_by_its_own_settings(served):
    """A seed gives the same tokens again, beside others and after it was put back; the most probable stay so."""
    model, fast = served
    ids = prompts((9, 12))
    hot = Sampling(temperature=3.0, top_k=50, top_p=0.95, seed=4)
    with running(fast, new=12) as manager:

        def drawn(*settings):
            names = [manager.add_request(ids[0], **({"mla_sampling": one} if one else {})) for one in settings]
            found = results(manager, len(names))
            return [found[name].generated_tokens for name in names]

        (first,) = drawn(replace(hot, _generators={}))
        plain = alone(model, ids[0], 12)
        assert first != plain
        found = drawn(None, replace(hot, _generators={}), Sampling(temperature=3.0, seed=5), None)
        assert (found[0], found[1], found[3]) == (plain, first, plain)
        assert found[2] not in (plain, first)


def test_requests_wait_for_a_full_pool(served):
    """Each of them takes most of the pool."""
    model, fast = served
    ids = prompts((70, 60, 75, 66))
    assert tokens(fast, ids, page=8, blocks=12) == [alone(model, one) for one in ids]


def test_running_requests_make_room_for_each_other(served):
    """All are admitted and outgrow the pool together: some are put back, and read again what they had."""
    model, fast = served
    ids = prompts((17, 18, 19, 20), seed=9)
    evicted = []
    with running(fast, new=40, page=4, blocks=24, safety_margin=0.0) as manager:
        manager.warmup()
        inner = manager.batch_processor.offloading_manager.offload_requests
        manager.batch_processor.offloading_manager.offload_requests = lambda: evicted.append(inner()) or evicted[-1]
        names = [manager.add_request(one) for one in ids]
        found = results(manager, len(ids))
        assert free_blocks(manager) == 24
    assert any(evicted)
    assert [found[name].generated_tokens for name in names] == [alone(model, one, 40) for one in ids]


def test_a_request_without_an_end_that_outgrows_the_pool_is_told_so(served):
    model, fast = served
    ids = prompts((20, 6))
    with running(fast, new=None, page=4, blocks=16, safety_margin=0.0) as manager:
        endless = manager.add_request(ids[0])
        short = manager.add_request(ids[1], max_new_tokens=5)
        found = results(manager, 2)
        assert found[short].generated_tokens == alone(model, ids[1], 5)
        assert "the pool of 64 tokens is full" in found[endless].error
        got = found[endless].generated_tokens
        assert len(got) > 40
        assert got == alone(model, ids[0], len(got))
        later = manager.add_request(ids[1], max_new_tokens=5)
        assert results(manager, 1)[later].generated_tokens == alone(model, ids[1], 5)


class TestAModelThatFails:
    def test_on_a_prompt(self, served):
        model, fast = served
        ids = prompts((20, 13, 8))
        with running(fast, new=6) as manager:
            steps = manager._steps
            inner = steps._prompt

            def failing(part):
                if len(part.ids) == 13:
                    raise RuntimeError("out of luck")
                return inner(part)

            steps._prompt = failing
            names = [manager.add_request(one) for one in ids]
            found = results(manager, 3)
            assert found[names[1]].error == "out of luck"
            for k in (0, 2):
                assert found[names[k]].generated_tokens == alone(model, ids[k], 6)
            assert free_blocks(manager) == 64

    @pytest.mark.parametrize("streaming", [False, True])
    def test_in_the_middle_of_decoding(self, served, streaming):
        """The batch fails, each request is tried alone, and the one that it was is answered with what it has."""
        model, fast = served
        ids = prompts((20, 13, 8))
        with running(fast, new=8) as manager:
            steps = manager._steps
            inner = steps._decoded

            def failing(parts):
                if any(part.past == 16 for part in parts):  # the request of 13 tokens, on its fourth
                    raise RuntimeError("out of luck")
                return inner(parts)

            steps._decoded = failing
            names = [manager.add_request(ids[1], streaming=streaming)]
            ends = {}
            if not streaming:
                names += [manager.add_request(one, max_new_tokens=3) for one in (ids[0], ids[2])]
            while len(ends) < len(names):
                one = manager.get_result(timeout=60)
                if one.is_finished():
                    assert one.request_id not in ends
                    ends[one.request_id] = one
            assert ends[names[0]].error == "out of luck"
            assert ends[names[0]].generated_tokens == alone(model, ids[1], 4)
            for name, k in zip(names[1:], (0, 2), strict=False):
                assert ends[name].generated_tokens == alone(model, ids[k], 3)
            assert manager.get_result(timeout=0.2) is None
            assert free_blocks(manager) == 64


class TestALoopThatDies:
    def test_everybody_is_answered_and_the_next_request_runs(self, served):
        model, fast = served
        ids = prompts((20, 13))
        with running(fast, new=300) as manager:
            first = manager.add_request(ids[0], streaming=True)
            while manager.get_result(timeout=60) is None:
                pass
            died = manager.batch_processor
            died.scheduler.schedule_batch = _broken
            second = manager.add_request(ids[1])
            found = {}
            while len(found) < 2:
                one = manager.get_result(timeout=60)
                if one is not None and one.is_finished():
                    found[one.request_id] = one
            assert {found[name].error for name in (first, second)} == {"the scheduler broke"}
            _wait(lambda: manager.background_thread_status.local_status == 0)
            third = manager.add_request(ids[1], max_new_tokens=6)
            assert results(manager, 1)[third].generated_tokens == alone(model, ids[1], 6)
            assert manager.batch_processor is not died
            assert manager.background_thread_status.fatal_error is None

    def test_it_does_not_start_again_for_ever(self, served):
        """A loop that dies over and over before its first step ends, and so does whoever waits for it."""
        _, fast = served
        with running(fast, new=4) as manager:
            create = manager._create_batch_processor

            def broken():
                made = create()
                made.scheduler.schedule_batch = _broken
                return made

            manager._create_batch_processor = broken
            manager.batch_processor.scheduler.schedule_batch = _broken

            def gives_up():
                manager.add_request([5, 6])
                return manager.background_thread_status.fatal_error is not None

            _wait(gives_up)
            del manager._create_batch_processor
        assert not manager.is_running()

    def test_a_pool_that_cannot_be_made_is_an_error_for_all(self, served):
        _, fast = served
        manager = fast.init_continuous_batching()
        manager._create_batch_processor = _broken
        manager.start()
        _wait(lambda: manager.background_thread_status.fatal_error is not None)
        assert str(manager.background_thread_status.fatal_error) == "the scheduler broke"
        _wait(lambda: not manager.is_running())
        assert manager.add_request([5, 6]) is None


def _broken(*_, **__):
    raise RuntimeError("the scheduler broke")


def _wait(condition, seconds: float = 120.0):
    event = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        event.wait(0.02)
    raise AssertionError("it did not happen")
