"""Decoding on one device and on several: tokens per second of 1, 32 and 128 rows, over HTTP.

    python benchmarks/gpu/ranks.py [--shapes 8b] [--bits 4] [--devices 1 2] [--rows 1 32 128]
        [--tokens 128] [--rounds 3] [--folder /tmp/race] [--vllm-python PATH] [--seconds 290]

First `all_reduce.py` measures what the group's operations cost, by themselves and in compiled
steps, with each of `VARIANTS` of the environment. Then comes a server for each number of devices,
one after the other; its model is spread over them. Where a variant has made all-reduces quicker,
the servers of several devices run with it, too; where a server fails or hangs, it runs again
without compiled steps. With `--vllm-python` (an interpreter that
has vLLM), vLLM follows with as many devices (`--tensor-parallel-size`).

Each round asks for all rows at once; their prompts are in the prefix cache by then. The rate is
that of the time in which all rows decode. The median of the rounds is told, and their range.

Greedy answers are compared with those of the first number of devices. Random weights have near
ties, so some answers may part at a token. So each server is also asked for the log-probabilities
of the first one's answers, and told are the places where another token is likeliest, and how far
apart the two best are there.

Each stage has a time limit, each line is written at once, and all ends after `--seconds`: what is
left out by then is named. A stage that does not end says where its processes are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]

from folders import written  # noqa: E402
from race import vllm_server  # noqa: E402
from side import prompts_of  # noqa: E402

from load_client import Answer  # noqa: E402
from mlx_manager.mlx_server.devices.group import here, members  # noqa: E402
from mlx_manager.mlx_server.utils.prefixes import alike  # noqa: E402
from mlx_manager.mlx_server.workers.hosts import cards  # noqa: E402
from servers import (  # noqa: E402
    DidNotStart,
    Server,
    dump,
    end_group,
    last_of,
    load,
    our_server,
)

PROMPT = 128
COMPARED = 3
"""Prompts whose answers are compared token by token."""
LOG = 6000
"""Characters of a server's log that are shown where it fails."""
WATCHDOG = "45"
"""Seconds without a step after which our server ends a worker, and says where it was."""
RECORDED = {"MLX_USE_CUDA_GRAPHS": "1"}
VARIANTS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "recorded": RECORDED,
    "no mixing": RECORDED | {"NCCL_GRAPH_MIXING_SUPPORT": "0"},
    "no registering": RECORDED | {"NCCL_GRAPH_REGISTER": "0"},
    "low latency": {"NCCL_PROTO": "LL"},
}
"""Environments of the ranks. NCCL's variables are described in its user guide; MLX's variable has
its launches recorded as CUDA graphs, which ranks do not do as they come."""
WITHOUT: dict[str, dict[str, str]] = {"not compiled": {"MLX_DISABLE_COMPILE": "1"}}
"""Environments in which a server is tried again, in this order."""
QUICKER = 0.85
"""Share of an all-reduce's time from which on a variant is worth a server."""
VLLM: dict[str, str] = {
    # What it would compile or send by multicast here; its own all-reduce stays.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "PYTHONFAULTHANDLER": "1",
}
VLLM_ARGUMENTS = [
    *("--gpu-memory-utilization", "0.85", "--max-model-len", "4096"),
    *("--compilation-config", '{"pass_config": {"fuse_allreduce_rms": false}}'),
]
FAILED = (DidNotStart, RuntimeError, OSError, ValueError, KeyError, subprocess.SubprocessError)
"""Errors of a server that is not there, or that answers with something else."""


class Out(Exception):
    """The time of the whole run is used up."""


