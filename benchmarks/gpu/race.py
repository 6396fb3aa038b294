"""Ours, mlx-lm and vLLM on one GPU: decode steps, whole runs over HTTP, memory, pace, prefixes.

    python benchmarks/gpu/race.py [--shapes 1b 8b] [--bits 4] [--parts steps http]
        [--vllm-python /path/to/python] [--folder /tmp/race] [--rounds 2]

Each side is a process of its own that keeps its model; they take turns within a round. Without
`--vllm-python` (an interpreter that has vLLM) that side is left out, as it is of weights that MLX
has packed into `--bits`. Of those the side `kept` is ours with packed weights alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE), str(HERE.parent.parent / "backend")]

from folders import written  # noqa: E402
from loads import LOADS, lengths_of  # noqa: E402
from side import prompts_of  # noqa: E402

from harness import percentile, print_report, ratio  # noqa: E402
from mlx_manager.mlx_server.devices.cuda.graphs import SETTINGS  # noqa: E402
from servers import (  # noqa: E402
    START_SECONDS,
    Server,
    end_group,
    free_port,
    load,
    our_server,
    running,
    time_to_first,
    tokens_per_second,
)

# Tokens that rows decode: some 0.5 s, or what a run has besides would weigh as much.
TOKENS = {"1b": 192, "8b": 96, "lfm2-1b": 256, "olmo2-1b": 256, "granite4-h-1b": 192}
# Tokens of streams that run while a prompt arrives: they must outlast it.
RUNNING = {"1b": 1600, "8b": 400}
Answers = dict[str, list[dict[str, Any]]]


class Worker:
    """`side.py` in a process."""

    def __init__(
        self, name: str, folder: Path, python: str, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(HERE / "side.py"), name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def wait(self) -> dict[str, Any]:
        """Until the model is loaded; how it is run."""
        return self._answer()

    def measure(
        self, lengths: Sequence[int], tokens: int, seed: int, whole: bool = False
    ) -> dict[str, Any]:
        return self.ask({"lengths": list(lengths), "tokens": tokens, "seed": seed, "whole": whole})

    def ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        end_group(self._process)


def numbers(options: argparse.Namespace) -> str:
    """Kind of the weights."""
    return f"{options.bits} bits" if options.bits else "bf16"


def race_steps(shape: str, folder: Path, options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        workers = []
        for name in options.sides:
            python = options.vllm_python if name == "vllm" else sys.executable
            as_it_comes = name == "vllm" or (name == "mlx-lm" and options.as_installed)
            environment = {} if as_it_comes else dict(SETTINGS)
            if name == "kept":
                environment["RACE_WEIGHTS"] = "keep"
            worker = Worker(name, folder, python, environment)
            stack.callback(worker.close)
            workers.append(worker)
            # One after the other: vLLM takes for its own what others allot meanwhile.
            print(worker.name, worker.wait(), file=sys.stderr, flush=True)
        table = []
        peers = [name for name in options.sides if name != "ours"]
        for title in options.loads:
            tokens = TOKENS.get(shape, 96)
            there = [w for w in workers if w.name != "mlx-lm" or title in options.mlx_lm_loads]
            answers = take_turns(there, lengths_of(title), tokens, options.rounds)
            table.append(describe(title, answers, peers))
            print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    columns = ["load", "ours tok/s", "forward", "prompts tok/s"]
    columns += [column for name in peers for column in (f"{name} tok/s", f"÷ {name}")]
    columns += [f"prompts ÷ {name}" for name in peers if name != "mlx-lm"]
    columns.append("memory beyond, GB")
    print_report(f"Decode on a GPU, {shape}, {numbers(options)}", columns, table)


def take_turns(
    workers: Sequence[Worker], lengths: Sequence[int], tokens: int, rounds: int
) -> Answers:
    answers: Answers = {worker.name: [] for worker in workers}
    first: dict[str, int | None] = {}
    for number in range(-1, rounds):
        for worker in workers if number % 2 else reversed(workers):
            # The first time compiles.
            found = worker.measure(lengths, tokens if number >= 0 else 80, seed=100 + number)
            if number >= 0:
                answers[worker.name].append(found)
            else:
                # Before prompts of other rounds are kept for reuse.
                first[worker.name] = found["peak"]
    for name, found in answers.items():
        for each in found:
            each["peak"] = first[name]
    return answers


def describe(title: str, answers: Answers, peers: Sequence[str]) -> list[str]:
    def values(name: str, what: str) -> list[float]:
        return [each[what] for each in answers.get(name, ())]

    def by_round(name: str) -> str:
        return ", ".join(f"{each:,.0f}" for each in values(name, "rate")) or "not run"

    def against(name: str, what: str) -> str:
        return (
            str(ratio(values("ours", what), values(name, what))) if name in answers else "not run"
        )

    peaks = [
        f"{name} {max(values(name, 'peak')) / 1e9:.1f}"
        for name, found in answers.items()
        if found[0]["peak"] is not None
    ]
    row = [title, by_round("ours"), answers["ours"][0]["forward"]]
    row.append(f"{statistics.median(values('ours', 'prefill')):,.0f}")
    row += [cell for name in peers for cell in (by_round(name), against(name, "rate"))]
    row += [against(name, "prefill") for name in peers if name != "mlx-lm"]
    return [*row, ", ".join(peaks)]


# --- Over HTTP ----------------------------------------------------------------------------------


@contextmanager
def vllm_server(
    folder: Path,
    python: str,
    *more: str,
    seconds: float = START_SECONDS,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """vLLM's server. more: arguments besides. seconds: as in `running`."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--port", str(port), "--gpu-memory-utilization", "0.4"]
    command += ["--max-model-len", "16384", "--served-model-name", "m", *more]
    with running("vllm", command, port, environment or {}, "m", seconds=seconds) as server:
        yield server


