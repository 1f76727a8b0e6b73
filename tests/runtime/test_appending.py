"""Room behind cached rows: whatever is appended to what, every tensor shows what ``cat`` would have made."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import random
import threading

import pytest
import torch

from mla_compile.runtime import appending
from mla_compile.runtime.appending import room_for
from tests.support.programs import seeded

SIZES = [(1, 1, 6, 4), (3, 1, 6, 4), (2, 6), (2, 3, 0, 5)]


def axis_of(sizes: tuple[int, ...]) -> int:
    return 2 if len(sizes) == 4 else 1


def appended(rows: torch.Tensor, new: torch.Tensor, axis: int) -> torch.Tensor:
    """What a call does: it is given the room and writes the new rows there."""
    count = new.shape[axis]
    joined = room_for(rows, axis, count)
    joined.narrow(axis, rows.shape[axis], count).copy_(new)
    return joined


def some(sizes: tuple[int, ...], axis: int, count: int, seed: int) -> torch.Tensor:
    return seeded(*(count if d == axis else n for d, n in enumerate(sizes)), seed=seed)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_of_continuations(sizes: tuple[int, ...], seed: int) -> None:
    axis, chance = axis_of(sizes), random.Random(seed)
    first = seeded(*sizes)
    known = [(first, first.clone())]
    for number in range(60):
        rows, expected = known[-1] if chance.random() < 0.6 else chance.choice(known)
        new = some(sizes, axis, chance.choice([1, 1, 1, 2, 9]), number)
        joined = appended(rows, new, axis)
        known.append((joined, torch.cat([expected, new], axis)))
        assert joined.shape == known[-1][1].shape
        assert all(torch.equal(have, want) for have, want in known), "an older tensor was changed"


@pytest.mark.parametrize("sizes", SIZES)
def test_memory_doubles_and_rows_stay_where_they_are(sizes: tuple[int, ...]) -> None:
    axis = axis_of(sizes)
    rows = seeded(*sizes)
    addresses, strides = [], []
    for number in range(1000):
        rows = appended(rows, some(sizes, axis, 1, number), axis)
        addresses.append(rows.data_ptr())
        strides.append([s for n, s in zip(rows.shape, rows.stride(), strict=True) if n > 1])
    assert sum(a != b for a, b in itertools.pairwise(addresses)) < 10, "ten powers of two up to 1,024"
    assert all(one == strides[-1] for one in strides[1:])
    held = rows.untyped_storage().nbytes()
    assert held <= 2 * 8 * rows.numel()


def test_the_callers_tensor_is_never_written_to() -> None:
    whole = seeded(2, 1, 8, 4)
    kept = whole.clone()
    rows = whole[:, :, :6]
    appended(rows, torch.zeros(2, 1, 2, 4, dtype=whole.dtype), 2)
    assert torch.equal(whole, kept)


def changed_data(rows: torch.Tensor) -> torch.Tensor:
    rows.data = rows.data * 2
    return rows


def resized(rows: torch.Tensor) -> torch.Tensor:
    return rows.resize_(1, 1, rows.shape[2], rows.shape[3]).mul_(2)


def saved(rows: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(rows, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file)
    return loaded


@pytest.mark.parametrize(
    "touch",
    [torch.clone, copy.deepcopy, changed_data, resized, saved, lambda x: x[:, :, :-1], lambda x: x.flip(2),
     lambda x: x.mT, lambda x: x.detach(), lambda x: x.mul_(3), lambda x: x.float()],
)  # fmt: skip
def test_what_callers_do_to_their_cache(touch) -> None:
    """Copies, slices, other memory under the same tensor: the next rows get behind what the caller shows."""
    rows = appended(seeded(1, 1, 4, 5), seeded(1, 1, 1, 5), 2)
    rows = touch(rows)
    expected = rows.clone()
    for number in range(4):
        new = some(tuple(rows.shape), 2, 1, number).to(rows.dtype)
        rows, expected = appended(rows, new, 2), torch.cat([expected, new], 2)
        assert torch.equal(rows, expected)


def test_rows_pass_in_and_out_of_inference_mode() -> None:
    rows = expected = seeded(2, 1, 3, 4)
    for number, inference in enumerate([True, True, False, True, False]):
        with torch.inference_mode(inference), torch.no_grad():
            new = some((2, 1, 1, 4), 2, 1, number)
            rows, expected = appended(rows, new, 2), torch.cat([expected, new], 2)
        assert torch.equal(rows, expected)
        assert not rows.is_inference()
        assert rows._base is None, "a compiler would guard the size of the memory behind a view"


def test_threads_that_continue_the_same_rows() -> None:
    start = appended(seeded(1, 1, 4, 3), seeded(1, 1, 1, 3), 2)
    wrong: list[int] = []

    def work(number: int) -> None:
        rows, expected = start, start.clone()
        for step in range(100):
            new = torch.full((1, 1, 1, 3), number + step / 128, dtype=torch.float64)
            rows, expected = appended(rows, new, 2), torch.cat([expected, new], 2)
        if not torch.equal(rows, expected):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_where_twice_the_memory_is_not_there_the_rows_alone_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch.empty_strided, []

    def scarce(sizes: tuple[int, ...], *rest: object, **kind: object) -> torch.Tensor:
        asked.append(sizes[2])
        if sizes[2] > 7:
            raise torch.OutOfMemoryError("no more than 7 rows")
        return real(sizes, *rest, **kind)

    monkeypatch.setattr(torch, "empty_strided", scarce)
    rows, new = seeded(1, 1, 6, 3), seeded(1, 1, 1, 3)
    joined = appended(rows, new, 2)
    assert torch.equal(joined, torch.cat([rows, new], 2))
    assert asked == [8, 7]
    with pytest.raises(torch.OutOfMemoryError):
        appended(joined, new, 2)
    assert torch.equal(joined, torch.cat([rows, new], 2))


def test_memory_goes_with_the_last_tensor_that_shows_it() -> None:
    rows = appended(seeded(1, 1, 4, 3), seeded(1, 1, 1, 3), 2)
    later = appended(rows, seeded(1, 1, 1, 3), 2)
    first = rows.data_ptr()
    del rows
    gc.collect()
    assert appended(later, seeded(1, 1, 1, 3), 2).data_ptr() == first
    before = len(appending._held)
    del later
    gc.collect()
    assert len(appending._held) < before
