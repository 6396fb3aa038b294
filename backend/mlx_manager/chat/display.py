"""An answer on the screen while it arrives: as Markdown on a terminal, else as plain text."""

from __future__ import annotations

import os
import re
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, ClassVar, Protocol

import typer
from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.status import Status
from rich.style import Style
from rich.theme import Theme

from mlx_manager.completion_stream import Chunk
from mlx_manager.printable import in_lines, is_dumb

REFRESH_SECONDS = 1 / 15
DIM = Style(dim=True, italic=True)
THEME = Theme({"markdown.code": "bold cyan", "markdown.hr": "dim"})
"""rich's own puts code on black, which no light terminal wants."""


@contextmanager
def without_echo() -> Iterator[None]:
    """Turn off the terminal's echo within the context, so that no typed text appears in the answer.

    Text typed meanwhile goes to the next prompt; `^C` is not drawn either. If the answer is not
    written to the terminal, the echo stays as it is: a pager may be using the terminal. A program
    in the background changes nothing either, since the system would stop it for the change.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty() and in_foreground(sys.stdin.fileno())):
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, silent)
    try:
        yield
    finally:
        if in_foreground(terminal):
            termios.tcsetattr(terminal, termios.TCSANOW, before)


def in_foreground(terminal: int) -> bool:
    """Return whether this program is in the foreground of `terminal`, or no shell controls that."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return True


class Display(Protocol):
    def show(self, chunk: Chunk) -> None: ...

    def end(self) -> None:
        """Finish the last line; to be called however the answer ended."""
        ...


def display_for(console: Console, markdown: bool, reasoning: bool) -> Display:
    """Return the display for `console`, which draws Markdown only on a terminal.

    A pipe gets the model's text as it is. rich treats a pipe as a terminal, too, if FORCE_COLOR is
    set.
    """
    if not console.file.isatty():
        return PlainDisplay(console.file, reasoning=reasoning)
    if markdown:
        return Harmless(MarkdownDisplay(console, reasoning=reasoning))
    return Harmless(PlainDisplay(console.file, reasoning=reasoning))


class Harmless:
    """Display that removes control characters, so that a terminal does not obey the model."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def show(self, chunk: Chunk) -> None:
        text, reasoning = in_lines(chunk.text), in_lines(chunk.reasoning)
        self._display.show(replace(chunk, text=text, reasoning=reasoning))

    def end(self) -> None:
        self._display.end()


class Silent:
    """Display of nothing, for answers that are printed when complete."""

    def show(self, chunk: Chunk) -> None: ...

    def end(self) -> None: ...


class PlainDisplay:
    """Display of text as it comes, with thinking dim if it is wanted."""

    def __init__(self, out: IO[str], *, reasoning: bool) -> None:
        self._out = out
        self._reasoning = reasoning
        self._thinking = False
        self._last = "\n"

    def show(self, chunk: Chunk) -> None:
        if chunk.reasoning and self._reasoning:
            self._thinking = True
            dim = typer.style(chunk.reasoning, dim=True, italic=True)
            self._write(dim if self._out.isatty() and not is_dumb() else chunk.reasoning)
        if chunk.text:
            if self._thinking:
                self._thinking = False
                self._write("\n\n")
            self._write(chunk.text)

    def end(self) -> None:
        if self._last != "\n":
            self._write("\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
        self._last = text[-1]


class MarkdownDisplay:
    """Display of Markdown in blocks.

    A block is printed for good once the next one begins. Until then it is drawn again and again, no
    taller than the screen.
    """

    def __init__(
        self, console: Console, *, reasoning: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._reasoning = reasoning
        self._clock = clock
        self._pending = ""
        self._printed = False
        self._thinking = False
        self._due = 0.0
        self._live: Live | None = None
        self._waiting: Status | None = console.status("", spinner="dots", spinner_style="dim")
        self._waiting.start()

    def show(self, chunk: Chunk) -> None:
        if chunk.reasoning and self._reasoning:
            self._stop_waiting()
            self._thinking = True
            self._console.print(
                chunk.reasoning, style=DIM, end="", markup=False, highlight=False, soft_wrap=True
            )
        if chunk.text:
            self._stop_waiting()
            if self._thinking:
                self._thinking = False
                self._console.print("\n")
            self._pending += chunk.text
            self._refresh()

    def end(self) -> None:
        self._stop_waiting()
        if self._thinking:
            self._console.print()
        if self._live is not None:
            self._live.stop()
        self._print(self._pending)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None

    def _refresh(self) -> None:
        """Draw if due. At most half the time goes into drawing, however long the block grows."""
        began = self._clock()
        if began < self._due:
            return
        self._print_finished()
        self._draw()
        ended = self._clock()
        self._due = ended + max(REFRESH_SECONDS, ended - began)

    def _print_finished(self) -> None:
        finished, self._pending = split_blocks(self._pending)
        if finished:
            if self._live is not None:
                self._live.stop()
                self._live = None
            self._print(finished)

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(Block(text, gap=self._printed), end="")
            self._printed = True

    def _draw(self) -> None:
        if not self._pending.strip():
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        room = max(1, self._console.height - 2)
        self._live.update(Block(self._pending, gap=self._printed, last=room), refresh=True)


class Block:
    """Markdown without blank lines around it; `last` keeps it to so many of its last lines."""

    def __init__(self, text: str, *, gap: bool, last: int | None = None) -> None:
        self._markdown = FlushMarkdown(text, code_theme="ansi_dark")
        self._gap = gap
        self._last = last

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._markdown, options.update(height=None), pad=False)
        while lines and is_blank(lines[0]):
            del lines[0]
        while lines and is_blank(lines[-1]):
            del lines[-1]
        if self._gap:
            lines.insert(0, [])
        for line in lines if self._last is None else lines[-self._last :]:
            yield from line
            yield Segment.line()


def is_blank(line: list[Segment]) -> bool:
    return not any(segment.text.strip() for segment in line)


class FlushHeading(Heading):
    """Heading at the left margin; rich centres the largest headings."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class FlushMarkdown(Markdown):
    elements: ClassVar = {**Markdown.elements, "heading_open": FlushHeading}


PARSER = MarkdownIt().enable("table")
LINE = re.compile(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")
"""Line as the parser counts lines; `str.splitlines` knows more ends of lines."""


def split_blocks(text: str) -> tuple[str, str]:
    """Return the text that no further text can change, and the last block, which may still grow.

    Only whole lines can finish a block: a line that has begun may yet become anything.
    """
    whole = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in PARSER.parse(whole) if token.level == 0 and token.map]
    if not starts:
        return "", text
    lines = LINE.findall(text)
    return "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])