def completion(server: Server, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    body = {
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return server.request("/completions", body)


def race_http(shape: str, folder: Path, options: argparse.Namespace) -> None:
    """Our server and the engine in a process of its own take turns; vLLM has the card to itself
    after them, since all three do not fit on one."""
    table = []
    with ExitStack() as stack:
        ours = stack.enter_context(our_server(folder, memory_limit_gb="44"))
        inside = Worker("ours", folder, sys.executable, {**SETTINGS, "RACE_GB": "44"})
        stack.callback(inside.close)
        inside.wait()
        for number in range(-1, options.rounds):
            rate = inside.measure([512] * 64, 256, 5000 + number, whole=True)["rate"]
            table.append(["in process", str(number + 1), f"{rate:,.0f}", *[""] * 7])
            table.append([ours.name, str(number + 1), *over_http(ours, shape, 1000 + 17 * number)])
            print(
                *map(" | ".join, table[-2:]), card_memory(), sep="\n", file=sys.stderr, flush=True
            )
    if "vllm" in options.sides:
        with vllm_server(folder, options.vllm_python) as theirs:
            for number in range(-1, options.rounds):
                found = over_http(theirs, shape, 1000 + 17 * number)
                table.append([theirs.name, str(number + 1), *found])
                print(" | ".join(table[-1]), file=sys.stderr, flush=True)
    columns = ["server", "round (0 warms up)", "64 x (512 in, 256 out) tok/s", "median TTFT s"]
    columns += ["32 running: median gap ms", "p99 while 8 000 tokens come ms", "ratio"]
    columns += ["8 000 tokens cold TTFT s", "warm", "ratio"]
    print_report(f"Over HTTP on a GPU, {shape}, {numbers(options)}", columns, table)


def card_memory() -> str:
    """Memory in use on the card, by all processes."""
    if shutil.which("nvidia-smi") is None:
        return "in use on the card: unknown"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"in use on the card: {told.strip()}"


def over_http(server: Server, shape: str, seed: int) -> list[str]:
    found = load([completion(server, p, 256) for p in prompts_of([512] * 64, seed)])
    row = [f"{tokens_per_second(found):,.0f}", f"{time_to_first(found):.3f}"]
    (prompt,) = prompts_of([8000], seed + 1)
    cold, warm = (load([completion(server, prompt, 4)])[0] for _ in range(2))
    times = [answer.first - answer.started for answer in (cold, warm)]
    row += pace(server, RUNNING.get(shape, 400), seed + 2)
    return [*row, f"{times[0]:.3f}", f"{times[1]:.3f}", f"{times[1] / times[0]:.3f}"]


def pace(server: Server, tokens: int, seed: int) -> list[str]:
    """Gaps of 32 running streams of so many tokens: when nothing else is there, and while a prompt
    is processed."""
    *short, long = prompts_of([128] * 32 + [8000], seed)
    requests = [completion(server, prompt, tokens) for prompt in short]
    late = {**completion(server, long, 2), "after": 1.2}
    found = load([*requests, late])
    begin, end = found[-1].started, found[-1].first
    settled = max(answer.first for answer in found[:-1]) + 0.1
    idle, busy = [], []
    for answer in found[:-1]:
        for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False):
            if settled < a and (b < begin or a > end + 0.1):
                idle.append(b - a)
            elif a < end and b > begin:
                busy.append(b - a)
    median, p99 = statistics.median(idle), percentile(busy, 0.99)
    return [f"{median * 1e3:.1f}", f"{p99 * 1e3:.1f}", f"{p99 / median:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", default=["1b", "8b"])
    parser.add_argument("--bits", type=int, help="of packed weights, in groups of 64; else bf16")
    parser.add_argument("--parts", nargs="*", default=["steps", "http"])
    parser.add_argument("--loads", nargs="*", default=LOADS)
    parser.add_argument(
        "--mlx-lm-loads", nargs="*", default=LOADS, help="what mlx-lm takes part in"
    )
    parser.add_argument(
        "--as-installed", action="store_true", help="mlx-lm without our settings for MLX's graphs"
    )
    parser.add_argument("--sides", nargs="*", default=["ours", "kept", "mlx-lm", "vllm"])
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/race"))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    left_out = {"vllm"} if options.vllm_python is None or options.bits else set()
    left_out |= set() if options.bits else {"kept"}
    options.sides = [side for side in options.sides if side not in left_out]
    for shape in options.shapes:
        name, bits = (f"{shape}-{options.bits}bit", [options.bits]) if options.bits else (shape, [])
        folder = written(shape, options.folder / name, *bits)
        if "steps" in options.parts:
            race_steps(shape, folder, options)
        if "http" in options.parts:
            race_http(shape, folder, options)


if __name__ == "__main__":
    main()
