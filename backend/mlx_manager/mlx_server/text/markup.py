"""Splitting of an answer's text into content, thinking and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import regex

from mlx_manager.mlx_server.core import Event, FinishReason, ReasoningDelta, TextDelta
from mlx_manager.mlx_server.formats import OutputFormat, Region, ToolFormat
from mlx_manager.mlx_server.text.scanner import TextScanner
from mlx_manager.mlx_server.text.tool_calls.reader import CallLog, CallReader, Progress

Edges = Mapping[Region, tuple[tuple[str, Region], ...]]

_LONGEST_HEADER = 512
"""Characters after which text is no header; bounds the cost of matching it again each time."""


@lru_cache(maxsize=8192)
def text_delta(text: str) -> TextDelta:
    """Return a text without log probabilities. Answers are made of the same tokens again and again,
    and a delta from the cache takes a tenth of the time of a new one."""
    return TextDelta(text)


class Markup:
    """One answer's regions. Markers vanish; all else comes out as the event of its region.

    Blanks at the beginning of the answer and after a call are dropped if a call or thinking
    follows, and so are line feeds at the beginning of thinking and between it and the content.
    Markers of thinking vanish too where they are out of place, unless they stand among text: a
    second one that begins it, and one that ends it at the beginning of the answer or after a call.
    """

    def __init__(self, output: OutputFormat, stop_strings: Sequence[str]) -> None:
        self._output = output
        self._log = CallLog(output.new_call_id, output.parallel)
        self._stop_strings = stop_strings
        self._stops = TextScanner(stop_strings) if stop_strings else None
        self.stopped: str | None = None
        self.may_stop = True
        """Flag: a stop string that is complete now counts; otherwise it is text."""
        self.strayed = False
        """Flag: a marker that does not fit has vanished from the text that was fed last."""
        self._strays = _strays(output.edges)
        self._edges = {
            region: edges + self._strays.get(region, ()) for region, edges in output.edges.items()
        }
        self._scanners = {
            region: TextScanner([marker for marker, _ in edges])
            for region, edges in self._edges.items()
        }
        self._header_pattern = regex.compile(output.header) if output.header else None
        self._region: Region = output.initial
        self._header = ""
        self._announced = False
        self._unclosed = False
        self._reader: CallReader | None = None
        self._blanks: str | None = "" if output.edges or output.calls else None
        self._trim = output.initial == "reasoning"
        self._fresh = output.calls is not None and output.calls.bare
        self._events: list[Event] = []

    @property
    def region(self) -> Region:
        return "calls" if self._reader else self._region

    @property
    def called(self) -> bool:
        return 0 < self._log.started == self._log.finished

    @property
    def complete(self) -> bool:
        """Return whether nothing can follow: a stop string matched, or the only call allowed is
        made."""
        return self.stopped is not None or self._log.full

    def feed(self, text: str) -> list[Event]:
        self.strayed = False
        while text and not self.complete:
            if self._reader:
                text = self._progress(self._reader.feed(text))
            elif self._region == "header" and self._header_pattern:
                text = self._read_header(self._header_pattern, text)
            elif self._region == "content" and self._fresh:
                text = self._begin(text)
            else:
                text = self._scan(text)
        return self._take()

    def finish(self, reason: FinishReason) -> list[Event]:
        """Return the events of all text held back. `reason` "length": the output was cut off."""
        if self._reader:
            self._progress(self._reader.finish(reason == "length"))
        if self._region in self._scanners:
            self._emit(self._scanners[self._region].flush())
        said = self._header.lstrip()
        if self._region == "header" and not (self._announced or said.startswith(("<", "to="))):
            self._append(self._header)
        if self._blanks and not self._log.started:
            self._append(self._blanks)
        self._release()
        return self._take()

    # -- Regions -------------------------------------------------------------------------------

    def _scan(self, text: str) -> str:
        """Pass text on up to the region's next marker, and return the text after the marker."""
        scanner = self._scanners.get(self._region)
        if scanner is None:
            self._emit(text)
            return ""
        before, number, rest = scanner.feed(text)
        self._emit(before)
        if number is not None and not self.complete:
            edge = self._edges[self._region][number]
            if edge in self._strays.get(self._region, ()):
                self._pass_stray(edge[0])
            else:
                self._enter(*edge)
        return rest

    def _enter(self, marker: str, region: Region) -> None:
        match region:
            case "calls":
                if self._output.calls is not None:
                    self._read_calls(self._output.calls, marker)
                return
            case "reasoning":
                self._blanks = ""
            case "content":
                self._fresh = self._output.calls is not None and self._output.calls.bare
        # Trimming goes on past a marker that leads to the same region.
        again = self._trim and self._region == region
        self._trim = again or region == "reasoning" or self._region == "reasoning"
        self._region = region
        self._header = ""
        self._announced = self._is_header(marker)

    def _is_header(self, marker: str) -> bool:
        """Return whether this marker is itself the beginning of a header, which else follows it."""
        pattern = self._header_pattern
        return bool(marker and pattern and pattern.fullmatch(marker, partial=True))

    def _pass_stray(self, marker: str) -> None:
        """Drop a marker of thinking that does not fit, unless it stands among text."""
        content = self._region == "content"
        among_text = self._blanks is None and not self._unclosed if content else not self._trim
        self.strayed = not among_text
        if among_text:
            self._emit(marker)
        elif content:
            self._unclosed, self._blanks, self._trim = False, "", True
            self._fresh = self._output.calls is not None and self._output.calls.bare

    def _begin(self, text: str) -> str:
        """Read the beginning of content where calls need no marker; return the text that is
        left."""
        begins = text.lstrip()
        if not begins:
            self._emit(text)
            return ""
        self._fresh = False
        if begins[0] not in "{[" or self._output.calls is None:
            return text
        self._emit(text[: -len(begins)])
        self._read_calls(self._output.calls, "")
        return begins

    def _read_header(self, pattern: regex.Pattern[str], text: str) -> str:
        for position, char in enumerate(text):
            header = self._header + char
            match = pattern.fullmatch(header, partial=True)
            if match is None or len(header) > _LONGEST_HEADER:
                self._enter("", "content")
                self._append(header)
                return text[position + 1 :]
            self._header = header
            if not match.partial:
                self._read_message(match)
                return text[position + 1 :]
        return ""

    def _read_message(self, header: regex.Match[str]) -> None:
        """Enter the region that a complete header announces: a call, or text in some channel."""
        name = header["name"]
        if name in self._output.offered and self._output.calls is not None:
            self._region = "content"
            self._read_calls(self._output.calls, header[0], name)
            return
        self._enter("", self._output.channels.get(header["channel"], "content"))
        if name is not None:
            self._append(header[0])

    # -- Calls ---------------------------------------------------------------------------------

    def _read_calls(self, form: ToolFormat, opener: str, name: str = "") -> None:
        self._reader = CallReader(self._output, form, self._log, opener, name)

    def _progress(self, progress: Progress) -> str:
        if progress.events:
            # Whoever calls a tool has stopped thinking, whether or not the thinking was closed.
            self._release()
            self._unclosed = self._unclosed or self._region == "reasoning"
            self._region = "content"
            self._events += progress.events
            self._blanks = ""
            self._trim = False
        if progress.text:
            self._fresh = False
            if self._region == "header":
                self._region = "content"
            self._emit(progress.text)
        if progress.rest is None:
            return ""
        self._reader = None
        if self._output.header and not progress.text and self._region == "content":
            self._region, self._header = "header", ""
        return progress.rest

    # -- Events --------------------------------------------------------------------------------

    def _emit(self, text: str) -> None:
        """Add text of the current region, less the blanks that belong to the markup."""
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        match self._region:
            case "header":
                self._header += text
            case "reasoning":
                self._append(text)
            case _:
                if self._blanks is not None:
                    self._blanks += text
                    if not self._blanks or self._blanks.isspace():
                        return
                    text, self._blanks = self._blanks, None
                self._append(text)

    def _append(self, text: str) -> None:
        if self._region == "reasoning":
            self._release()
            if text:
                self._events.append(ReasoningDelta(text))
            return
        if self.stopped is not None:
            return
        text = self._up_to_stop(text)
        if text:
            self._events.append(text_delta(text))

    def _up_to_stop(self, text: str) -> str:
        """Return the text before a stop string that counts, less a possible beginning of one."""
        if self._stops is None:
            return text
        before, number, rest = self._stops.feed(text)
        while number is not None and not self.may_stop:
            passed = before + self._stop_strings[number]
            before, number, rest = self._stops.feed(rest)
            before = passed + before
        if number is not None:
            self.stopped = self._stop_strings[number]
        return before

    def _release(self) -> None:
        """Emit the text held back as a possible beginning of a stop string."""
        if self._stops and self.stopped is None and (held := self._stops.flush()):
            self._events.append(text_delta(held))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _strays(edges: Edges) -> Edges:
    """Return the markers of thinking that don't fit in a region, and the regions they lead to."""
    thinking = [edge for edge in edges.get("content", ()) if edge[1] == "reasoning"]
    ends = [edge for edge in edges.get("reasoning", ()) if edge[1] == "content"]
    known = {marker for marker, _ in edges.get("content", ())}
    return {
        "content": tuple(edge for edge in ends if edge[0] not in known),
        "reasoning": tuple(edge for edge in thinking if edge not in ends),
    }
