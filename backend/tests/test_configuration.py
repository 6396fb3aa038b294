from __future__ import annotations

import pytest
from pydantic import ValidationError

from mlx_manager import configuration
from mlx_manager.mlx_server.config import PATHS, MLXServerSettings


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


@pytest.mark.parametrize(
    ("setting", "given", "value"),
    [
        ("memory_limit_gb", "8", 8),
        ("memory_limit_gb", "8GB", 8),
        ("memory_limit_gb", "8 GiB", 8),
        ("memory_limit_gb", "8192mb", 8),
        ("memory_limit_gb", "0.5 TB", 512),
        ("max_body_mb", "64M", 64),
        ("max_body_mb", "512kB", 0.5),
        ("max_headers_kb", "1MB", 1024),
        ("response_store_mb", ".5g", 512),
        ("audit_log_mb", 2, 2),
    ],
)
def test_a_size_may_have_a_unit(
    setting: str, given: object, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(MLXServerSettings(**{setting: given}), setting) == value
    monkeypatch.setenv(f"MLX_SERVER_{setting.upper()}", str(given))
    assert getattr(MLXServerSettings(), setting) == value


@pytest.mark.parametrize("given", ["8 apples", "GB", "8XB", "-1GB", "0GB", "9999999TB", "1e3GB"])
def test_what_is_no_size_is_refused(given: str) -> None:
    with pytest.raises(ValidationError):
        MLXServerSettings(memory_limit_gb=given)
