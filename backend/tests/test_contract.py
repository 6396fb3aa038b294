"""The contract that the project began with: what others' scripts import and run, in `backend/`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from mlx_manager.mlx_server.api.v1 import v1_router
from mlx_manager.mlx_server.main import create_app

BACKEND = Path(__file__).parent.parent
SERVER = "mlx_manager/mlx_server/"

IMPORTS = [
    "from mlx_manager.mlx_server.main import app",
    "from mlx_manager.mlx_server.config import mlx_server_settings",
    "from mlx_manager.mlx_server.models.pool import ModelPoolManager, get_model_pool",
    "from mlx_manager.mlx_server.models.adapters import "
    "LlamaAdapter, detect_model_family, get_adapter",
    "from mlx_manager.mlx_server.services.inference import "
    "generate_chat_completion, generate_completion",
    "from mlx_manager.mlx_server.utils.memory import "
    "clear_cache, get_memory_usage, set_memory_limit",
    "from mlx_manager.mlx_server.schemas.openai import ChatCompletionRequest, "
    "ChatCompletionResponse, ChatCompletionChoice, ChatMessage, Usage",
    "from tests.mlx_server.test_inference import TestStopTokenDetection",
]


def run(*command: str) -> str:
    """Return what the command, which must succeed, prints in `backend/`.

    The command runs without what pytest and whoever runs the tests have put into the environment.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHONPATH", "PYTEST_"))
    }
    done = subprocess.run(
        command, check=False, cwd=BACKEND, env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def python(*arguments: str) -> str:
    return run(sys.executable, *arguments)


IMPORT_EACH = """
import sys

for line in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] in ("mlx_manager", "tests")]:
        del sys.modules[name]
    print(line)
    exec(line)
"""
"""Each as if it were the first of a process, since scripts import in any order; only what is
others', which takes seconds, is imported once."""


def test_what_scripts_import_is_there() -> None:
    assert python("-c", IMPORT_EACH, *IMPORTS).splitlines() == IMPORTS


def test_the_routers_routes_are_what_the_application_serves() -> None:
    printed = python(
        "-c",
        "from mlx_manager.mlx_server.api.v1 import v1_router; "
        "print([r.path for r in v1_router.routes])",
    )
    listed = set(ast.literal_eval(printed))
    assert listed == {route.path for route in v1_router.routes}
    app = create_app()
    client = TestClient(app)
    # No route takes it: 405 for a path that there is, 404 for any other.
    answers = {path: client.patch(path.replace(":path", "")).status_code for path in listed}
    assert answers == dict.fromkeys(listed, 405)
    # The owner's are another router's.
    documented = {
        path
        for path in app.openapi()["paths"]
        if path.startswith("/v1/") and not path.startswith(("/v1/admin", "/v1/audit"))
    }
    assert documented <= {path.replace(":path", "") for path in listed}


def test_no_path_is_listed_twice_for_a_method() -> None:
    asked = [(route.path, method) for route in v1_router.routes for method in route.methods]
    assert len(asked) == len(set(asked))


def test_pytest_finds_the_stop_token_tests_by_their_path() -> None:
    printed = python("-m", "pytest", "tests/mlx_server/test_inference.py", "-v")
    assert "TestStopTokenDetection::test_llama_stops_at_the_end_of_a_turn_too PASSED" in printed


def test_an_application_that_was_not_started_refuses_a_temperature_out_of_range() -> None:
    body = {
        "model": "mlx-manager/demo",
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 5.0,
    }
    answer = TestClient(create_app()).post("/v1/chat/completions", json=body)
    assert answer.status_code == 422
    assert "temperature" in answer.json()["error"]["message"]


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff_has_nothing_to_say(command: tuple[str, ...]) -> None:
    python("-m", "ruff", *command, SERVER)


def test_mypy_has_nothing_to_say() -> None:
    """A second after `make types`, whose cache it shares; ten without one."""
    python("-m", "mypy", SERVER)
