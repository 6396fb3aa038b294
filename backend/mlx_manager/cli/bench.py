"""`mlx-manager bench`: a load test against any server with OpenAI's chat completions."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.chat import pictures
from mlx_manager.cli.connection import KEY_ADVICE, ApiKey, Url, connected, exit_code
from mlx_manager.cli.terminal import (
    STDOUT,
    AsJson,
    ExitCode,
    colour,
    fail,
    note,
    put,
    require_place,
)
from mlx_manager.printable import in_lines, on_one_line

if TYPE_CHECKING:
    from mlx_manager.bench.load import Measured
    from mlx_manager.bench.plan import Plan
    from mlx_manager.bench.share import Load
    from mlx_manager.mlx_server.models.catalog import ModelSource

WEEK = 7 * 86_400

Model = Annotated[
    str | None, typer.Option("--model", "-m", metavar="ID", help="Default: the server's first")
]
Concurrency = Annotated[
    int,
    typer.Option("--concurrency", "-c", metavar="N", min=1, help="Most requests under way at once"),
]
Rate = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        min=0.001,
        max=1_000_000,
        help="Requests a second, at random as people's come [no pause]",
    ),
]
Requests = Annotated[
    int | None,
    typer.Option("--requests", "-n", metavar="N", min=1, help="How many [8 x concurrency]"),
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="N", min=1, max=WEEK, help="Seconds after which no request begins"),
]
PromptTokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Of each request, template and picture included")
]
Images = Annotated[
    list[Path] | None,
    typer.Option(
        "--image",
        metavar="FILE",
        show_default=False,
        help="A picture before each request's words; of several, one at random",
    ),
]
OutputTokens = Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens of an answer")]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos/--natural-end",
        show_default=False,
        help="Answers of exactly that length, where the server can [ignore-eos]",
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=0, help="Short requests before, not counted [concurrency, 16 at most]"
    ),
]
Timeout = Annotated[
    float, typer.Option(metavar="N", min=1, max=WEEK, help="Seconds for one answer")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Of the prompts' words and the arrivals")]
Extra = Annotated[
    str | None,
    typer.Option(metavar="JSON", help="More fields of every request; null removes one of ours"),
]

Share = Annotated[
    bool,
    typer.Option(
        "--share",
        help="Compare with mlx-lm's stream_generate here, and write one JSON file, to be pasted",
    ),
]
File = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE", show_default=False, help="Of --share; - is stdout [mlx-manager-bench.json]"
    ),
]

MOST_WARMUP = 16
SHARE_FILE = Path("mlx-manager-bench.json")
ROUNDS = 5
OF_SHARE = ("file", "share", "model", "requests", "prompt_tokens", "output_tokens", "seed")
"""The parameters that mean something with --share."""


def bench(
    context: typer.Context,
    file: File = None,
    *,
    share: Share = False,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = 8,
    rate: Rate = None,
    requests: Requests = None,
    duration: Duration = None,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 128,
    image: Images = None,
    ignore_eos: IgnoreEos = True,
    warmup: Warmup = None,
    timeout: Timeout = 600,
    seed: Seed = 0,
    extra: Extra = None,
    as_json: AsJson = False,
) -> None:
    """Measure a server under load.

    It sends streaming chat completions with random words to a server with OpenAI's API, and prints
    the time to the first token, the pace of the others, and the failures. It counts tokens by the
    usage that the server reports. The exit code is 1 if a request failed. No two requests have a
    picture with the same bytes, so that none is found in the server's cache.

    --share starts a server of its own and mlx-lm's stream_generate, both with the same model, which
    take turns at --requests [5] prompts, one at a time. Its file has the figures of every round,
    the model with its revision, and the machine; no paths and no names of people or machines.

    \b
    Examples:
      mlx-manager bench
      mlx-manager bench -c 32 -n 256 --prompt-tokens 1024 --output-tokens 64
      mlx-manager bench --rate 4 --duration 60 --concurrency 100 --json > result.json
      mlx-manager bench --url https://other.example/v1 --model their-model --natural-end
      mlx-manager bench --share mine.json --model mlx-community/Llama-3.2-3B-Instruct-4bit
    """
    if share:
        from mlx_manager.bench.share import Load

        refuse_others(context)
        require_place(file := file or SHARE_FILE)
        load = Load(prompt_tokens, output_tokens, requests or ROUNDS, seed)
        share_figures(find_source(model), load, file)
        return
    if file is not None:
        fail(f"{file} is of no use without --share.", ExitCode.USAGE)
    more, images = read_extra(extra), pictures(image or ())
    with connected(url, api_key) as client:
        model = model or client.default_model()
    from mlx_manager.bench.plan import Plan

    count = requests if requests or duration else 8 * concurrency
    plan = Plan(
        url=client.url,
        model=model,
        key=api_key,
        requests=count,
        duration=duration,
        concurrency=concurrency,
        rate=rate,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        warmup=min(concurrency, MOST_WARMUP) if warmup is None else warmup,
        timeout=timeout,
        seed=seed,
        extra={"ignore_eos": True, **more} if ignore_eos else more,
        images=images,
    )
    finish(run_plan(plan), as_json)


def refuse_others(context: typer.Context) -> None:
    """End the program with exit code 2, naming it, where an option was given that --share lacks."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in OF_SHARE and source is not None and source.name == "COMMANDLINE":
            fail(f"{parameter.opts[-1]} is of no use with --share.", ExitCode.USAGE)


