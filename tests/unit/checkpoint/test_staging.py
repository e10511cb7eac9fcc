"""The staging buffer: bytes as they are in the tensors, whatever pieces of memory they come to lie in."""

import mmap
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoint import staging
from penstock.checkpoint.staging import StagingBuffer
from penstock.core.errors import CheckpointError
from penstock.devices import accelerator

PAGE = mmap.PAGESIZE


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(staging, "PIECE_BYTES", PAGE)


def tensors_of(sizes):
    made = [torch.randn(5, size, dtype=torch.float64) for size in sizes]
    made += [torch.randn(size, 3).t() for size in sizes]  # not contiguous
    return [*made, torch.tensor(2.5), torch.randn(7).bfloat16(), torch.empty(0, dtype=torch.uint8)]


def bytes_of(tensors):
    return b"".join(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


@pytest.mark.usefixtures("small_pieces")
@given(st.lists(st.integers(1, 700), max_size=4), st.integers(0, 10**5))
def test_tensors_are_copied_one_after_another_across_pieces(sizes, reserved):
    tensors, buffer = tensors_of(sizes), StagingBuffer()
    buffer.reserve(reserved, accelerator.CPU)
    assert bytes(buffer.copy(tensors)) == bytes_of(tensors)
    fewer = tensors[1:]
    assert bytes(buffer.copy(fewer)) == bytes_of(fewer), "the buffer is used again"
    buffer.release()


def test_a_buffer_grows_and_an_empty_share_needs_none():
    buffer = StagingBuffer()
    assert bytes(buffer.copy([])) == b""
    for size in (10, 10**6, 3):
        tensors = [torch.randn(size)]
        assert bytes(buffer.copy(tensors)) == bytes_of(tensors)


@pytest.mark.usefixtures("small_pieces")
def test_pages_are_locked_in_pieces_by_a_thread_that_is_not_the_callers(monkeypatch):
    """What the device is asked for: no request above a piece, and none while a save copies."""
    asked = []

    def lock(piece, _):
        asked.append((piece.nbytes, threading.current_thread() is threading.main_thread()))
        return False

    monkeypatch.setattr(accelerator, "is_accelerator", lambda _: True)
    monkeypatch.setattr(accelerator, "use", lambda _: None)
    monkeypatch.setattr(accelerator, "wait_for_stream", lambda _: None)
    monkeypatch.setattr(accelerator, "lock_pages", lock)
    tensors, buffer = tensors_of([300, 500]), StagingBuffer()
    buffer.reserve(sum(tensor.nbytes for tensor in tensors), accelerator.CPU)
    assert bytes(buffer.copy(tensors)) == bytes_of(tensors)
    assert sum(size for size, _ in asked) == sum(tensor.nbytes for tensor in tensors)
    assert max(size for size, _ in asked) <= PAGE
    assert not any(is_main for _, is_main in asked)
    buffer.release()


def test_memory_that_the_host_refuses_is_said_with_its_size():
    buffer = StagingBuffer()
    with pytest.raises(CheckpointError, match=r"got '4194304.0 TiB'.*more memory"):
        buffer.reserve(2**62, accelerator.CPU)
    assert bytes(buffer.copy([torch.ones(2)])) == bytes_of([torch.ones(2)]), "smaller copies still work"
