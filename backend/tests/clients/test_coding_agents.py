"""Coding agents from npm take a turn with the embedded model: `make clients` gets them.

With everything they say by default their first prompt is 14 000 tokens (Claude Code) or 11 000
(Codex) here, and the model's context is 8 192: they are told to say less, by their own options.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest
from live import LiveServer

HERE = Path(__file__).parent
QUESTION = "How do I stop the server?"
ANSWER = "Press Ctrl-C in the terminal where the server runs."


def turn(agent: str, *arguments: str, home: Path, **environment: str) -> str:
    """What an agent that knows nothing but `environment` says in its one turn."""
    modules = HERE / "agents" / "node_modules"
    if not (modules / ".setup").exists():
        pytest.skip("the agents are not installed; `make clients` installs them, with npm")
    ended = subprocess.run(
        [str(modules / ".bin" / agent), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": str(home), **environment},
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended.stdout.strip()


def refusals(server: LiveServer) -> list[str]:
    told = httpx.get(f"{server.url}/metrics").text
    return re.findall(r'http_requests_total{handler="/v1/.*status="4.*', told)


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


def test_claude_code_takes_a_turn(server: LiveServer, tmp_path: Path):
    assert claude("--bare", server=server, home=tmp_path) == ANSWER


@pytest.mark.parametrize("options", [["--bare"], ["--tools", "Read"]], ids=["bare", "one tool"])
def test_claude_code_is_refused_nothing(options: list[str], server: LiveServer, tmp_path: Path):
    before = refusals(server)
    # With tools it tells of its environment after the question, and the model answers to that.
    assert claude(*options, server=server, home=tmp_path)
    # It asks again without what is refused.
    assert refusals(server) == before


def test_codex_takes_a_turn(server: LiveServer, tmp_path: Path):
    instructions = tmp_path / "instructions.md"
    instructions.write_text("You help.")
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(f"""
model = "gpt-local"
model_provider = "own"
model_instructions_file = "{instructions}"
web_search = "disabled"
include_permissions_instructions = false
include_environment_context = false
features = {{ skills = false, multi_agent = false, apps = false, plugins = false }}
model_providers.own = {{ name = "own", base_url = "{server.url}/v1", wire_api = "responses" }}
""")
    said = turn("codex", "exec", "--skip-git-repo-check", QUESTION, home=tmp_path)
    assert said == ANSWER
