"""`mlx-manager chat`: a chat in the terminal."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.connection import ApiKey, Url, address, answers, connected
from mlx_manager.cli.models.pull import exit_code, fetch_default
from mlx_manager.cli.settings import parse_settings
from mlx_manager.cli.terminal import AsJson, ExitCode, fail, note

if TYPE_CHECKING:
    from mlx_manager.client import ServerClient
    from mlx_manager.pictures import PictureFile

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="ID", help="Who answers; default: the server's model"),
]
System = Annotated[
    str | None, typer.Option("--system", "-s", metavar="TEXT", help="The system prompt")
]
Once = Annotated[
    str | None,
    typer.Option("--once", metavar="QUESTION", help="Print the answer to one question and end"),
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        show_default=False,
        help="A picture that the question is about; may be given several times",
    ),
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", min=1, help="Most tokens of an answer")]
Temperature = Annotated[
    float | None, typer.Option(metavar="N", min=0, max=2, help="0 is the likeliest answer")
]
TopP = Annotated[
    float | None, typer.Option(metavar="N", min=0, max=1, help="Share of likely tokens to draw of")
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="The same seed gives the same answer")]
Markdown = Annotated[
    bool,
    typer.Option(
        "--markdown/--plain", show_default=False, help="Draw Markdown on a terminal [markdown]"
    ),
]
Reasoning = Annotated[
    bool | None,
    typer.Option(
        "--show-reasoning/--hide-reasoning", help="Show the thinking [on a terminal: show]"
    ),
]
KeepHistory = Annotated[
    bool,
    typer.Option(
        "--history/--no-history",
        show_default=False,
        help="Remember questions for the next chat [on]",
    ),
]


def chat(
    *,
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    system: System = None,
    once: Once = None,
    image: Images = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    markdown: Markdown = True,
    reasoning: Reasoning = None,
    history: KeepHistory = True,
    as_json: AsJson = False,
) -> None:
    """Chat with a model in the terminal.

    It talks to the server on this machine, or to the one that --url names. If no server runs, it
    starts one for the session. Piped text is the question; with --once it follows that question.

    \b
    Examples:
      mlx-manager chat
      mlx-manager chat --model mlx-community/Llama-3.2-3B-Instruct-4bit
      mlx-manager chat --once "What is a KV cache?"
      mlx-manager chat --once "What is in this picture?" --image photo.jpg
      git diff | mlx-manager chat --once "Write a commit message for this" --plain
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    parameters = {name: value for name, value in given.items() if value is not None}
    images = pictures(image or ())
    question = asked(once)
    if as_json and question is None:
        fail("--json needs a question: --once, or piped text.", ExitCode.USAGE)
    with serving(url, api_key, model) as (client, chosen):
        if question is None:
            view = {"markdown": markdown, "reasoning": reasoning is not False}
            talk(client, chosen, system or "", images, parameters, history=history, **view)
        else:
            from mlx_manager.chat.conversation import Conversation

            conversation = Conversation(system or "")
            conversation.ask(question, images)
            body = {"model": chosen, "messages": conversation.messages(), **parameters}
            answer_once(client, body, markdown, reasoning, as_json)


def asked(once: str | None) -> str | None:
    """Return the one question, from --once and the piped text; None for a session."""
    if sys.stdin.isatty():
        if once is None and not sys.stdout.isatty():
            fail(
                "A session needs a terminal; ask with --once or pipe the question.", ExitCode.USAGE
            )
        return once
    try:
        piped = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        fail(f"What is piped in is no UTF-8 text: {error.reason}.", ExitCode.USAGE)
    question = "\n\n".join(part for part in (once, piped) if part)
    if not question.strip():
        fail("There is no question: the input is empty.", ExitCode.USAGE)
    return question


def pictures(paths: Sequence[Path]) -> tuple[PictureFile, ...]:
    """Return the pictures in files; end the program where one can't be sent."""
    from mlx_manager.pictures import read_picture

    try:
        return tuple(map(read_picture, paths))
    except ValueError as error:
        fail(str(error), ExitCode.USAGE)


@contextmanager
def serving(
    url: str | None, key: str | None, model: str | None
) -> Iterator[tuple[ServerClient, str]]:
    """Yield the server and the model to ask; a server started for the session ends with it."""
    from mlx_manager.embedded import StartFailed, embedded_server

    if url is None and not answers(address(None)):
        note("No server runs here; starting one for this session.")
        have_model(model)
        try:
            with (
                ended_normally(),
                embedded_server(model) as started,
                connected(started, None) as client,
            ):
                yield client, client.default_model()
        except StartFailed as error:
            fail(f"The server could not start: {error}")
        return
    with connected(url, key) as client:
        yield client, model or client.default_model()


def have_model(model: str | None) -> None:
    """Download the model, with progress, which the server would do without."""
    from mlx_manager.mlx_server.errors import MLXManagerError

    settings = parse_settings({"model": model})
    try:
        fetch_default(settings)
    except MLXManagerError as error:
        fail(f"The server could not start: {error.message}", exit_code(error))


@contextmanager
def ended_normally() -> Iterator[None]:
    """End the program normally when the terminal is closed, and so the session's server, too."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, leave) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def talk(
    client: ServerClient,
    model: str,
    system: str,
    images: tuple[PictureFile, ...],
    parameters: dict[str, Any],
    *,
    markdown: bool,
    reasoning: bool,
    history: bool,
) -> None:
    from rich.console import Console

    from mlx_manager.chat.conversation import Conversation
    from mlx_manager.chat.display import THEME
    from mlx_manager.chat.session import Chat, history_file, open_history

    session = Chat(
        client,
        model,
        Console(theme=THEME),
        parameters,
        markdown=markdown,
        reasoning=reasoning,
        conversation=Conversation(system),
        images=images,
    )
    session.run(open_history(history_file() if history else None))


def answer_once(
    client: ServerClient,
    body: dict[str, Any],
    markdown: bool,
    reasoning: bool | None,
    as_json: bool,
) -> None:
    """Print one answer; figures go to stderr, so that stdout has nothing but the answer."""
    from rich.console import Console

    from mlx_manager.chat.answer import collect
    from mlx_manager.chat.display import THEME, Silent, display_for, without_echo

    shown = sys.stdout.isatty() if reasoning is None else reasoning
    display = Silent() if as_json else display_for(Console(theme=THEME), markdown, shown)
    try:
        with without_echo(), closing(client.chat(body)) as chunks:
            answer = collect(chunks, display.show)
    finally:
        display.end()
    if as_json:
        typer.echo(json.dumps({"model": body["model"], **answer.document()}, indent=2))
    else:
        note(answer.figures())
    if answer.stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)
