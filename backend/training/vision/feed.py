"""Processes that draw samples without end, and a store of samples on the device.

Blocks cross from the processes in memory that they share: only a block's number is sent.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
import time
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.vision.samples import BLOCK, Block, empty, fill

CONTEXT = multiprocessing.get_context("fork")  # before the device is touched


def _at(memory: mmap.mmap, slot: int) -> Block:
    """View a block in shared memory."""
    arrays: list[np.ndarray[Any, Any]] = []
    model = empty(BLOCK)
    at = slot * _size()
    for array in model.arrays():
        view = np.frombuffer(memory, array.dtype, array.size, at).reshape(array.shape)
        arrays.append(view)
        at += -(-array.nbytes // 64) * 64
    return Block(*arrays)


def _size() -> int:
    return sum(-(-array.nbytes // 64) * 64 for array in empty(BLOCK).arrays())


def _work(memory: mmap.mmap, free: Any, filled: Any, counter: Any, seed: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while (slot := free.get()) is not None:
        with counter.get_lock():
            number = counter.value
            counter.value += 1
        fill(_at(memory, slot), seed + number)
        filled.put(slot)


class Feed:
    """Processes that fill blocks; to be started before the device is used."""

    def __init__(self, workers: int, slots: int, seed: int) -> None:
        self._memory = mmap.mmap(-1, slots * _size())
        self._blocks = [_at(self._memory, slot) for slot in range(slots)]
        self._free, self._filled = CONTEXT.SimpleQueue(), CONTEXT.Queue()
        counter = CONTEXT.Value("q", 0)
        for slot in range(slots):
            self._free.put(slot)
        arguments = (self._memory, self._free, self._filled, counter, seed)
        self._processes: list[ForkProcess] = [
            CONTEXT.Process(target=_work, args=arguments, daemon=True) for _ in range(workers)
        ]

    def __enter__(self) -> Feed:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()

    def pour(self, store: Store) -> None:
        """Move filled blocks into a store from now on, in a thread of its own."""
        threading.Thread(target=self._pour, args=(store,), daemon=True).start()

    def _pour(self, store: Store) -> None:
        while True:
            slot = self._filled.get()
            store.put(self._blocks[slot])
            self._free.put(slot)


class Store:
    """The latest blocks of samples on the device, to draw batches from."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = device
        self.capacity = capacity
        self.made = 0
        model = [torch.from_numpy(array) for array in empty(BLOCK).arrays()]
        self._arrays = [
            torch.empty((capacity, *array.shape), dtype=array.dtype, device=device)
            for array in model
        ]
        gpu = device.type == "cuda"
        self._number = torch.zeros((), device=device)  # of blocks to draw from
        self._staged = [array.pin_memory() if gpu else array for array in model]
        self._stream = torch.cuda.Stream(device) if gpu else None

    def put(self, block: Block) -> None:
        """Copy a block to the device beside the work that goes on there."""
        at = self.made % self.capacity
        with torch.cuda.stream(self._stream):
            for stored, staged, array in zip(
                self._arrays, self._staged, block.arrays(), strict=True
            ):
                staged.copy_(torch.from_numpy(array))
                stored[at].copy_(staged, non_blocking=True)
            self._number.fill_(min(self.made + 1, self.capacity))
        if self._stream is not None:
            self._stream.synchronize()
        self.made += 1

    def wait(self, blocks: int) -> None:
        """Wait until so many blocks are there.

        Raises:
            RuntimeError: they did not come within two minutes.
        """
        end = time.monotonic() + 120
        while self.made < blocks:
            if time.monotonic() > end:
                raise RuntimeError("the processes that draw have stopped")
            time.sleep(0.05)

    def batch(self, blocks: int) -> list[Tensor]:
        """Draw whole blocks at random: the fields of `Block`, (blocks * 16, ...) each."""
        chosen = (torch.rand(blocks, device=self.device) * self._number).long()
        return [array[chosen].flatten(0, 1) for array in self._arrays]
