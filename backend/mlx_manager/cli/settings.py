"""Settings on the command line: an option for each, by the table that the server has them from."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from mlx_manager.cli.terminal import ExitCode, complain, fail
from mlx_manager.mlx_server.settings import TABLE, Setting

if TYPE_CHECKING:
    from mlx_manager.mlx_server.config import MLXServerSettings

Command = Callable[..., None]


def takes_settings(*names: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of these settings; none named: of all.

    The command's parameter `given`, in whose place the options are listed, takes those that were on
    the command line, by their names.
    """
    chosen = names or tuple(TABLE)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_options(**values: Any) -> None:
            found = {name: values.pop(name) for name in chosen}
            command(given={k: v for k, v in found.items() if v is not None}, **values)

        its = inspect.signature(command, eval_str=True)
        own = list(its.parameters.values())
        place = list(its.parameters).index("given")
        own[place : place + 1] = [parameter(TABLE[name]) for name in chosen]
        # By this signature typer makes the options.
        with_options.__signature__ = its.replace(parameters=own)  # type: ignore[attr-defined]
        return with_options

    return decorate


def parameter(setting: Setting) -> inspect.Parameter:
    """Return the parameter of a command that is a setting's option; None: not given."""
    option = typer.Option(help=help_text(setting), metavar=metavar(setting))
    kind: Any = option_type(setting)
    return inspect.Parameter(
        setting.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def option_type(setting: Setting) -> type:
    """Return the type that the command line reads; `config` validates what it finds."""
    if get_origin(setting.kind) is Literal:
        return type(setting.default)
    if setting.kind in {bool, int, float, Path} and not setting.is_size:
        return setting.kind  # type: ignore[no-any-return]
    return str


def metavar(setting: Setting) -> str | None:
    if get_origin(setting.kind) is Literal:
        return "|".join(map(str, get_args(setting.kind)))
    return setting.metavar or ("N" if setting.kind in {int, float} else None)


def help_text(setting: Setting) -> str:
    match setting.default:
        case None | ():
            return setting.text
        case bool(on):
            return f"{setting.text} [{'on' if on else 'off'}]"
        case default:
            return f"{setting.text} [{default}]"


def parse_settings(given: dict[str, Any]) -> MLXServerSettings:
    """Return the settings of the environment, with those `given` (not None) in their place.

    End the program with exit code 2, naming the option, when a value is out of range.
    """
    check_hub_address()
    from pydantic import ValidationError

    from mlx_manager.mlx_server.config import MLXServerSettings

    try:
        return MLXServerSettings(**{k: v for k, v in given.items() if v is not None})
    except ValidationError as error:
        for problem in error.errors():
            row = TABLE[str(problem["loc"][0])]
            setting = f"{row.option} ({row.variable})"
            rule = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
            rule = rule.replace(" items,", " characters,").replace(" item,", " character,")
            kind, should, _ = rule.partition(" should ")
            complain(f"{setting}{rule[len(kind) :]}" if should else f"{setting}: {rule}")
        raise typer.Exit(ExitCode.USAGE) from None


def check_hub_address() -> None:
    """End the program with exit code 2 where HF_ENDPOINT can't be read as an address: with it the
    hub's client can't even be imported, nor what builds on it.
    """
    from urllib.parse import urlsplit

    hub = os.environ.get("HF_ENDPOINT", "")
    try:
        _ = urlsplit(hub).port
    except ValueError:
        fail(f"HF_ENDPOINT: {hub} is no address such as https://huggingface.co.", ExitCode.USAGE)
