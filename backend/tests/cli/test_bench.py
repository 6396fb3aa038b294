"""Load tests of real servers: counts that add up, figures that can be read, failures that show."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from other_server import OtherServer
from thorough import slow

from mlx_manager.bench.exchange import Outcome, read
from mlx_manager.bench.load import Measured
from mlx_manager.bench.plan import USUAL, Plan, TextLength
from mlx_manager.bench.report import report, spread
from mlx_manager.cli.bench import print_report
from mlx_manager.completion_stream import lines

LATENCIES = ("time_to_first_token_ms", "inter_token_ms", "per_output_token_ms", "end_to_end_ms")


def test_our_server_under_load(run, server: str) -> None:
    done = run("bench", "--url", server, "-c", "4", "-n", "12", "--output-tokens", "16", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert found["requests"] == {"completed": 12, "failed": 0}
    assert found["tokens"]["output"] == 12 * 16
    assert found["tokens"]["counted_by"] == "usage"
    assert found["tokens"]["cached"] == 0
    assert 0.8 * 128 <= found["tokens"]["prompt"] / 12 <= 1.2 * 128
    assert found["finish_reasons"] == {"length": 12}
    for name in LATENCIES:
        values = found[name]
        assert (
            0 <= values["p50"] <= values["p90"] <= values["p95"] <= values["p99"] <= values["max"]
        )
    assert found["end_to_end_ms"]["mean"] >= found["time_to_first_token_ms"]["mean"]


@slow
def test_prompts_have_the_length_where_as_many_words_would_be_too_long(run, server: str) -> None:
    wanted = ("--prompt-tokens", "6000", "--output-tokens", "1")
    done = run("bench", "--url", server, "-n", "1", "--warmup", "0", *wanted, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["errors"]
    assert 0.9 * 6000 <= found["tokens"]["prompt"] <= 1.1 * 6000


def test_a_person_reads_a_table(run, other: OtherServer) -> None:
    done = run("bench", "--url", other.url + "/v1", "-n", "3", "-c", "2", "--warmup", "0")
    assert done.returncode == 0
    assert "3 requests answered in" in done.stdout
    assert "time to first token" in done.stdout
    assert "prompts of 11 tokens, answers of 7" in done.stdout


def test_requests_arrive_at_a_rate(run, other: OtherServer) -> None:
    done = run("bench", "--url", other.url, "--rate", "50", "-n", "20", "--json")
    found = json.loads(done.stdout)
    assert found["requests"]["completed"] == 20
    assert found["load"]["rate"] == 50


def test_no_more_than_so_many_are_under_way_while_it_warms_up_either(
    run, other: OtherServer
) -> None:
    done = run("bench", "--url", other.url, "-c", "2", "-n", "4", "--warmup", "40")
    assert done.returncode == 0, done.stderr
    assert other.most <= 2


def test_nothing_is_waited_for_that_would_come_after_the_time(run, other: OtherServer) -> None:
    # The first would come after 37 s.
    done = run("bench", "--url", other.url, "--rate", "0.05", "--duration", "1", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["requests"] == {"completed": 0, "failed": 0}
    assert found["seconds"] < 30


def test_strict_servers_without_usage_are_measured_too(run, other: OtherServer) -> None:
    other.strict = True
    other.usage = False
    done = run("bench", "--url", other.url, "-n", "2", "--json", "--extra", '{"top_p": 0.5}')
    found = json.loads(done.stdout)
    assert found["requests"] == {"completed": 2, "failed": 0}
    assert found["tokens"]["counted_by"] == "chunks"
    assert found["tokens"]["output"] == 2 * 7
    assert found["load"]["extra"] == {"top_p": 0.5}
    assert {body.get("top_p") for body in other.bodies} == {0.5}


def test_failures_are_counted_and_end_with_1(run, server: str) -> None:
    done = run(
        "bench", "--url", server, "-n", "2", "--warmup", "0", "--prompt-tokens", "9000", "--json"
    )
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert found["requests"] == {"completed": 0, "failed": 2}
    assert all("context" in message for message in found["errors"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--url", "http://127.0.0.1:1"), 3, "No server answers"),
        (("--extra", "{"), 2, "--extra is not JSON"),
        (("--extra", "3"), 2, "JSON object"),
    ],
)
def test_what_cannot_start_says_why(run, arguments: tuple[str, ...], code: int, words: str) -> None:
    done = run("bench", *arguments)
    assert done.returncode == code
    assert words in done.stderr


def test_a_server_that_refuses_everything_is_not_measured(run, other: OtherServer) -> None:
    other.status = 503
    done = run("bench", "--url", other.url)
    assert done.returncode == 1
    assert "The first request" in done.stderr
    assert "503: no such luck" in done.stderr
    assert len(other.bodies) == 1


def test_the_load_goes_by_the_environments_proxy_too(run, other: OtherServer) -> None:
    done = run("bench", "--url", "http://there.invalid", "-n", "2", "--json", HTTP_PROXY=other.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["requests"] == {"completed": 2, "failed": 0}
    direct = run("bench", "--url", other.url, "-n", "2", HTTP_PROXY="http://127.0.0.1:1")
    assert direct.returncode == 0, direct.stderr


def test_a_proxy_whose_host_can_be_none_is_told(run) -> None:
    done = run("bench", "--url", "http://there.invalid", "-m", "m", ALL_PROXY="http://a..b:1")
    assert done.returncode == 3
    assert "The first request" in done.stderr


@pytest.mark.parametrize(("status", "code"), [(401, 5), (403, 5), (404, 4), (500, 1)])
def test_the_first_refusal_is_the_exit_code(
    run, other: OtherServer, status: int, code: int
) -> None:
    other.status = status
    done = run("bench", "--url", other.url, "--model", "m")
    assert done.returncode == code
    assert ("MLX_MANAGER_API_KEY" in done.stderr) == (status == 401)


def test_ctrl_c_reports_what_was_measured(other: OtherServer, environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_manager.cli", "bench", "--url", other.url, "--duration", "999"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(other.bodies) < 30:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "requests answered" in said


@given(st.lists(st.binary(max_size=12).filter(lambda piece: b"\r" not in piece)))
def test_lines_are_whole_wherever_pieces_are_cut(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    found = list(lines([(float(i), piece) for i, piece in enumerate(pieces)]))
    assert [line for _, line in found] == [
        line.decode(errors="replace")
        for line in content.removesuffix(b"\n").split(b"\n")
        if content
    ]
    assert [moment for moment, _ in found] == sorted(moment for moment, _ in found)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    outcome = read(0, 1, [(0.5, b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')])
    assert outcome.arrivals == (0.5,)
    assert "without a finish_reason" in outcome.error


def test_lengths_are_learnt_from_two_prompts() -> None:
    length = TextLength.measured((8, 20), (80, 128))
    assert length.words(128) == 80
    assert length.words(1) == 1
    assert TextLength.measured((8, 20), (80, 20)) == USUAL


def test_null_takes_a_field_away() -> None:
    plan = Plan(
        "u", "m", None, 1, None, 1, None, 8, 8, 0, 1, 0, {"max_tokens": None, "n_predict": 8}
    )
    body = plan.body(Random(0), 4, 8)
    assert "max_tokens" not in body
    assert body["n_predict"] == 8


@given(st.lists(st.floats(0, 100), min_size=1))
def test_percentiles_lie_between_the_extremes(seconds: list[float]) -> None:
    found = spread(seconds)
    assert found is not None
    assert min(seconds) * 1000 - 1e-6 <= found["p50"] <= found["p99"] <= found["max"]
    assert found["max"] == max(seconds) * 1000
    assert spread([]) is None


def test_a_server_can_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan("http://x", "m\x1b[2J", None, 1, None, 1, None, 1, 1, 0, 1.0, 0)
    refused = Outcome(500, 0.0, 1.0, error="500: no\x1b]0;mine\x07")
    print_report(report(Measured(plan, [refused], seconds=1.0)))
    shown = capsys.readouterr()
    assert "500: no" in shown.err
    assert not {"\x1b", "\x07"} & {*shown.out, *shown.err}
