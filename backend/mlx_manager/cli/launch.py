"""`mlx-manager launch`: a coding agent against this server."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.chat import serving
from mlx_manager.cli.connection import ApiKey, Url
from mlx_manager.cli.terminal import ExitCode, fail, note

if TYPE_CHECKING:
    from mlx_manager.agents import Agent, Launch
    from mlx_manager.client import ServerClient

NAMES = ("claude", "codex", "opencode", "qwen", "aider", "goose", "crush", "cline")
SMALL_CONTEXT = 32_768
SECRET = "KEY"

Name = Annotated[str, typer.Argument(metavar="AGENT", help=", ".join(NAMES))]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="Handed to the agent as they are")
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="ID", help="Who answers; default: the server's model"),
]
Print = Annotated[bool, typer.Option("--print", help="Print what would be run, and run nothing")]


def launch(
    agent: Name,
    arguments: Arguments = None,
    *,
    model: Model = None,
    url: Url = None,
    api_key: ApiKey = None,
    shown: Print = False,
) -> None:
    """Start a coding agent that talks to this server.

    The agent gets the model's name and context length, and a profile of its own: your own files of
    that agent are not touched. Where no server runs on this machine, one is started for as long as
    the agent runs.

    \b
    Examples:
      mlx-manager launch claude
      mlx-manager launch codex --model mlx-community/Qwen3-30B-A3B-4bit
      mlx-manager launch opencode --url http://studio.local:8000
      mlx-manager launch aider --print
      mlx-manager launch claude -- --print "What does this project do?"
    """
    from mlx_manager.agents import AGENTS

    if agent not in AGENTS:
        fail(
            f"{agent} is no agent that is known here; known are {', '.join(AGENTS)}.",
            ExitCode.USAGE,
        )
    known = AGENTS[agent]
    if not shown and shutil.which(known.program) is None:
        fail(f"{known.program} is not installed: {known.install}", ExitCode.NOT_FOUND)
    with serving(url, api_key, model) as (client, chosen):
        started = prepared(agent, known, client, chosen, api_key)
        command = (*started.command, *(arguments or ()))
        if shown:
            describe(started, command, api_key)
            return
        raise typer.Exit(run(started, command))


def prepared(name: str, agent: Agent, client: ServerClient, model: str, key: str | None) -> Launch:
    """Return what starts the agent; its profile is written."""
    from mlx_manager.agents import NO_KEY, Target, profile_folder, write_profile

    card = card_of(client, model)
    target = Target(
        client.url,
        key or NO_KEY,
        model,
        int(card.get("context_length") or card.get("max_model_len") or SMALL_CONTEXT),
        profile_folder(name),
        sees="image" in card.get("input_modalities", ()),
    )
    if target.context_length < SMALL_CONTEXT:
        note(
            f"{model} takes {target.context_length:,} tokens; coding agents say 10,000 to 15,000 "
            "before you do. Choose a model with a longer context if the agent gives up."
        )
    started = agent.launch(target)
    try:
        write_profile(target, started)
    except OSError as error:
        fail(f"The agent's profile can't be written: {error}")
    return started


def card_of(client: ServerClient, model: str) -> dict[str, Any]:
    """Return what the server tells of a model that it offers.

    Ends the program with exit code 4 where it offers none of that name.
    """
    offered: dict[str, dict[str, Any]] = {each["id"]: each for each in client.models()}
    return offered.get(model) or client.model(model)


def run(started: Launch, command: tuple[str, ...]) -> int:
    """Run the agent in this terminal and return its exit code."""
    environment = {**os.environ, **started.environment}
    for first in started.before:
        done = subprocess.run(first, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            fail(f"`{shlex.join(first)}` failed:\n{(done.stderr or done.stdout).strip()}")
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        fail(f"{command[0]} can't be run: {error.strerror}")


def describe(started: Launch, command: tuple[str, ...], key: str | None) -> None:
    """Print the files, the environment and the command, without the key."""

    def hidden(text: str) -> str:
        return text.replace(key, SECRET) if key else text

    for file, text in started.files.items():
        typer.echo(f"# {file}")
        typer.echo(hidden("".join(f"#   {line}\n" for line in text.splitlines())), nl=False)
    for first in started.before:
        typer.echo(hidden(shlex.join(first)))
    told = [f"{name}={shlex.quote(value)}" for name, value in started.environment.items()]
    typer.echo(hidden(" \\\n  ".join([*told, shlex.join(command)])))
