"""A chat at the terminal: questions, commands, answers, until the person leaves."""

from __future__ import annotations

import difflib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import Completer, Completion, PathCompleter
from prompt_toolkit.completion.base import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import HTML, fragment_list_to_text
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from mlx_manager.chat.answer import Answer, collect
from mlx_manager.chat.commands import HELP, KEYS, NAMES, TAKE_NOTHING, Command, parse
from mlx_manager.chat.conversation import Conversation
from mlx_manager.chat.display import display_for, without_echo
from mlx_manager.client import ServerClient, ServerRefused, ServerUnreachable
from mlx_manager.pictures import PictureFile, paths_in, read_picture
from mlx_manager.printable import in_lines, is_dumb, on_one_line


@dataclass(slots=True)
class Chat:
    """The state of one session. `parameters`: what each request carries besides the messages.

    markdown: answers are drawn as Markdown. reasoning: thinking is shown. images: pictures for the
    next question.
    """

    client: ServerClient
    model: str
    console: Console
    parameters: Mapping[str, Any]
    markdown: bool = True
    reasoning: bool = True
    conversation: Conversation = field(default_factory=Conversation)
    images: tuple[PictureFile, ...] = ()

    def run(self, history: History) -> None:
        """Until /exit or Ctrl-D. Failures of a question are shown, and the session goes on."""
        # prompt_toolkit's own prompt for dumb terminals still sends them escape sequences.
        read = plain_line if is_dumb() else make_prompt(self._model_ids, history).prompt
        self.console.print(
            f"[bold]{escape(on_one_line(self.model))}[/] [dim]at {escape(self.client.url)} · "
            "/help lists the commands, Ctrl-D leaves[/]",
            highlight=False,
        )
        if self.images:
            self._say(self._attached())
        while True:
            self.console.print()
            try:
                line = read(HTML("<ansigreen><b>&gt; </b></ansigreen>"))
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            try:
                match parse(line):
                    case Command("/exit" | "/quit", ""):
                        return
                    case Command() as command:
                        self._obey(command)
                    case "":
                        continue
                    case question:
                        self._ask(question, self.images)
            except KeyboardInterrupt:
                self._say("stopped")

    def _ask(self, question: str, images: tuple[PictureFile, ...] = ()) -> None:
        self.conversation.ask(question, images)
        self.console.print()
        try:
            answer = self._stream()
        except (ServerRefused, ServerUnreachable) as error:
            self.conversation.take_back()
            self._warn(str(error))
            if images and images is self.images:
                self._say(f"{self._attached()}; /image none takes them back.")
            return
        except KeyboardInterrupt:
            # Pressed once more, while what had come was still being drawn.
            self.conversation.take_back()
            raise
        if images is self.images:
            self.images = ()
        if answer.text or answer.reasoning:
            self.conversation.answer(answer.text, answer.reasoning)
        else:
            self.conversation.take_back()
        self._say(answer.figures() or "no answer")

    def _stream(self) -> Answer:
        body = {
            "model": self.model,
            "messages": self.conversation.messages(),
            **self.parameters,
        }
        display = display_for(self.console, self.markdown, self.reasoning)
        try:
            with without_echo(), closing(self.client.chat(body)) as chunks:
                return collect(chunks, display.show)
        finally:
            display.end()

    def _obey(self, command: Command) -> None:
        match command:
            case Command(name, argument) if argument and name in TAKE_NOTHING:
                self._warn(f"{name} takes nothing after it. /help lists the commands.")
            case Command("/help"):
                self._help()
            case Command("/clear"):
                self.conversation.clear()
                self._say("forgotten")
            case Command("/system", ""):
                self._say(self.conversation.system or "There is no system prompt.")
            case Command("/system", text):
                self.conversation.system = "" if text == "none" else text
                self._say("From the next question on." if text != "none" else "removed")
            case Command("/model", ""):
                self._list_models()
            case Command("/model", model):
                self._switch(model)
            case Command("/image", argument):
                self._attach(argument)
            case Command("/retry"):
                self._retry()
            case Command("/undo"):
                question = self.conversation.take_back()
                self._say("There is nothing to take back." if question is None else "taken back")
            case Command("/save", file):
                self._save(Path(file or time.strftime("chat-%Y%m%d-%H%M%S.md")))
            case Command(name):
                close = difflib.get_close_matches(name, NAMES, 1)
                meant = f"; did you mean {close[0]}?" if close else ". /help lists the commands."
                self._warn(f"There is no command {name}{meant}")

    def _help(self) -> None:
        width = max(map(len, (*HELP, *KEYS)))
        for name, text in (HELP | KEYS).items():
            self.console.print(Text.assemble("  ", (f"{name:<{width}}", "bold"), "  ", text))

    def _list_models(self) -> None:
        for model in self._model_ids():
            mark = "*" if model == self.model else " "
            self.console.print(f"{mark} {escape(on_one_line(model))}", highlight=False)

    def _switch(self, model: str) -> None:
        offered = self._model_ids()
        if model in offered:
            self.model = model
            self._say(f"{model} answers from now on.")
        elif offered:
            close = difflib.get_close_matches(model, offered, 1)
            meant = f" Did you mean {close[0]}?" if close else " /model lists those that are."
            self._warn(f"{model} is not offered.{meant}")

    def _attach(self, argument: str) -> None:
        """Add pictures to the next question, or say which it has."""
        if argument == "none":
            self.images = ()
        elif argument:
            try:
                more = tuple(read_picture(path) for path in paths_in(argument))
            except ValueError as error:
                self._warn(str(error))
                return
            self.images += more
        self._say(self._attached())

    def _attached(self) -> str:
        names = ", ".join(str(image.path) for image in self.images)
        return f"With the next question: {names}" if names else "No pictures."

    def _retry(self) -> None:
        question = self.conversation.take_back()
        if question is None:
            self._warn("There is no question yet.")
        else:
            self._ask(question.text, question.images)

    def _save(self, file: Path) -> None:
        try:
            self.conversation.save(file, self.model)
        except OSError as error:
            self._warn(f"{file} can't be written: {error.strerror}.")
        except RuntimeError:
            self._warn(f"{file} can't be written: the home folder {file.parts[0]} is unknown.")
        else:
            self._say(f"saved in {file}")

    def _model_ids(self) -> list[str]:
        try:
            return [model["id"] for model in self.client.models()]
        except (ServerRefused, ServerUnreachable) as error:
            self._warn(str(error))
            return []

    def _say(self, text: str) -> None:
        self.console.print(in_lines(text), style="dim", markup=False, highlight=False)

    def _warn(self, text: str) -> None:
        self.console.print(in_lines(text), style="red", markup=False, highlight=False)


