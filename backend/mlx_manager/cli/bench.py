"""`mlx-manager bench`: a load test against any server with OpenAI's chat completions."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlx_manager.cli.connection import KEY_ADVICE, ApiKey, Url, connected, exit_code
from mlx_manager.cli.terminal import AsJson, ExitCode, colour, fail, note
from mlx_manager.printable import in_lines, on_one_line

if TYPE_CHECKING:
    from mlx_manager.bench.load import Measured
    from mlx_manager.bench.plan import Plan

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
    int, typer.Option(metavar="N", min=1, help="Of each request, template included")
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

MOST_WARMUP = 16


def bench(
    *,
    url: Url = None,
    model: Model = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = 8,
    rate: Rate = None,
    requests: Requests = None,
    duration: Duration = None,
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 128,
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
    usage that the server reports. The exit code is 1 if a request failed.

    \b
    Examples:
      mlx-manager bench
      mlx-manager bench -c 32 -n 256 --prompt-tokens 1024 --output-tokens 64
      mlx-manager bench --rate 4 --duration 60 --concurrency 100 --json > result.json
      mlx-manager bench --url https://other.example/v1 --model their-model --natural-end
    """
    more = read_extra(extra)
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
    )
    finish(run_plan(plan), as_json)


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
