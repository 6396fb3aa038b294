from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from here import start_here
from live import PROGRAM
from scripted import MODEL, ScriptedBackend, ScriptedPool, says
from tiny_models import make_tiny_model

from mlx_manager.mlx_server import main
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.errors import ServerNotReady
from mlx_manager.mlx_server.text.grammar import matchers as grammar

OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1", "MLX_SERVER_HF_CACHE": "false"}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, env=OFFLINE, timeout=120, check=False
    )


def test_the_modules_app_is_made_once_and_only_when_asked_for():
    assert isinstance(main.app, FastAPI)
    assert main.app is main.app
    with pytest.raises(AttributeError):
        _ = main.nothing


def test_importing_main_does_not_import_mlx():
    code = "import sys, mlx_manager.mlx_server.main; print([m for m in sys.modules if 'mlx.' in m])"
    assert run(sys.executable, "-c", code).stdout.strip() == "[]"


def test_the_module_is_the_command_serve_with_its_options_and_its_complaints():
    program = (sys.executable, "-m", "mlx_manager.mlx_server.main")
    wrong, unknown = run(*program, "--max-rows", "0"), run(*program, "--rows", "1")
    assert (wrong.returncode, unknown.returncode) == (2, 2)
    assert wrong.stderr.startswith("mlx-manager: --max-rows (MLX_SERVER_MAX_ROWS) should be")
    assert "No such option: --rows" in unknown.stderr


def test_the_greeting_has_a_line_to_paste():
    text = main.greeting("http://127.0.0.1:8000", [f"m{number}" for number in range(7)])
    assert "http://127.0.0.1:8000/v1" in text
    assert "m0, m1, m2, m3, m4 and 2 more" in text
    [line] = [line for line in text.splitlines() if "curl" in line]
    assert "-H 'Content-Type: application/json' -d '{\"messages\"" in line


def test_the_greeting_shows_where_the_key_goes():
    assert "Bearer $KEY" in main.greeting("http://127.0.0.1:8000", [], need_key=True)
    assert "Bearer" not in main.greeting("http://127.0.0.1:8000", [])
    assert "/v1/embeddings" in main.greeting("http://127.0.0.1:8000", ["m"], "embedding")


def test_what_looks_like_a_typing_error_in_the_settings_is_told_of_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLX_SERVER_MAX_ROW", "4")
    monkeypatch.setenv("MLX_SERVER_BLAS", "off")
    main.create_app(MLXServerSettings(available_models=(f"{tmp_path}/nowhere",)))
    assert caplog.messages == [
        "MLX_SERVER_MAX_ROW is no setting",
        f"MLX_SERVER_AVAILABLE_MODELS: {tmp_path}/nowhere is no folder",
    ]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere", "there is no such folder"), ("file", "it is a file, not a folder")],
)
def test_a_folder_of_models_that_is_not_there_ends_the_start(
    tmp_path: Path, name: str, reason: str
):
    (tmp_path / "file").touch()
    ended = run(str(PROGRAM), "serve", "--models-dir", str(tmp_path / name), "--port", "0")
    assert ended.returncode == 2
    said = f"mlx-manager: --models-dir (MLX_SERVER_MODELS_DIR) {tmp_path / name}: {reason}.\n"
    assert ended.stderr == said
    assert ended.stdout == ""


def test_without_a_key_the_program_listens_to_this_machine_alone():
    ended = run(str(PROGRAM), "serve", "--host", "0.0.0.0", "--port", "0")
    assert ended.returncode == 2
    assert "MLX_SERVER_API_KEY" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_default_model_that_cant_be_loaded_ends_the_program_with_the_reason(tmp_path: Path):
    ended = run(str(PROGRAM), "serve", "--port", "0", "--model", str(tmp_path / "nothing"))
    assert ended.returncode == 1
    assert "nothing" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "is ready" not in ended.stdout


def test_a_file_of_settings_that_is_wrong_ends_the_program_as_a_wrong_option_does(tmp_path: Path):
    (tmp_path / "models.toml").write_text("models = [")
    ended = run(str(PROGRAM), "serve", "--models-file", str(tmp_path / "models.toml"))
    assert ended.returncode == 2
    assert "models.toml is not TOML" in ended.stderr


def test_a_port_that_is_taken_ends_the_program_with_the_reason():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run(str(PROGRAM), "serve", "--port", str(port))
    assert ended.returncode == 1
    assert f"port {port}: another program listens there" in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_a_start_that_breaks_is_told_instead_of_waited_for():
    class BrokenPool(ScriptedPool):
        def lease(self, model_id: str):
            raise ZeroDivisionError("nobody foresaw this")

    app = main.create_app(MLXServerSettings(), BrokenPool(ScriptedBackend(lambda _: says("x"))))
    async with app.router.lifespan_context(app):
        async with asyncio.timeout(60):
            await app.state.server.started.wait()
        assert "nobody foresaw this" in app.state.server.failure.message


async def test_settings_that_are_to_be_read_again_during_the_start_are_read_after_it(caplog):
    class Pool(ScriptedPool):
        async def reload(self) -> None:
            assert app.state.server.started.is_set()

    caplog.set_level("INFO")
    app = main.create_app(MLXServerSettings(), Pool(ScriptedBackend(lambda _: says("x"))))
    reading = asyncio.create_task(main.reread_settings(app.state.server))
    await asyncio.sleep(0)
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        await reading
    assert "settings have been read again" in caplog.text


async def test_the_default_model_is_loaded_at_start_and_given_back():
    pool = ScriptedPool(ScriptedBackend(lambda _: says("x")))
    app = main.create_app(MLXServerSettings(model=MODEL), pool)
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        assert app.state.server.failure is None
        assert pool.leases == 0


async def test_what_answers_in_json_need_is_there_before_the_first_call(monkeypatch):
    made: list[object] = []
    vocabulary = grammar.vocabulary

    def noting(*arguments):
        made.append(server.refusal())
        return vocabulary(*arguments)

    monkeypatch.setattr(grammar, "vocabulary", noting)
    app = main.create_app(MLXServerSettings(hf_cache=False), start=start_here)
    server = app.state.server
    async with app.router.lifespan_context(app):
        await server.started.wait()
        assert len(made) == 1
        assert isinstance(made[0], ServerNotReady)


async def test_a_model_whose_answers_can_t_be_constrained_is_served(tmp_path: Path):
    model = make_tiny_model(tmp_path / "plain")
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": None}))
    settings = MLXServerSettings(model=str(model), hf_cache=False)
    app = main.create_app(settings, start=start_here)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        await app.state.server.started.wait()
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        free = await client.post("/v1/chat/completions", json=asked)
        assert free.status_code == 200
        asked["response_format"] = {"type": "json_object"}
        held = await client.post("/v1/chat/completions", json=asked)
        assert held.status_code == 400
        assert held.json()["error"]["param"] == "response_format"
