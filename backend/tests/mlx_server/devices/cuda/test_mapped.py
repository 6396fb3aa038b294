"""What goes between the host and the device by memory that both reach."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_manager.mlx_server.devices.cuda import mapped
from mlx_manager.mlx_server.devices.cuda.mapped import (
    FETCH,
    LEAST_ROOM,
    MOST_ROOM,
    TELL,
    THREADS,
    UNDER_WAY,
    Box,
    Carrier,
    carrier,
    send,
    together,
)
from mlx_manager.mlx_server.devices.kernel import Unsupported

ON_CUDA = mx.cuda.is_available() and mx.default_device().type == mx.gpu
ROOM = 4 * THREADS
BOTH = [(TELL, (mx.uint32, mx.uint32), (mx.int32,)), (FETCH, (mx.uint32,), (mx.int32,))]


def grid(words: int) -> tuple[int, int, int]:
    return -(-words // THREADS) * THREADS, 1, 1


@pytest.mark.parametrize("words", [1, 5, THREADS, 300])
def test_every_word_arrives_in_the_box_and_nothing_else(compile_cuda, words):
    library = compile_cuda(BOTH)
    numbers = np.random.default_rng(words).integers(0, 2**32, words, np.uint32)
    box, told = np.full(ROOM, 9, np.uint32), np.full(1, 5, np.int32)
    library.call(0, [numbers, box], [told], grid(words), (THREADS, 1, 1))
    assert box.tolist() == [*numbers.tolist(), *[9] * (ROOM - words)]
    assert told.tolist() == [0]


@pytest.mark.parametrize("words", [1, 5, THREADS, 300])
def test_as_many_words_are_fetched_as_the_box_says(compile_cuda, words):
    library = compile_cuda(BOTH)
    numbers = np.random.default_rng(words).integers(-(2**31), 2**31, words, np.int32)
    box = np.full(ROOM, 9, np.uint32)
    box[0], box[1 : words + 1] = words, numbers
    fetched = np.full(words + 1, 7, np.int32)
    library.call(1, [box], [fetched], grid(words), (THREADS, 1, 1))
    assert fetched.tolist() == [*numbers.tolist(), 7]


def test_nvidia_s_compiler_takes_them(nvidia_accepts):
    nvidia_accepts(BOTH)


def test_arrays_are_sent_as_they_are():
    given = [
        np.arange(n, dtype=np.int32).reshape(-1, 2) - 3 for n in range(0, 2 * UNDER_WAY + 9, 2)
    ]
    given += [np.arange(n, dtype=np.int32) for n in (LEAST_ROOM - 1, LEAST_ROOM, MOST_ROOM)]
    sent = [send(numbers) for numbers in given * 2]
    for numbers, array in zip(given * 2, sent, strict=True):
        assert array.dtype == mx.int32
        np.testing.assert_array_equal(np.array(array), numbers)


def test_what_has_been_sent_does_not_change_with_what_it_was_made_from():
    numbers = np.arange(4, dtype=np.int32)
    sent = send(numbers)
    numbers[:] = 0
    assert sent.tolist() == [0, 1, 2, 3]


@pytest.mark.skipif(ON_CUDA, reason="there is an NVIDIA GPU")
def test_without_an_nvidia_gpu_there_are_no_boxes():
    assert isinstance(carrier(), Unsupported)


@pytest.mark.skipif(not ON_CUDA, reason="needs an NVIDIA GPU")
def test_on_an_nvidia_gpu_there_are():
    assert not isinstance(carrier(), Unsupported)


class Sending:
    """A carrier whose boxes are arrays of the host's, and what it has had set out, by calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set_out: list[int] = []
        queue = mx.async_eval

        def fetch(*, inputs, output_shapes, **options):
            words = np.array(inputs[0])[1 : 1 + int(np.prod(output_shapes[0]))]
            return [mx.array(words.view(np.int32)).reshape(output_shapes[0])]

        def async_eval(*arrays):
            self.set_out.append(sum(len(each) if isinstance(each, list) else 1 for each in arrays))
            queue(*arrays)

        def box(words):
            seen = np.zeros(words, np.uint32)
            return Box(seen, seen)

        monkeypatch.setattr(Box, "of", box)
        monkeypatch.setattr(mapped.mx, "async_eval", async_eval)
        own = Carrier(fetch, fetch)
        monkeypatch.setattr(mapped, "carrier", lambda: own)


def test_what_is_sent_together_sets_out_at_once_at_the_end(monkeypatch):
    sending = Sending(monkeypatch)
    numbers = [np.arange(n, dtype=np.int32).reshape(1, -1) for n in range(1, UNDER_WAY + 9)]
    send(numbers[0])
    assert sending.set_out == [1]
    with together():
        sent = [send(each) for each in numbers]
        assert sending.set_out == [1]
    assert sending.set_out == [1, len(numbers)]
    for given, array in zip(numbers, sent, strict=True):
        assert array.shape == given.shape
        np.testing.assert_array_equal(np.array(array), given)
    send(numbers[0])
    assert sending.set_out == [1, len(numbers), 1]


def test_what_was_sent_before_a_failure_sets_out_all_the_same(monkeypatch):
    sending = Sending(monkeypatch)

    def fail():
        with together():
            send(np.arange(3, dtype=np.int32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with together():
        pass
    assert sending.set_out == [1]
