from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlx_manager import configuration
from mlx_manager.mlx_server.config import PATHS, MLXServerSettings


def test_every_setting_is_in_it_once() -> None:
    page = configuration.page()
    for name in MLXServerSettings.model_fields:
        assert page.count(f"| `MLX_SERVER_{name.upper()}` |") == 1


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("PORT", "a whole number from 0 to 65535"),
        ("MAX_ROWS", "a whole number, 1 or more"),
        ("MEMORY_LIMIT_GB", "a number over 0, 1048576 at most"),
        ("LOG_FORMAT", "`pretty`, `json`"),
        ("PREFIX_CACHE", "`true`, `false`"),
        ("MODELS_DIR", "a path"),
        ("API_KEY", "a secret"),
        ("OTLP_ENDPOINT", "a URL"),
        ("CORS_ORIGINS", "a list"),
        ("HOST", "text"),
    ],
)
def test_what_a_setting_takes_is_said_in_words(name: str, values: str) -> None:
    [row] = [line for line in configuration.page().splitlines() if f"MLX_SERVER_{name}`" in line]
    assert row.split(" | ")[2] == values


@pytest.mark.parametrize(
    "name",
    [
        "max_body_mb",
        "max_headers_kb",
        "memory_limit_gb",
        "drain_seconds",
        "response_store_mb",
        "audit_log_mb",
    ],
)
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_what_must_have_an_end_has_one(name: str, value: str) -> None:
    with pytest.raises(ValidationError, match="finite"):
        MLXServerSettings(**{name: value})


@pytest.mark.parametrize("name", PATHS)
def test_a_path_is_not_empty(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MLX_SERVER_{name.upper()}", "")
    with pytest.raises(ValidationError, match="may not be empty"):
        MLXServerSettings()


@pytest.mark.parametrize("name", ["api_key", "admin_token"])
def test_secrets_are_what_a_header_can_bring(name: str) -> None:
    settings = MLXServerSettings(**{name: " hunter-two\n"})
    assert getattr(settings, name).get_secret_value() == "hunter-two"
    for wrong in ("hunter\ntwo is long", "schlüssel"):
        with pytest.raises(ValidationError, match="ASCII") as caught:
            MLXServerSettings(**{name: wrong})
        assert wrong not in str(caught.value)