class Clock:
    """The time of the whole run, and the stages that it is used for."""

    def __init__(self, seconds: float) -> None:
        self._begun = time.monotonic()
        self._seconds = seconds

    @property
    def left(self) -> float:
        return self._begun + self._seconds - time.monotonic()

    def within(self, seconds: float) -> float:
        """Return the time limit of a stage that may take so many seconds.

        Raises:
            Out: no time is left.
        """
        if self.left < 1:
            raise Out
        return min(seconds, self.left)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.say(f"{name} ...")
        begun = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.say(f"{name}: {type(error).__name__} after {time.monotonic() - begun:.1f} s")
            raise
        self.say(f"{name}: {time.monotonic() - begun:.1f} s")


@dataclass(slots=True)
class Trial:
    """A server that is measured: its side, its number of devices, and its environment by name.

    rates: tokens per second of each round, by the number of rows. failed: why it has none.
    """

    side: str
    devices: int
    variant: str
    environment: Mapping[str, str]
    rates: dict[int, list[float]] = field(default_factory=dict)
    failed: str | None = None

    def __str__(self) -> str:
        plural = "s" * (self.devices > 1)
        variant = "" if self.variant == "as it comes" else f" ({self.variant})"
        return f"{self.side}, {self.devices} device{plural}{variant}"

    def rate(self, rows: int) -> float | None:
        return statistics.median(self.rates[rows]) if rows in self.rates else None


# --- The group's operations ---------------------------------------------------------------------


def all_reduces(size: int, variant: Mapping[str, str], options: argparse.Namespace) -> float | None:
    """Show what all-reduces among so many ranks cost. Return the microseconds of one row's in a
    compiled chain with products; None where they fail."""
    seconds = options.clock.within(40)
    hosts = here(size)
    lines: Queue[tuple[int, str | None]] = Queue()
    processes = []
    for member, card in zip(members(hosts), cards(hosts), strict=True):
        place = json.dumps(asdict(member))
        command = [sys.executable, str(HERE / "all_reduce.py"), place, str(seconds)]
        command += ["--hidden", str(options.hidden), "--rows", *map(str, options.rows)]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variant, **card},
            start_new_session=True,
        )
        processes.append(process)
        Thread(target=_read, args=(member.rank, process, lines), daemon=True).start()
    try:
        return _told(size, lines, time.monotonic() + seconds + 3)
    finally:
        for process in processes:
            end_group(process)
            process.wait()


