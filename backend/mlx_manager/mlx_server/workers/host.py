"""The program of a worker: one model, its tokenizer, templates, grammars, engine and device.

Run by `workers.process` as `python -m mlx_manager.mlx_server.workers.host` with the number of an
inherited socket. It ends with its connection.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from mlx_manager.mlx_server.core import GenerationRequest, Tokenized
from mlx_manager.mlx_server.errors import GenerationFailed, MLXManagerError
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads
from mlx_manager.mlx_server.workers.channel import Channel
from mlx_manager.mlx_server.workers.messages import (
    Alive,
    Ask,
    Begun,
    Beyond,
    Broken,
    Cancel,
    Detokenize,
    DropPrefixes,
    Embed,
    Generate,
    GiveBack,
    Granted,
    LeavesRoom,
    Load,
    Look,
    Prepare,
    Question,
    Rank,
    Render,
    Result,
    Tokenize,
    WorkerFigures,
)
from mlx_manager.mlx_server.workers.process import LogSettings
from mlx_manager.mlx_server.workers.program import begin, log_settings
from mlx_manager.mlx_server.workers.rows import ServedRows, failure

if TYPE_CHECKING:
    from mlx_manager.mlx_server.backends.embedding import EncoderBackend
    from mlx_manager.mlx_server.backends.text import TextBackend
    from mlx_manager.mlx_server.workers.model import Model

log = logging.getLogger(__name__)
Answering = Callable[[Any], Awaitable[Any]]

ASKED_AT_ONCE = 2
"""Questions to the tokenizer at once, which can't be ended; keys take turns."""
PULSE = 0.5
"""Seconds between two signs of life while there is work."""


