"""Commands of the chat: lines that begin with a slash."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One command. `argument` "" means: none."""

    name: str
    argument: str = ""


HELP = {
    "/help": "this list",
    "/clear": "forget what was said; the system prompt stays",
    "/system [TEXT]": "set the system prompt; without TEXT, show it; `/system none` removes it",
    "/model [ID]": "go on with another model; without ID, list them",
    "/image [FILE ...]": "show pictures with the next question; `/image none` takes them back",
    "/retry": "ask the last question again",
    "/undo": "take the last question and its answer back",
    "/save [FILE]": "write the conversation to FILE: Markdown, or messages if it ends in .json",
    "/exit": "leave; so does Ctrl-D",
}
NAMES = tuple(line.split()[0] for line in HELP)
TAKE_NOTHING = {*(line for line in HELP if " " not in line), "/quit"}
KEYS = {
    "Enter": "send",
    "Alt-Enter": "a new line; pasted text keeps its lines",
    "Ctrl-C": "stop the answer; at the prompt, clear the line",
    "Up, Ctrl-R": "earlier questions, and search in them",
    "//": "at the start of a question: a slash that is no command",
}


def parse(line: str) -> Command | str:
    """A command, or the question that the line is."""
    line = line.strip()
    if line.startswith("//"):
        return line[1:]
    if not line.startswith("/"):
        return line
    name, *argument = line.split(maxsplit=1)
    return Command(name, *argument)
