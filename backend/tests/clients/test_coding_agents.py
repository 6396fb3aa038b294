"""Coding agents from npm take a turn with the embedded model: `make clients` gets them.

With everything they say by default their first prompt is 14 000 tokens (Claude Code) or 11 000
(Codex) here, and the model's context is 8 192: they are told to say less, by their own options.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from agent_program import turn
from live import LiveServer
from thorough import slow

HERE = Path(__file__).parent
QUESTION = "How do I stop the server?"
ANSWER = "Press Ctrl-C in the terminal where the server runs."


def refusals(server: LiveServer) -> list[str]:
    told = httpx.get(f"{server.url}/metrics").text
    found = re.findall(r'http_requests_total{handler="/v1/.*status="4.*', told)
    return [line for line in found if 'status="426"' not in line]


def claude(*options: str, server: LiveServer, home: Path) -> str:
    return turn(
        "claude",
        "--print",
        QUESTION,
        *options,
        home=home,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )


def test_claude_code_is_launched(server: LiveServer, tmp_path: Path):
    modules = HERE / "agents" / "node_modules" / ".bin"
    if not (modules / "claude").exists():
        pytest.skip("the agents are not installed; `make clients` installs them, with npm")
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "mlx_manager.cli", "launch", "claude", "--url", server.url),
            *("--", "--bare", "--print", QUESTION),
        ],
        env=os.environ | {"PATH": f"{modules}:{os.environ['PATH']}", "HOME": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stdout.strip() == ANSWER, ended.stderr


def test_claude_code_takes_a_turn(server: LiveServer, tmp_path: Path):
    assert claude("--bare", server=server, home=tmp_path) == ANSWER


@pytest.mark.parametrize("options", [["--bare"], ["--tools", "Read"]], ids=["bare", "one tool"])
def test_claude_code_is_refused_nothing(options: list[str], server: LiveServer, tmp_path: Path):
    before = refusals(server)
    # With tools it tells of its environment after the question, and the model answers to that.
    assert claude(*options, server=server, home=tmp_path)
    # It asks again without what is refused.
    assert refusals(server) == before


def codex(
    *arguments: str, server: LiveServer, home: Path, builtin: bool = True, **settings: object
) -> str:
    """Return what Codex says by its built-in provider or by one of ours.

    The built-in provider opens a WebSocket. Ours goes over HTTP.
    """
    (home / "instructions.md").write_text("You help.")
    (home / ".codex").mkdir(exist_ok=True)
    own = f'{{ name = "own", base_url = "{server.url}/v1", wire_api = "responses" }}'
    provider = f'model_provider = "own"\nmodel_providers.own = {own}'
    if builtin:
        provider = f'openai_base_url = "{server.url}/v1"'
    more = "\n".join(f"{name} = {value}" for name, value in settings.items())
    (home / ".codex" / "config.toml").write_text(f"""
model = "gpt-local"
{provider}
model_instructions_file = "{home / "instructions.md"}"
web_search = "disabled"
include_permissions_instructions = false
include_environment_context = false
features = {{ multi_agent = false, apps = false, plugins = false }}
{more}
""")
    options = ("--skip-git-repo-check", QUESTION)
    return turn("codex", "exec", *arguments, *options, home=home, OPENAI_API_KEY="none")


def answered(server: LiveServer, method: str) -> int:
    """Return how many requests to `/v1/responses` were answered well."""
    told = httpx.get(f"{server.url}/metrics").text
    pattern = (
        rf'http_requests_total{{handler="/v1/responses",method="{method}",status="[12]..?"}} (\d+)'
    )
    return sum(int(count) for count in re.findall(pattern, told))


def test_codex_takes_a_turn_by_a_provider_of_its_users(server: LiveServer, tmp_path: Path):
    refused, opened = refusals(server), answered(server, "GET")
    assert codex(server=server, home=tmp_path, builtin=False) == ANSWER
    assert refusals(server) == refused
    assert answered(server, "GET") == opened


@pytest.fixture(params=["own", "plain_server"], ids=["websocket", "http"])
def either(request: pytest.FixtureRequest) -> LiveServer:
    """One that serves WebSockets, and one that answers 426."""
    found: LiveServer = request.getfixturevalue(request.param)
    return found


def test_codex_holds_a_session_and_has_it_summed_up(either: LiveServer, tmp_path: Path):
    hold_a_session(either, tmp_path, turns=3)


@slow
def test_codex_holds_a_session_of_ten_turns(either: LiveServer, tmp_path: Path):
    hold_a_session(either, tmp_path, turns=10)


def hold_a_session(server: LiveServer, home: Path, *, turns: int) -> None:
    """Have Codex ask `turns` times, with a limit of tokens by which it has what was said summed up.

    Its built-in provider goes on over HTTP at once where a WebSocket is answered by 426.
    """
    before = refusals(server)
    posted = answered(server, "POST")
    for number in range(turns):
        # Its tools and instructions alone are more than the limit.
        said = codex(
            *(("resume", "--last") if number else ()),
            server=server,
            home=home,
            model_context_window=8192,
            model_auto_compact_token_limit=2900,
        )
        assert said == ANSWER
    assert refusals(server) == before
    assert answered(server, "POST") - posted >= turns
    sessions = [path.read_text() for path in (home / ".codex" / "sessions").rglob("*.jsonl")]
    assert any('"type":"compaction"' in session for session in sessions)