class Host:
    """A worker's end of the connection. Belongs to an event loop.

    make: makes the model's side of it, given what sends messages; imports MLX.
    """

    def __init__(self, end: socket.socket, make: Callable[[Callable[[object], None]], Model]):
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._channel = Channel(end, self._receive, self._closed, "worker")
        self._make = make
        self._model: Model | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._rows = ServedRows(self._channel.send, self._ends_broken, self._look_ahead)
        self._threads = DaemonThreads(ASKED_AT_ONCE)
        self._ended = False

    async def serve(self) -> None:
        """Say hello, and answer until the connection ends."""
        self._channel.start()
        model = self._model = await asyncio.to_thread(self._make, self._channel.send)
        self._channel.send(await model.thread.call(model.hello))
        pulse = asyncio.create_task(self._beat(model))
        try:
            await self._over.wait()
        finally:
            for task in (pulse, *self._tasks.values()):
                task.cancel()
            await model.close()

    def _receive(self, message: object) -> None:
        """Pass a message to the event loop. Runs on the channel's thread."""
        self._loop.call_soon_threadsafe(self._take, message)

    def _closed(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._over.set)

    def _take(self, message: object) -> None:
        match message:
            case list():
                for ask in message:
                    self._take(ask)
            case Ask(number):
                task = self._loop.create_task(self._answer(message))
                self._tasks[number] = task
                task.add_done_callback(lambda _: self._tasks.pop(number))
            case Cancel(number):
                self._cancel(number)
            case Granted():
                self._the_model().granted(message)
            case Beyond(nbytes):
                self._the_model().memory.beyond = nbytes
            case GiveBack():
                self._the_model().give_back(message)

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()
        row = self._rows.rows.pop(number, None)
        if row is not None and row.cancel is not None:
            row.cancel()

    def _the_model(self) -> Model:
        assert self._model is not None, "nobody asks before the hello"
        return self._model

    async def _answer(self, ask: Ask) -> None:
        """Answer a question, or say why not. This is the worker's top level: nothing that a
        question meets ends the process."""
        try:
            result = await self._result(ask)
            if not isinstance(ask.question, Generate):
                self._channel.send(Result(ask.number, result))
        except MLXManagerError as error:
            self._fail(ask.number, error)
        except Exception as error:
            log.exception("%s failed", type(ask.question).__name__)
            self._fail(ask.number, GenerationFailed(f"{type(error).__name__}: {error}"))

    def _fail(self, number: int, error: MLXManagerError) -> None:
        if not self._ends_broken():
            self._channel.send(failure(number, error))

    async def _result(self, ask: Ask) -> Any:
        model = self._the_model()
        match ask.question:
            case Prepare():
                return await model.prepare(ask.question)
            case Load():
                return await model.load()
        return await self._answers(ask, model, model.served)[type(ask.question)](ask.question)

    def _answers(
        self, ask: Ask, model: Model, backend: TextBackend | EncoderBackend
    ) -> dict[type[Question], Answering]:
        """Return what answers each kind of question. The tokenizer is asked on other threads."""
        run, begun = partial(self._threads.run, key=ask.key), partial(self._begun, ask.number)
        return {
            Generate: lambda asked: self._generate(ask.number, asked.request, model.text),
            Embed: lambda asked: model.encoder.embed(asked.request, begun),
            Rank: lambda asked: model.encoder.rank(asked.request, begun),
            Tokenize: lambda asked: run(partial(tokenized, backend, asked)),
            LeavesRoom: lambda asked: run(partial(model.text.leaves_room, asked.request)),
            Detokenize: lambda asked: run(partial(backend.detokenize, asked.ids)),
            Render: lambda asked: run(partial(model.text.render, asked.conversation)),
            DropPrefixes: lambda _: model.thread.call(model.drop_prefixes),
            Look: lambda _: self._figures(model),
        }

    async def _figures(self, model: Model) -> WorkerFigures:
        backend = model.served
        stats = asdict(backend.stats())
        return WorkerFigures(model.ledger.figures(), model.ledger.usage(), stats, backend.rows())

    def _begun(self, number: int) -> None:
        self._channel.send(Begun(number))

    async def _generate(
        self, number: int, request: GenerationRequest, backend: TextBackend
    ) -> None:
        """Begin a row; its events are sent from the MLX thread."""
        row = self._rows.row(number)
        try:
            row.cancel = await backend.begin(request, row)
        finally:
            if row.cancel is None:
                self._rows.rows.pop(number, None)

    def _look_ahead(self) -> None:
        self._the_model().memory.look_ahead()

    async def _beat(self, model: Model) -> None:
        """Give a sign of life while there is work, and end where the GPU takes no more."""
        while True:
            await asyncio.sleep(PULSE)
            if self._tasks or self._rows.rows:
                self._channel.send(Alive(model.thread.silence))
            # What the last rows have left is told when they have ended.
            model.memory.look_ahead()
            self._ends_broken()

    def _ends_broken(self) -> bool:
        """End the connection, and so this process, where nothing can be computed any more."""
        if (why := self._the_model().broken()) is None:
            return False
        if not self._ended:
            self._ended = True
            log.critical("this process can't go on: %s", why)
            self._channel.send(Broken(why))
            self._channel.close()
        return True


def tokenized(backend: TextBackend | EncoderBackend, asked: Tokenize) -> Tokenized:
    """Return a prompt's tokens as data."""
    found = backend.tokenize(asked.prompt, asked.special)
    return Tokenized(found.ids, found.context_length, found.texts() if asked.texts else ())


def make_model(log_settings: LogSettings, send: Callable[[object], None]) -> Model:
    """Import MLX and all that a model needs, which takes a second or two."""
    from mlx_manager.mlx_server.workers.model import Model

    # What has been imported by now stays: to look through it again would stop every step.
    gc.collect()
    gc.freeze()
    return Model(send, log_settings=log_settings)


async def serve(end: socket.socket, log_settings: LogSettings) -> None:
    await Host(end, partial(make_model, log_settings)).serve()


def main(arguments: list[str]) -> None:
    """Serve until the server ends the connection, or ends."""
    from mlx_manager.mlx_server.utils.loops import loop_factory

    end = begin(arguments)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(end, log_settings(arguments)))
    # Daemon threads may be within native code, which does not survive the interpreter's end.
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
