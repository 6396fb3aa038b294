"""Measurements of `mlx-manager bench --share`: a server of ours and mlx-lm's `stream_generate`.

Both have the same model and get the same prompts, one at a time. They take turns within each round,
and the first changes from round to round, so that a machine that warms up weighs on both.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import IO, Any

import httpx

from mlx_manager import __version__
from mlx_manager.bench.plan import random_text
from mlx_manager.embedded import StartFailed, embedded_server
from mlx_manager.machine import described
from mlx_manager.mlx_server.config import EMBEDDED
from mlx_manager.mlx_server.models.catalog import ModelSource

FORMAT = 1
"""Number of the report's shape; another shape has another."""
OURS, THEIRS = "mlx_manager", "mlx_lm"
LEAST_TOKENS = 2
"""Least number of tokens of an answer, between which there is time to measure."""
SECONDS = 3600
"""Timeout of the client for one answer."""
LAST_LINES = 3
SNAPSHOTS = "snapshots"
"""Folder of the hub's cache whose folders are named by commits."""
CONFIG = ("model_type", "quantization", "torch_dtype", "dtype", "num_hidden_layers", "hidden_size")


class ShareFailed(Exception):
    """Failure to measure any figures; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Load:
    """Work that both are asked to do, `rounds` times."""

    prompt_tokens: int
    output_tokens: int
    rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request to the last token, and how many tokens there were."""

    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one side.

    first_token_seconds: of an answer of one token. tokens_per_second: of the tokens after the
    first, by the seconds that a long answer takes longer than that one. The text of a token may be
    nothing, or held back, so that the pieces of a stream tell neither.
    """

    first_token_seconds: float
    tokens_per_second: float

    @classmethod
    def of(cls, short: Answer, long: Answer) -> Figures:
        """
        Raises:
            ShareFailed: they give no rate.
        """
        if long.tokens < LEAST_TOKENS or long.seconds <= short.seconds:
            raise ShareFailed(
                f"{long.tokens} tokens took {long.seconds:.3f} s and one {short.seconds:.3f} s, "
                "which gives no rate; longer answers would, see --output-tokens"
            )
        rate = (long.tokens - 1) / (long.seconds - short.seconds)
        return cls(short.seconds, rate)


Side = Callable[[list[int], int], Answer]
"""Function that answers a prompt with so many tokens."""


def share(source: ModelSource, load: Load, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the report. `tell` is called with every round.

    Raises:
        ShareFailed: one of the two does not load the model, or fails to answer.
    """
    assert source.path is not None
    model = model_facts(source)
    tell("loading the model twice")
    with stream_generate(source.path) as ask, our_server(source.id) as url:
        random = Random(load.seed)  # nosec B311  # draws a load

        def prompt() -> list[int]:
            words = random_text(random, load.prompt_tokens)
            ids: list[int] = ask({"text": words, "tokens": load.prompt_tokens})["ids"]
            return ids

        def theirs(ids: list[int], tokens: int) -> Answer:
            return Answer(**ask({"ids": ids, "max_tokens": tokens}))

        with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as http:
            ours = partial(completed, http, source.id)
            sides: dict[str, Side] = {OURS: ours, THEIRS: theirs}
            rounds = take_turns(sides, prompt, load, tell)
    return {
        "report": "mlx-manager bench",
        "format": FORMAT,
        "machine": described(),
        "command": command_for(model["name"], load),
        "model": model,
        "load": asdict(load),
        "rounds": [{name: asdict(found) for name, found in each.items()} for each in rounds],
        "summary": summary(rounds),
    }


def command_for(model: str, load: Load) -> str:
    """Return the command that measures the same, wherever the model is."""
    options = {
        "--model": model,
        "--requests": load.rounds,
        "--prompt-tokens": load.prompt_tokens,
        "--output-tokens": load.output_tokens,
        "--seed": load.seed,
    }
    words = [str(word) for option in options.items() for word in option]
    return shlex.join(["mlx-manager", "bench", "--share", *words])


def take_turns(
    sides: Mapping[str, Side],
    prompt: Callable[[], list[int]],
    load: Load,
    tell: Callable[[str], None],
) -> list[dict[str, Figures]]:
    """Return the figures of every side in every round. A round before the first warms up."""
    found = []
    for number in range(-1, load.rounds):
        tell(f"round {number + 1} of {load.rounds}" if number >= 0 else "warming up")
        short, long = prompt(), prompt()
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        answers = {
            name: (sides[name](short, 1), sides[name](long, load.output_tokens)) for name in order
        }
        if number >= 0:
            found.append({name: Figures.of(*answers[name]) for name in sides})
    return found


def summary(rounds: list[dict[str, Figures]]) -> dict[str, Any]:
    """Return median, least and most of each side, and of ours divided by theirs in each round."""
    found: dict[str, Any] = {}
    for metric in Figures.__dataclass_fields__:
        values = {name: [getattr(each[name], metric) for each in rounds] for name in rounds[0]}
        ratios = [a / b for a, b in zip(values[OURS], values[THEIRS], strict=True)]
        every = {**values, "ratio": ratios}
        found[metric] = {name: spread(numbers) for name, numbers in every.items()}
    return found


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def model_facts(source: ModelSource) -> dict[str, Any]:
    """Name and revision, and of its config what speed depends on. A folder is named by its own
    name, not by where it is."""
    assert source.path is not None
    name, revision = source.path.name, None
    if source.id in EMBEDDED:
        name, revision = source.id, __version__
    elif source.path.parent.name == SNAPSHOTS:
        name, revision = source.id, source.path.name
    config = json.loads((source.path / "config.json").read_text())
    kept = {field: config[field] for field in CONFIG if field in config}
    return {"name": name, "revision": revision, "config": kept}


@contextmanager
def our_server(model: str) -> Iterator[str]:
    """Run a server with the model and yield its address.

    Raises:
        ShareFailed: it could not start.
    """
    try:
        with embedded_server(model) as url:
            yield url
    except StartFailed as error:
        raise ShareFailed(f"the server could not start: {error}") from error


def completed(http: httpx.Client, model: str, ids: list[int], tokens: int) -> Answer:
    """Return one completion of a server, timed by the client.

    Raises:
        ShareFailed: it is not answered.
    """
    body = {
        "model": model,
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    begun = time.perf_counter()
    try:
        response = http.post("/v1/completions", json=body)
    except httpx.HTTPError as error:
        raise ShareFailed(f"the server was lost: {error}") from error
    seconds = time.perf_counter() - begun
    if response.is_error:
        raise ShareFailed(f"the server answered {response.text}")
    return Answer(seconds, response.json()["usage"]["completion_tokens"])


@contextmanager
def stream_generate(folder: Path) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Yield a function that asks a process with mlx-lm and the model.

    The process runs `bench/stream_generate.py`.

    Raises:
        ShareFailed: the process ended.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mlx_manager.bench.stream_generate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

        def ask(wish: dict[str, Any]) -> dict[str, Any]:
            return asked(process, log, wish)

        try:
            ask({"model": str(folder)})
            yield ask
        finally:
            process.kill()
            process.communicate()


def asked(process: subprocess.Popen[str], log: IO[str], wish: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(wish) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        log.seek(0)
        said = " ".join(log.read().strip().splitlines()[-LAST_LINES:])
        raise ShareFailed(f"mlx-lm ended: {said or 'it said nothing'}")
    told: dict[str, Any] = json.loads(line)
    return told
