"""Coding agents show pictures to a model that sees: Claude Code in the result of its Read, Codex
beside the question. What the model would say is scripted; what it is shown is looked at."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from agent_program import turn
from pictures import picture
from scripted import ScriptedBackend, ScriptedPool, Step, says

from mlx_manager.mlx_server.api.http.listener import configuration
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import (
    Conversation,
    Finished,
    GenerationRequest,
    Message,
    Started,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from mlx_manager.mlx_server.main import create_app

SHOT = picture(size=(400, 300))
SAID = "It is a red picture."
MODEL = "mlx-manager/demo"


@dataclass
class Seeing:
    """A server whose model sees, and calls `tool` once where it is offered."""

    url: str
    pool: ScriptedPool

    @property
    def shown(self) -> list[Message]:
        """The messages with pictures of all prompts so far."""
        prompts = (request.prompt for request in self.pool.backend.requests)
        return [
            message
            for prompt in prompts
            if isinstance(prompt, Conversation)
            for message in prompt.messages
            if message.images
        ]


def calls(name: str, **arguments: str) -> list[Step]:
    return [
        [Started(3)],
        [ToolCallStarted(0, "toolu_1", name), ToolCallDelta(0, json.dumps(arguments))],
        [Finished("tool_calls", Usage(3, 1))],
    ]


@pytest.fixture
def seeing(tmp_path: Path) -> Iterator[Seeing]:
    (tmp_path / "shot.png").write_bytes(SHOT)

    def script(request: GenerationRequest) -> Iterable[Step]:
        prompt = request.prompt
        assert isinstance(prompt, Conversation)
        offered = any(tool.name == "Read" for tool in prompt.tools)
        read = any(message.role == "tool" for message in prompt.messages)
        if offered and not read:
            return calls("Read", file_path=str(tmp_path / "shot.png"))
        return says(SAID)

    pool = ScriptedPool(ScriptedBackend(script), seeing=True)
    pool.resolve = lambda model_id: MODEL  # type: ignore[method-assign]
    settings = MLXServerSettings()
    server = uvicorn.Server(configuration(create_app(settings, pool), settings))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=[[listening]])
    thread.start()
    try:
        yield Seeing(f"http://127.0.0.1:{listening.getsockname()[1]}", pool)
    finally:
        server.should_exit = True
        thread.join()


def test_claude_code_shows_the_picture_that_it_reads(seeing: Seeing, tmp_path: Path):
    said = turn(
        "claude",
        *("--print", "What is in shot.png?", "--tools", "Read", "--allowedTools", "Read"),
        home=tmp_path,
        ANTHROPIC_BASE_URL=seeing.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert SAID in said
    shown = seeing.shown[-1]
    assert shown.role == "tool"
    [image] = shown.images
    assert (image.width, image.height) == (400, 300)


def test_codex_shows_the_picture_beside_the_question(seeing: Seeing, tmp_path: Path):
    (tmp_path / ".codex").mkdir()
    own = f'{{ name = "own", base_url = "{seeing.url}/v1", wire_api = "responses" }}'
    (tmp_path / ".codex" / "config.toml").write_text(
        f'model = "gpt-local"\nmodel_provider = "own"\nmodel_providers.own = {own}\n'
    )
    said = turn(
        "codex",
        *("exec", "--skip-git-repo-check", "What is in the picture?", "-i", "shot.png"),
        home=tmp_path,
        OPENAI_API_KEY="none",
    )
    assert SAID in said
    [image] = seeing.shown[-1].images
    assert (image.width, image.height) == (400, 300)