def share_figures(source: ModelSource, load: Load, file: Path) -> None:
    from mlx_manager.bench.share import LEAST_TOKENS, ShareFailed, share
    from mlx_manager.machine import impersonal, written

    if load.output_tokens < LEAST_TOKENS:
        fail(f"--share needs --output-tokens of {LEAST_TOKENS} or more.", ExitCode.USAGE)
    try:
        found = share(source, load, note)
    except ShareFailed as error:
        fail(f"There are no figures: {impersonal(str(error))}.")
    put(file, written(found))
    if file != STDOUT:
        print_shared(found)


def find_source(model: str | None) -> ModelSource:
    """The model that `serve` would serve by this name; ends the program where its files are not
    here."""
    from mlx_manager.cli.server.serve import require_mlx
    from mlx_manager.cli.settings import parse_settings
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.models.catalog import Catalog
    from mlx_manager.mlx_server.models.settings import read_models_file

    require_mlx()
    settings = parse_settings({"model": model})
    try:
        source = Catalog(settings.catalog, read_models_file(settings.models_file)).find(
            settings.model
        )
    except MLXManagerError as error:
        fail(error.message, ExitCode.NOT_FOUND)
    if source.urls:
        fail(f"{source.id} is on another machine: run it there.", ExitCode.NOT_FOUND)
    if source.path is None:
        fail(f"{source.id} is not here yet: mlx-manager pull {source.id}", ExitCode.NOT_FOUND)
    return source


def print_shared(found: dict[str, Any]) -> None:
    from mlx_manager.bench.share import OURS, THEIRS
    from mlx_manager.cli.terminal import show, table

    first, rate = (
        found["summary"][metric] for metric in ("first_token_seconds", "tokens_per_second")
    )
    load = found["load"]
    typer.secho(f"{on_one_line(found['model']['name'])}", bold=True)
    typer.echo(
        f"prompts of {load['prompt_tokens']} tokens, answers of {load['output_tokens']}, "
        f"{load['rounds']} rounds; median (least-most)"
    )
    typer.echo()
    columns = ("first token, ms", "tokens/s")
    shown = table("", *columns, right=columns)
    for name, side in (("mlx-manager", OURS), ("mlx-lm", THEIRS)):
        shown.add_row(name, with_spread(first[side], 1, 1000), with_spread(rate[side], 1))
    shown.add_row("ratio", with_spread(first["ratio"], 2), with_spread(rate["ratio"], 2))
    show(shown)


