"""The log: lines for a reader or JSON for a machine, each with the id of the request it is about.

No prompt, no answer and no key is ever in it, unless the owner asks for prompts.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TextIO

from mlx_manager.mlx_server.core import (
    Conversation,
    GenerationRequest,
    Image,
    Part,
    Prompt,
    Text,
    Tokens,
)
from mlx_manager.mlx_server.timeline import Timeline

log = logging.getLogger(__name__)

current_request: ContextVar[str] = ContextVar("current_request", default="")
"""The id of the HTTP request that is being answered, which every line about it carries."""

COLOURS = {logging.DEBUG: 2, logging.WARNING: 33, logging.ERROR: 31, logging.CRITICAL: 31}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
NOISY = ("httpx", "uvicorn.error", "asyncio", "opentelemetry.exporter", "urllib3", "PIL")


def configure(
    level: str,
    form: Literal["pretty", "json"],
    stream: TextIO | None = None,
    *,
    worker: str = "",
) -> logging.Handler:
    """Log everything from `level` on to `stream`, or else stderr; returns the root logger's new
    handler.

    worker: the model of whose process every line says that it is from there.
    """
    stream = stream or _beneath(sys.stderr)
    handler = logging.StreamHandler(stream)
    handler.addFilter(_name_request)
    handler.addFilter(partial(_name_worker, worker))
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    colour = stream.isatty() and not plain
    handler.setFormatter(JsonFormatter() if form == "json" else PrettyFormatter(colour=colour))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    return handler


def speaks_json() -> bool:
    """Return whether `capture_output` has been called."""
    return isinstance(sys.stderr, LoggedLines)


def tell(
    text: str, stream: TextIO | None = None, level: int = logging.INFO, **facts: object
) -> None:
    """Print `text` for whoever started the program, on stderr unless told otherwise.

    Where the log is JSON, print one JSON object with the first line of `text` and `facts`. A
    terminal or the reader of a pipe may be gone by now; such errors are ignored.
    """
    out = _beneath(stream or sys.stderr)
    if speaks_json():
        text = as_json_line("mlx_manager", level, text.partition("\n")[0], facts=facts)
    with suppress(OSError):
        print(text, file=out, flush=True)


def capture_output() -> None:
    """Have every line that this process writes to stdout or stderr be JSON: what libraries print,
    warnings before the log is set up, and exceptions that nobody catches, each in one line.

    What native code writes (MLX, or faulthandler as a process crashes) does not come this way.
    """
    if speaks_json():
        return

    def report(kind: type[BaseException], error: BaseException | None, place: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return
        tell(
            f"uncaught {kind.__name__}: {error}",
            level=logging.CRITICAL,
            exception="".join(traceback.format_exception(kind, error, place)),
        )

    sys.excepthook = report
    threading.excepthook = lambda ended: report(
        ended.exc_type, ended.exc_value, ended.exc_traceback
    )
    sys.unraisablehook = lambda met: report(met.exc_type, met.exc_value, met.exc_traceback)
    sys.stdout = LoggedLines(sys.stdout, "stdout", logging.INFO)
    sys.stderr = LoggedLines(sys.stderr, "stderr", logging.WARNING)


class LoggedLines(io.TextIOBase):
    """A stream whose lines are written to `stream` as JSON objects, when they are whole."""

    def __init__(self, stream: TextIO, name: str, level: int) -> None:
        self.stream = stream
        self._name = name
        self._level = level
        self._begun = ""
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.stream.fileno()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = re.split(r"[\r\n]", self._begun + text)
            said = [as_json_line(self._name, self._level, line) for line in lines if line.strip()]
            if said:
                self.stream.write("\n".join(said) + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def finish(self) -> None:
        """Write what has not been ended by a line break, as the program ends."""
        if self._begun:
            self.write("\n")
        self.flush()


def _beneath(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, LoggedLines) else stream


def as_json_line(name: str, level: int, message: str, *, facts: object = None) -> str:
    """Return a line of the log as the logger `name` would write it."""
    record = logging.LogRecord(name, level, "", 0, message, (), None)
    record.facts = facts or {}
    _name_request(record)
    return JsonFormatter().format(record)


def let_go() -> None:
    """Flush stdout and stderr as the program ends; drop the rest if the terminal or pipe is gone.

    Otherwise Python would try once more, and end with exit code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.finish() if isinstance(stream, LoggedLines) else stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _name_worker(worker: str, record: logging.LogRecord) -> bool:
    record.worker = worker
    return True


def _name_request(record: logging.LogRecord) -> bool:
    record.request_id = current_request.get()
    return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, `request_id` where there
    is one, the facts of an access line, and `exception` with its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := record.__dict__["request_id"]:
            said["request_id"] = request_id
        if worker := record.__dict__.get("worker"):
            said["worker"] = worker
        said |= record.__dict__.get("facts", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


class PrettyFormatter(logging.Formatter):
    """Time, level, what happened, and the request's id.

    Control characters, which may have come with a request, are escaped: none makes a line of its
    own or paints the terminal.
    """

    def __init__(self, *, colour: bool) -> None:
        super().__init__()
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        level = self._paint(f"{record.levelname.lower():7}", COLOURS.get(record.levelno))
        facts = record.__dict__.get("facts", {})
        request_id = record.__dict__["request_id"] or facts.get("request_id", "")
        message = CONTROL.sub(lambda found: ascii(found[0])[1:-1], record.getMessage())
        about = self._paint(f"  {request_id}", 2) if request_id not in message else ""
        worker = record.__dict__.get("worker", "")
        whose = self._paint(f"[{worker}] ", 2) if worker else ""
        text = f"{when} {level} {whose}{message}{about}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text

    def _paint(self, text: str, colour: int | None) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._colour and colour is not None else text


class PromptLog:
    """An observer that writes every prompt, or what is read without one (texts to embed; a query
    and the documents to rank), to the log. Only for who asks for it."""

    def begin(
        self, requests: Sequence[GenerationRequest], timeline: Timeline
    ) -> Callable[[], object]:
        first = requests[0]
        prompt = list(first.inputs) or _readable(first.prompt)
        text = json.dumps(prompt, ensure_ascii=False)
        log.info("%s is asked: %s", first.model, text, extra={"facts": {"prompt": prompt}})
        return lambda: None


def _said(part: Part) -> str:
    if isinstance(part, Image):
        return f"<image {part.digest[:12]}, {part.width} x {part.height}>"
    return part


def _readable(prompt: Prompt) -> Any:
    match prompt:
        case Conversation(messages):
            return [
                {"role": said.role, "content": "".join(map(_said, said.parts))} for said in messages
            ]
        case Text(text, suffix):
            return f"{text}{suffix}"
        case Tokens(ids):
            return list(ids)