def plain_line(prompt: HTML) -> str:
    """Read a line as it is typed, where the terminal can draw nothing else."""
    return input(fragment_list_to_text(prompt.__pt_formatted_text__()))


class CommandCompleter(Completer):
    """Commands after a slash, models after `/model`, and files after `/image`."""

    def __init__(self, models: Callable[[], list[str]]) -> None:
        self._models = models
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        line = document.text_before_cursor
        name, space, begun = line.partition(" ")
        if name == "/image" and space:
            yield from self._paths.get_completions(Document(begun), complete_event)
            return
        if name == "/model" and space:
            offered: Iterable[str] = self._models()
        elif not space and line.startswith("/"):
            offered, begun = NAMES, line
        else:
            return
        for word in offered:
            if word.startswith(begun):
                yield Completion(word, -len(begun))


def make_prompt(models: Callable[[], list[str]], history: History) -> PromptSession[str]:
    """Return the prompt: Enter sends, Alt-Enter begins a new line, Tab completes commands."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return PromptSession(
        history=history,
        completer=CommandCompleter(models),
        complete_while_typing=False,
        key_bindings=keys,
        multiline=True,
        prompt_continuation="  ",
    )


class KeptHistory(FileHistory):
    """Question history in a file. Errors of the file are ignored: this chat keeps its questions."""

    def load_history_strings(self) -> Iterable[str]:
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def history_file() -> Path | None:
    """Return the path of the file that keeps questions; None without a home folder."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser() / "mlx-manager" / "chat_history"
    except RuntimeError:
        return None


def open_history(file: Path | None) -> History:
    """Return the history in `file`, which only its owner can read; in memory if that fails."""
    if file is None:
        return InMemoryHistory()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return KeptHistory(str(file))