def with_spread(values: dict[str, float], digits: int, unit: float = 1) -> str:
    median, least, most = (
        f"{values[key] * unit:,.{digits}f}" for key in ("median", "least", "most")
    )
    return f"{median} ({least}-{most})"


def read_extra(extra: str | None) -> dict[str, Any]:
    if extra is None:
        return {}
    try:
        found = json.loads(extra)
    except ValueError as error:
        fail(f"--extra is not JSON: {error}.", ExitCode.USAGE)
    if not isinstance(found, dict):
        fail("--extra must be a JSON object.", ExitCode.USAGE)
    return found


def run_plan(plan: Plan) -> Measured:
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from mlx_manager.bench.load import FirstRequestFailed, measure

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar as progress:
        task = progress.add_task("warming up", total=plan.requests)

        def tell(measured: Measured) -> None:
            failed = sum(1 for outcome in measured.outcomes if outcome.error)
            said = f"{failed} failed" if failed else "answered"
            progress.update(task, completed=len(measured.outcomes), description=said)

        try:
            return asyncio.run(measure(plan, tell))
        except FirstRequestFailed as error:
            failure = error
    where = f"{plan.url} with model {plan.model}"
    code = exit_code(failure.status) if failure.status else ExitCode.NO_SERVER
    advice = f" {KEY_ADVICE}" if failure.status == HTTPStatus.UNAUTHORIZED else ""
    fail(f"The first request to {where} failed: {failure}{advice}", code)


def finish(measured: Measured, as_json: bool) -> None:
    from mlx_manager.bench.report import report

    figures = report(measured)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        print_report(figures)
    if measured.stopped:
        raise typer.Exit(ExitCode.INTERRUPTED)
    if figures["requests"]["failed"] or not figures["requests"]["completed"]:
        raise typer.Exit(ExitCode.FAILED)


LATENCIES = {
    "time_to_first_token_ms": "time to first token",
    "inter_token_ms": "between tokens",
    "per_output_token_ms": "per output token",
    "end_to_end_ms": "end to end",
}


def print_report(figures: dict[str, Any]) -> None:
    from mlx_manager.bench.report import BUSY

    requests, tokens, rates = figures["requests"], figures["tokens"], figures["throughput"]
    failed = f", {requests['failed']} failed" if requests["failed"] else ""
    typer.secho(f"{on_one_line(figures['model'])} at {figures['url']}", bold=True)
    typer.echo(
        f"{requests['completed']} requests answered{failed} in {figures['seconds']:.1f} s, "
        f"{arrival(figures['load'])}"
    )
    typer.echo(
        f"{rates['requests']:,.2f} requests/s, {rates['output_tokens']:,.1f} output tokens/s, "
        f"{rates['total_tokens']:,.1f} tokens/s with prompts"
    )
    if requests["completed"]:
        each = requests["completed"]
        typer.echo(
            f"prompts of {tokens['prompt'] / each:,.0f} tokens, answers of "
            f"{tokens['output'] / each:,.0f}, on average; {tokens['cached']:,} prompt tokens cached"
        )
    typer.echo()
    print_latencies(figures)
    for message, count in figures["errors"].items():
        typer.secho(f"{count} x {in_lines(message)}", fg=colour("red"), err=True)
    if tokens["counted_by"] == "chunks":
        note("The server sent no usage: each chunk of an answer is counted as one token.")
    if figures["client_cpu"] > BUSY:
        note(
            f"This program used {figures['client_cpu']:.0%} of a core: it may be slower than the "
            "server. Run it on another machine, or with fewer requests at once."
        )


def arrival(load: dict[str, Any]) -> str:
    if load["rate"] is None:
        return f"{load['concurrency']} at a time"
    return f"{load['rate']:g} a second, at most {load['concurrency']} at a time"


def print_latencies(figures: dict[str, Any]) -> None:
    from mlx_manager.cli.terminal import show, table

    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    shown = table("milliseconds", *columns, right=columns)
    for key, name in LATENCIES.items():
        if (found := figures[key]) is not None:
            shown.add_row(name, *(f"{found[column]:,.1f}" for column in columns))
    show(shown)
