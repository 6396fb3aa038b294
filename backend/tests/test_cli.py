"""The command line: options are read, bad values are named, commands say what is in the way."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlx_manager import __version__
from mlx_manager.cli import app
from mlx_manager.cli.server.service import serve_options
from mlx_manager.mlx_server.config import EMBEDDED, MLXServerSettings

run = CliRunner()


def test_an_option_shows_its_default_and_the_values_that_it_takes() -> None:
    shown = " ".join(run.invoke(app, ["serve", "--help"]).output.split())
    assert "--max-rows N Sequences decoded together, per model [128]" in shown
    assert "--memory-limit-gb SIZE Memory for weights" in shown
    assert "--no-prefix-cache Reuse the KV pages of prompts that begin alike [on]" in shown
    assert "--log-format pretty|json Lines for people, or one JSON object a line [pretty]" in shown


def test_the_command_line_reads_every_type_of_setting() -> None:
    given = serve_options(
        [
            *("--port", "0", "--timeout-seconds", "1.5", "--memory-limit-gb", "512MB"),
            *("--validation-status", "400", "--no-prefix-cache", "--open-metrics"),
            *("--cors-origins", "http://a,http://b", "--models-dir", "x", "--api-key", "secret"),
        ]
    )
    settings = MLXServerSettings(**given)
    assert (settings.port, settings.timeout_seconds, settings.memory_limit_gb) == (0, 1.5, 0.5)
    assert settings.validation_status == 400
    assert (settings.prefix_cache, settings.open_metrics, settings.hf_cache) == (False, True, True)
    assert settings.cors_origins == ("http://a", "http://b")
    assert settings.models_dir == Path("x")
    assert settings.access.key == "secret"


def test_the_version_is_printed() -> None:
    assert run.invoke(app, ["--version"]).output == f"mlx-manager {__version__}\n"


def test_a_value_out_of_range_is_a_usage_error_that_names_option_and_variable() -> None:
    result = run.invoke(app, ["serve", "--port", "99999"])
    assert result.exit_code == 2
    assert "--port (MLX_SERVER_PORT) should be less than or equal to 65535" in result.output


def test_a_key_that_nobody_could_bring_is_a_usage_error() -> None:
    result = run.invoke(app, ["serve"], env={"MLX_SERVER_API_KEY": ""})
    assert result.exit_code == 2
    assert "--api-key (MLX_SERVER_API_KEY) should have at least 1 character, not 0" in result.output


def test_a_wrong_variable_is_named_too() -> None:
    result = run.invoke(app, ["serve"], env={"MLX_SERVER_WEIGHTS": "int3"})
    assert result.exit_code == 2
    assert "MLX_SERVER_WEIGHTS" in result.output
    assert "dequantize" in result.output


@pytest.mark.parametrize(
    "option",
    [
        *("--memory-limit-gb", "--max-body-mb", "--max-headers-kb", "--response-store-mb"),
        "--audit-log-mb",
    ],
)
@pytest.mark.parametrize("value", ["1e300", "17179869184"])
def test_a_size_that_no_machine_has_is_a_usage_error(option: str, value: str) -> None:
    result = run.invoke(app, ["serve", option, value])
    assert result.exit_code == 2, result.output
    assert option in result.output
    assert "should be less than or equal to 1048576" in result.output


def test_answers_and_calls_are_not_kept_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kept.db")
    result = run.invoke(
        app, ["serve", "--response-store", f"{tmp_path}/kept.db", "--audit-log", f"{tmp_path}/link"]
    )
    assert result.exit_code == 2, result.output
    assert "--audit-log (MLX_SERVER_AUDIT_LOG): must be another file than" in result.output


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize("host", ["a..b", "a" * 64, ".", "[a..b]", "[]"])
def test_a_host_that_can_be_none_is_a_usage_error(command: str, host: str) -> None:
    result = run.invoke(app, [command, "--host", host])
    assert result.exit_code == 2, result.output
    assert "--host (MLX_SERVER_HOST): " in result.output
    assert "is no address, nor the name of a host" in result.output


@pytest.mark.parametrize("option", ["--host", "--model"])
def test_a_setting_that_says_nothing_is_a_usage_error(option: str) -> None:
    result = run.invoke(app, ["serve", option, ""])
    assert result.exit_code == 2, result.output
    assert f"{option} (MLX_SERVER_{option[2:].upper()}) should have at least 1" in result.output


def test_an_address_may_be_in_brackets() -> None:
    result = run.invoke(app, ["doctor", "--host", "[127.0.0.1]", "--port", "0"])
    assert result.exit_code == 0, result.output
    assert "127.0.0.1:0 is free" in result.output


@pytest.mark.parametrize(
    "option",
    [
        *("--models-dir", "--models-file", "--api-keys-file", "--response-store", "--audit-log"),
        *("--model", "--available-models"),
    ],
)
def test_a_home_that_nobody_has_is_a_usage_error(option: str) -> None:
    result = run.invoke(app, ["serve", option, "~nobody-here/x"])
    assert result.exit_code == 2, result.output
    variable = f"MLX_SERVER_{option.strip('-').replace('-', '_').upper()}"
    assert f"{option} ({variable}): the home folder ~nobody-here is unknown" in result.output


def test_a_keys_file_in_a_home_that_nobody_has_is_a_usage_error() -> None:
    result = run.invoke(app, ["key", "list", "--file", "~nobody-here/x"])
    assert result.exit_code == 2, result.output
    assert "the home folder ~nobody-here is unknown" in result.output


ENGINE = ["mlx", "mlx_lm", "transformers", "fastapi"]


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (
            ["serve", "--help"],
            [
                *ENGINE,
                "pydantic_settings",
                "rich",
                "httpx",
                "asyncio",
                "aiohttp",
                "huggingface_hub",
            ],
        ),
        (["list"], ENGINE),
    ],
    ids=["help", "list"],
)
def test_what_answers_at_once_imports_no_engine(command: list[str], heavy: list[str]) -> None:
    program = (
        f"import sys; from mlx_manager.cli import app; app({command}, standalone_mode=False);"
        f"found = {{*{heavy}, 'prompt_toolkit'}} & set(sys.modules);"
        "sys.exit(str(found) if found else 0)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr


def test_doctor_is_content_with_this_machine() -> None:
    result = run.invoke(app, ["doctor", "--port", "0", "--json"])
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert {
        "python",
        "mlx",
        "device",
        "memory",
        "blas",
        "kernels",
        "sampling",
        "pictures",
        "disk",
        "port",
    } <= findings.keys()


def test_doctor_says_which_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run.invoke(app, ["doctor", "--port", str(port)])
    assert result.exit_code == 1
    assert f"127.0.0.1:{port}" in result.output
    assert "Address already in use" in result.output


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["--host", "0.0.0.0"], {}, "without a key"),
        ([], {"MLX_SERVER_API_KEYS_FILE": "/nowhere.toml"}, "no keys' file /nowhere.toml"),
        ([], {"MLX_SERVER_MODELS_FILE": "/nowhere.toml"}, "/nowhere.toml can't be read"),
    ],
)
def test_doctor_says_what_serve_would_refuse(arguments, environment, words: str) -> None:
    given = [*arguments, "--port", "0"]
    result = run.invoke(app, ["doctor", *given], env=environment)
    assert result.exit_code == 1
    assert words in result.output
    refused = subprocess.run(
        [sys.executable, "-m", "mlx_manager.cli", "serve", *given],
        env=os.environ | environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert refused.returncode == 2
    assert words in refused.stderr


@pytest.mark.parametrize("variable", ["MLX_SERVER_RESPONSE_STORE", "MLX_SERVER_AUDIT_LOG"])
def test_doctor_says_which_files_can_not_be_kept(variable: str, tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("Dear Sir or Madam, " * 99)
    for file in ("letter", "nowhere/file", "."):
        told = {variable: str(tmp_path / file)}
        result = run.invoke(app, ["doctor", "--port", "0"], env=told)
        assert result.exit_code == 1, file
        assert f"{variable}: {tmp_path / file} can't be used" in result.output
    result = run.invoke(app, ["doctor", "--port", "0"], env={variable: str(tmp_path / "new")})
    assert result.exit_code == 0
    assert not (tmp_path / "new").exists()


def test_doctor_says_that_the_default_model_can_not_be_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phlogiston"}')
    for folder, words in ((tmp_path, "'phlogiston'"), (tmp_path / "nowhere", "is not a folder")):
        told = {"MLX_SERVER_MODEL": str(folder)}
        result = run.invoke(app, ["doctor", "--port", "0"], env=told)
        assert result.exit_code == 1
        assert f"{folder} can't be served" in result.output
        assert words in result.output
    told = {"MLX_SERVER_MODEL": "nobody/has-it", "HF_HUB_CACHE": str(tmp_path)}
    result = run.invoke(app, ["doctor", "--port", "0"], env=told)
    assert result.exit_code == 0
    assert "nobody/has-it is not here yet" in result.output


def test_doctor_says_that_the_default_model_takes_more_memory_than_there_may_be() -> None:
    told = {"MLX_SERVER_MEMORY_LIMIT_GB": "0.001"}
    result = run.invoke(app, ["doctor", "--port", "0"], env=told)
    assert result.exit_code == 1
    assert "models and KV pages may take 0.0 GiB" in result.output
    assert "the memory limit is 1.02 MB (MLX_SERVER_MEMORY_LIMIT_GB)" in result.output


def test_doctor_names_variables_that_are_no_settings() -> None:
    result = run.invoke(app, ["doctor", "--port", "0"], env={"MLX_SERVER_PROT": "1"})
    assert "MLX_SERVER_PROT is no setting" in result.output


def test_list_shows_the_embedded_model_and_those_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama"}')
    result = run.invoke(app, ["list", "--models-dir", str(tmp_path), "--no-hf-cache", "--json"])
    models = {model["id"]: model["origin"] for model in json.loads(result.stdout)}
    assert models == {**dict.fromkeys(EMBEDDED, "embedded"), "mine": "models_dir"}


def test_list_says_what_looks_like_a_typing_error(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    environment = {"MLX_SERVER_MODEL_DIR": "x"}
    given = ["--available-models", f"{nowhere}/one,owner/two"]
    result = run.invoke(app, ["list", *given, "--json"], env=environment)
    assert result.exit_code == 0
    assert json.loads(result.stdout)
    assert "MLX_SERVER_MODEL_DIR is no setting\n" in result.stderr
    assert f"MLX_SERVER_AVAILABLE_MODELS: {nowhere}/one is no folder\n" in result.stderr
    assert "two" not in result.stderr


def test_list_needs_the_folder_of_models(tmp_path: Path) -> None:
    result = run.invoke(app, ["list", "--models-dir", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert f"{tmp_path}/nowhere: there is no such folder" in result.stderr


def test_list_says_what_has_to_be_downloaded() -> None:
    result = run.invoke(app, ["list", "--model", "someone/something", "--no-hf-cache"])
    assert "not downloaded" in result.output


def test_a_key_is_made_printed_once_and_removed(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")
    made = run.invoke(app, ["key", "add", "alice", "--file", file, "--max-concurrent", "4"])
    assert made.exit_code == 0
    assert re.fullmatch(r"sk-mlx-\S{43}\n", made.stdout)
    listed = run.invoke(app, ["key", "list", "--file", file, "--json"])
    [key] = json.loads(listed.stdout)
    assert (key["name"], key["max_concurrent"]) == ("alice", 4)
    assert (
        made.stdout.strip()
        not in listed.stdout + run.invoke(app, ["key", "list", "--file", file]).stdout
    )
    assert run.invoke(app, ["key", "add", "alice", "--file", file]).exit_code == 1
    assert run.invoke(app, ["key", "rm", "bob", "--file", file]).exit_code == 4
    assert run.invoke(app, ["key", "rm", "alice", "--file", file]).exit_code == 0
    assert json.loads(run.invoke(app, ["key", "list", "--file", file, "--json"]).stdout) == []


def test_a_key_whose_prefixes_are_its_own_is_listed_so(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")
    for name, options in (("alice", ["--own-prefixes"]), ("bob", [])):
        run.invoke(app, ["key", "add", name, "--file", file, *options])
    listed = run.invoke(app, ["key", "list", "--file", file])
    alice, bob = (line for line in listed.stdout.splitlines() if "20" in line)
    assert alice.split()[-1] == "own"
    assert "own" not in bob
    found = json.loads(run.invoke(app, ["key", "list", "--file", file, "--json"]).stdout)
    assert [key["own_prefixes"] for key in found] == [True, None]


def test_a_name_that_no_key_can_have_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    result = run.invoke(app, ["key", "add", "two words", "--file", str(file)])
    assert result.exit_code == 2
    assert "'two words' can't be a key's name, which is a letter or digit, and" in result.output
    assert not file.exists()


def test_the_keys_file_of_the_environment_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    environment = {"MLX_SERVER_API_KEYS_FILE": str(file)}
    assert run.invoke(app, ["key", "add", "alice"], env=environment).exit_code == 0
    assert "alice" in file.read_text()


def test_a_key_that_no_server_takes_beside_the_environments_is_told(tmp_path: Path) -> None:
    added = ["key", "add", "default", "--file", str(tmp_path / "keys.toml")]
    result = run.invoke(app, added, env={"MLX_SERVER_API_KEY": "secret"})
    assert result.exit_code == 0
    assert "MLX_SERVER_API_KEY is named 'default', too" in result.stderr
