"""A connection of two processes over a socket pair: frames of a length and a pickled message."""

from __future__ import annotations

import pickle  # nosec B403  # both ends are one program
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("<Q")
BUFFER = 2**16


class Channel:
    """One end of the connection. Any thread may send; a thread of its own receives.

    receive: called with each message. closed: called once, when no more can come.
    """

    def __init__(
        self,
        end: socket.socket,
        receive: Callable[[Any], None],
        closed: Callable[[], None],
        name: str,
    ) -> None:
        self._end = end
        self._receive = receive
        self._closed = closed
        self._name = name
        self._over = False
        # Pieces that the other end had no room for, and the rest of the first one.
        self._backlog: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._reader = threading.Thread(target=self._read, name=f"{name} in", daemon=True)

    def start(self) -> None:
        self._reader.start()

    def send(self, message: object) -> None:
        """Send without waiting; a message to an end that is gone is dropped."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        head = LENGTH.pack(len(data))
        # Pictures are large: they are not copied once more.
        pieces = [head, data] if len(data) > BUFFER else [head + data]
        with self._changed:
            if self._over:
                return
            for piece in pieces:
                if rest := self._at_once(memoryview(piece)):
                    self._backlog.append(rest)
            if self._backlog:
                self._changed.notify()
                if self._writer is None:
                    name = f"{self._name} out"
                    self._writer = threading.Thread(target=self._write, name=name, daemon=True)
                    self._writer.start()

    def _at_once(self, piece: memoryview[int]) -> memoryview[int]:
        """Send what the other end has room for, unless others wait, and return the rest; nothing
        is left for an end that is gone."""
        if self._backlog:
            return piece
        try:
            return piece[self._end.send(piece, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return piece
        except OSError:
            return piece[:0]

    def close(self) -> None:
        """End the connection for both sides."""
        with self._changed:
            self._over = True
            self._changed.notify()
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._backlog and not self._over:
                    self._changed.wait()
                if self._over:
                    return
                frame = self._backlog[0]
            try:
                self._end.sendall(frame)
            except OSError:
                return
            with self._changed:
                self._backlog.popleft()

    def _read(self) -> None:
        try:
            with self._end.makefile("rb", BUFFER) as frames:
                while len(head := frames.read(LENGTH.size)) == LENGTH.size:
                    (size,) = LENGTH.unpack(head)
                    data = frames.read(size)
                    if len(data) < size:
                        break
                    self._receive(pickle.loads(data))  # nosec B301  # of this program's own
        except OSError:
            # A connection that the other end has reset has ended.
            pass
        finally:
            self.close()
            self._end.close()
            self._closed()