def _read(rank: int, process: subprocess.Popen[str], lines: Queue[tuple[int, str | None]]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put((rank, line.rstrip()))
    lines.put((rank, None))


def _told(size: int, lines: Queue[tuple[int, str | None]], deadline: float) -> float | None:
    """Show what the ranks tell until all have ended, or one has failed."""
    stages, done, found, words = ["nothing"] * size, set[int](), dict[tuple[str, int], float](), []
    with suppress(Empty):
        while len(done) < size:
            rank, line = lines.get(timeout=max(0.1, deadline - time.monotonic()))
            if line is None:
                if stages[rank] != "done":
                    deadline = min(deadline, time.monotonic() + 3)
                done.add(rank)
                continue
            try:
                told = json.loads(line)
            except ValueError:
                words.append(f"    rank {rank}: {line}")
                continue
            if "stage" in told:
                stages[rank] = told["stage"]
            else:
                found[told["way"], told["rows"]] = told["each"]
                print(
                    f"    {told['rows']:4} rows, {told['way']:13}: {told['each']:8.1f} us each, "
                    f"queued in {told['queued']:.1f} us{'' if told['right'] else ', WRONG'}",
                    flush=True,
                )
    if set(stages) == {"done"}:
        rows = min(rows for _, rows in found)
        return found["products", rows] - found["products only", rows]
    told_last = ", ".join(f"rank {rank} at {stage!r}" for rank, stage in enumerate(stages))
    print(f"    FAILED: {told_last}", *words[-60:], sep="\n", flush=True)
    return None


def quickest(size: int, options: argparse.Namespace) -> list[tuple[str, Mapping[str, str]]]:
    """Return the environments in which several devices are measured: as it comes, and the quickest
    if all-reduces are clearly quicker in it."""
    costs: dict[str, float] = {}
    for name in options.variants:
        with options.clock.stage(f"all-reduces of {size} ranks, {name}"):
            cost = all_reduces(size, VARIANTS[name], options)
        if cost is not None:
            costs[name] = cost
    plain = [("as it comes", VARIANTS["as it comes"])]
    if not costs:
        return plain
    best = min(costs, key=lambda name: costs[name])
    if "as it comes" not in costs:
        return [(best, VARIANTS[best])]
    if best != "as it comes" and costs[best] < QUICKER * costs["as it comes"]:
        return [*plain, (best, VARIANTS[best])]
    return plain


# --- Servers ------------------------------------------------------------------------------------


def asked(server: Server, rows: int, tokens: int, seconds: float) -> list[Answer]:
    """Return the answers to `rows` prompts that are asked at once."""
    common = {
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    prompts = prompts_of([PROMPT] * rows, rows)
    requests = [
        server.request("/completions", common | {"prompt": list(prompt)}) for prompt in prompts
    ]
    return load(requests, seconds)


def rate(answers: Sequence[Answer]) -> float:
    """Return the tokens per second while all rows decode, by the medians of the rows' first and
    last pieces."""
    first = statistics.median(answer.first for answer in answers)
    last = statistics.median(answer.ended for answer in answers)
    return sum(answer.tokens - 1 for answer in answers) / (last - first)


def likeness(one: str, other: str) -> str:
    """Return in words how far two answers are the same."""
    same = alike(one, other)
    return "the same text" if one == other else f"the same {same} of {len(one)} characters"


def posted(server: Server, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return the answer to one completion request, as JSON."""
    asked = server.request("/completions", body)
    request = Request(asked["url"], json.dumps(asked["body"]).encode())
    request.add_header("Content-Type", "application/json")
    with urlopen(request, timeout=seconds) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


Places = list[tuple[float, dict[str, float]]]
"""The log-probability of the token at each place of an answer, and the best tokens there."""


def places(server: Server, prompt: Sequence[int], answer: Sequence[int], limit: float) -> Places:
    """Return a server's log-probabilities of an answer, which it reads as a part of the prompt."""
    body = {"prompt": [*prompt, *answer], "max_tokens": 0, "echo": True, "logprobs": 2}
    told = posted(server, body, limit)["choices"][0]["logprobs"]
    pairs = zip(told["token_logprobs"], told["top_logprobs"], strict=True)
    return list(pairs)[len(prompt) :]


def compare_tokens(trial: Trial, server: Server, options: argparse.Namespace) -> None:
    """Compare how likely the first server's answers are with what that server said."""
    known: list[tuple[list[int], Places]] = options.answers
    prompts = prompts_of([PROMPT] * COMPARED, 7)
    body = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for prompt in prompts[len(known) :]:
        limit = options.clock.within(60)
        asked = {**body, "prompt": list(prompt), "max_tokens": options.tokens}
        ids = posted(server, asked, limit)["choices"][0]["token_ids"]
        known.append((ids, places(server, prompt, ids, limit)))
    apart, margins, count = [], [], 0
    for prompt, (ids, before) in zip(prompts, known, strict=True):
        now = places(server, prompt, ids, options.clock.within(60))
        for (was, best), (other, others) in zip(before, now, strict=True):
            count += 1
            apart.append(abs(was - other))
            if max(best, key=best.__getitem__) != max(others, key=others.__getitem__):
                high, low = sorted(best.values(), reverse=True)[:2]
                margins.append(high - low)
    ties = f", where the two best are at most {max(margins):.4f} apart" if margins else ""
    options.clock.say(
        f"{trial}: of {count} tokens of the first server's answers another is likeliest at "
        f"{len(margins)}{ties}; log-probabilities differ by {statistics.mean(apart):.5f} in the "
        f"mean, {max(apart):.4f} at most"
    )


@contextmanager
def started(trial: Trial, folder: Path, options: argparse.Namespace) -> Iterator[Server]:
    limit = options.clock.within(options.start_seconds)
    if trial.side == "vllm":
        more = [*VLLM_ARGUMENTS, "--tensor-parallel-size", str(trial.devices)]
        environment = {**VLLM, **trial.environment}
        made = vllm_server(
            folder, options.vllm_python, *more, seconds=limit, environment=environment
        )
    else:
        settings = {
            "devices": str(trial.devices),
            "max_rows": str(max(options.rows)),
            "speculation": "off",
            "log_level": options.log_level,
            "watchdog_seconds": WATCHDOG,
        }
        made = our_server(folder, seconds=limit, environment=trial.environment, **settings)
    with made as server:
        yield server


def measure(trial: Trial, folder: Path, options: argparse.Namespace) -> None:
    """Measure a server. Whatever it does is told, and the run goes on.

    Raises:
        Out: the time of the whole run is used up.
    """
    clock: Clock = options.clock
    try:
        with clock.stage(f"{trial} starts"):
            manager = started(trial, folder, options)
            server = manager.__enter__()
        try:
            _measure(trial, server, options)
        except FAILED as error:
            trial.failed = f"{type(error).__name__}: {error}"
            if clock.left < 1:
                raise Out from error
            clock.say(f"{trial} FAILED: {trial.failed}; its processes and its log say:")
            dump(server.pid)
            print(last_of(server, LOG), flush=True)
        finally:
            keep_log(trial, last_of(server, 2**20), options)
            manager.__exit__(None, None, None)
    except FAILED as error:
        trial.failed = f"{type(error).__name__}: {str(error)[-LOG:]}"
        clock.say(f"{trial} FAILED: {trial.failed}")
        keep_log(trial, str(error), options)


def keep_log(trial: Trial, text: str, options: argparse.Namespace) -> None:
    if options.logs is not None:
        options.logs.mkdir(parents=True, exist_ok=True)
        name = f"{trial.side}-{trial.devices}-{trial.variant.replace(' ', '-')}.log"
        (options.logs / name).write_text(text)


def _measure(trial: Trial, server: Server, options: argparse.Namespace) -> None:
    clock: Clock = options.clock
    with clock.stage(f"{trial} loads and answers with a token"):
        asked(server, 1, 1, clock.within(options.start_seconds))
    for rows in options.rows:
        with clock.stage(f"{trial}, {rows} rows: first round"):
            # It fills the prefix cache, and compiles.
            asked(server, rows, options.tokens, clock.within(60))
        for number in range(options.rounds):
            found = asked(server, rows, options.tokens, clock.within(60))
            trial.rates.setdefault(rows, []).append(rate(found))
            if number == 0:
                options.texts.setdefault((trial.side, rows), found[0].text)
        middle = statistics.median(trial.rates[rows])
        same = likeness(options.texts[trial.side, rows], found[0].text)
        clock.say(
            f"{trial}, {rows:3} rows: {middle:9.1f} tokens/s "
            f"({min(trial.rates[rows]):.1f} to {max(trial.rates[rows]):.1f}), "
            f"{1000 * rows / middle:.2f} ms a step, {same}"
        )
    if trial.side == "ours":
        compare_tokens(trial, server, options)
        clock.say(f"{trial}: {forward_of(server)}")


def forward_of(server: Server) -> str:
    """Return how our server runs the model, and what its log says of ways that it has not taken."""
    with urlopen(f"{server.base_url}/models", timeout=10) as response:
        cards = json.load(response)["data"]
    forms = {(card["engine"] or {}).get("forward") for card in cards if card.get("engine")}
    words = ("not used", "not fused", "not compiled", "not batched")
    lines = last_of(server, 2**20).splitlines()
    return " | ".join(
        [f"runs as {forms}", *(line for line in lines if any(w in line for w in words))]
    )


def race(name: str, folder: Path, options: argparse.Namespace) -> None:
    """Measure all servers over a model, and show the ratios."""
    options.texts, options.answers = {}, []
    trials: list[Trial] = []
    several = options.environments
    try:
        for devices in options.devices if "ours" in options.sides else ():
            ways = [("as it comes", {})] if devices == 1 else several[devices]
            for variant, environment in ways:
                trials.append(Trial("ours", devices, variant, environment))
                measure(trials[-1], folder, options)
            for variant, environment in WITHOUT.items():
                if devices > 1 and trials[-1].failed is not None:
                    trials.append(Trial("ours", devices, variant, environment))
                    measure(trials[-1], folder, options)
        # Should time run out, what is spread has been compared.
        theirs = options.vllm_devices or options.devices
        peers = sorted(theirs, reverse=True) if "vllm" in options.sides else []
        for devices in peers:
            trials.append(Trial("vllm", devices, "as it comes", {}))
            measure(trials[-1], folder, options)
    finally:
        show_ratios(name, trials, options.rows)


def show_ratios(name: str, trials: Sequence[Trial], rows: Sequence[int]) -> None:
    first: dict[str, Trial] = {}
    for trial in trials:
        base = first.setdefault(trial.side, trial)
        told = [
            f"{number} rows {now / before:.2f}"
            for number in rows
            if (now := trial.rate(number)) and (before := base.rate(number))
        ]
        if trial is not base and told:
            print(f"{name}: {trial} ÷ {base}: {', '.join(told)}", flush=True)
    for trial in trials:
        for other in trials:
            if (trial.side, other.side, trial.devices) == ("ours", "vllm", other.devices):
                told = [
                    f"{number} rows {ours / theirs:.2f}"
                    for number in rows
                    if (ours := trial.rate(number)) and (theirs := other.rate(number))
                ]
                if told:
                    print(f"{name}: {trial} ÷ {other}: {', '.join(told)}", flush=True)
    for trial in trials:
        if trial.failed is not None:
            print(f"{name}: {trial} FAILED: {trial.failed.splitlines()[0][:200]}", flush=True)


def machine() -> None:
    """Show the cards and the links between them."""
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "CUDA_", "MLX_")))
    print(" ".join(f"{name}={os.environ[name]}" for name in names), flush=True)
    if shutil.which("nvidia-smi") is not None:
        for arguments in (["-L"], ["topo", "-m"]):
            with suppress(subprocess.SubprocessError, OSError):
                subprocess.run(["nvidia-smi", *arguments], check=False, timeout=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8b"])
    parser.add_argument("--bits", type=int, default=None)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 128])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/race"))
    parser.add_argument("--sides", nargs="*", default=["ours", "vllm"])
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--vllm-devices", nargs="+", type=int, help="of its runs; else as ours")
    parser.add_argument("--seconds", type=float, default=290, help="of the whole run")
    parser.add_argument("--start-seconds", type=float, default=150, help="of a server's start")
    parser.add_argument("--hidden", type=int, default=4096, help="of the all-reduces alone")
    parser.add_argument(
        "--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS), help="none: no probe"
    )
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--logs", type=Path, help="folder for all that the servers write")
    options = parser.parse_args()
    options.clock = clock = Clock(options.seconds)
    if options.vllm_python is None or options.bits:
        options.sides = [side for side in options.sides if side != "vllm"]
    bits = [] if options.bits is None else [options.bits]
    machine()
    try:
        options.environments = {
            size: quickest(size, options) for size in options.devices if size > 1
        }
        for shape in options.shapes:
            name = "-".join([shape, *(f"{each}bit" for each in bits)])
            with clock.stage(f"{name} is written"):
                folder = written(shape, options.folder / name, *bits)
            race(name, folder, options)
    except Out:
        clock.say("the time is used up; what comes after this was not run")
        sys.exit(1)


if __name__ == "__main__":
    main()
