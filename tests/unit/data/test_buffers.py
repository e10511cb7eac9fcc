"""Recycled memory: taken again when nobody holds it, never while somebody does."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from penstock.data.collate import _KEPT, BatchBuffers


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def taken(buffers: BatchBuffers, size: int = 1000) -> np.ndarray:
    array, at = buffers.take((size,), np.dtype(np.int64))
    assert at == address(array)
    return array


def test_memory_comes_back_when_nobody_holds_it() -> None:
    buffers = BatchBuffers()
    first = taken(buffers)
    place = address(first)
    del first
    assert address(taken(buffers)) == place


HOLDERS = {
    "the array": lambda array: array,
    "a reshaped view": lambda array: array.reshape(10, 100),
    "a slice": lambda array: array[3:4],
    "a view of a view": lambda array: array.reshape(10, 100)[2].view(np.uint8),
    "a memoryview": memoryview,
    "a tensor": torch.from_numpy,
    "a view of a tensor": lambda array: torch.from_numpy(array).view(10, 100)[3, 4:5],
    "a detached tensor": lambda array: torch.from_numpy(array).detach(),
    "a numpy view of a tensor": lambda array: torch.from_numpy(array).numpy()[::2],
    "an iterator": lambda array: array.flat,
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
def test_memory_does_not_come_back_while_it_is_held_by(hold) -> None:  # type: ignore[no-untyped-def]
    buffers = BatchBuffers()
    array = taken(buffers)
    place = address(array)
    held = hold(array)
    del array
    others = [taken(buffers) for _ in range(2 * _KEPT)]
    assert place not in map(address, others)
    assert len({*map(address, others)}) == 2 * _KEPT, "nor is any of them handed out twice"
    del held, others
    again = [taken(buffers) for _ in range(_KEPT)]
    assert place in map(address, again)


def test_what_is_held_keeps_its_values_however_much_is_taken() -> None:
    buffers = BatchBuffers()
    held = []
    for number in range(3 * _KEPT):
        array = taken(buffers, 64)
        array[:] = number
        if number % 3 == 0:
            held.append((number, torch.from_numpy(array.reshape(8, 8))))
    assert all((tensor == number).all() for number, tensor in held)


def test_threads_never_get_the_same_memory() -> None:
    buffers = BatchBuffers()

    def fill(number: int) -> bool:
        array = taken(buffers, 500)
        array[:] = number
        return bool((array == number).all())

    with ThreadPoolExecutor(8) as workers:
        assert all(workers.map(fill, range(2000)))
