"""Services: files that the system accepts, settings that survive the way, secrets kept."""

from __future__ import annotations

import json
import plistlib
import shlex
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from linux import needs_linux
from thorough import slow

from mlx_manager.configuration import BESIDES
from mlx_manager.mlx_server.services.keys import add_key
from mlx_manager.service import InvalidValue, Service, carried, environment_text, unit_word

UNIT = ("--kind", "systemd")
OPTIONS = (
    "--port",
    "9000",
    "--no-hf-cache",
    "--models-dir",
    "models",
    "--model-aliases",
    "a=b,c=d",
)


@pytest.fixture(autouse=True)
def _nobody_to_ask(environment: dict[str, str]) -> None:
    """Neither systemctl nor launchctl is found, which might have a service of the developer's."""
    environment["PATH"] = "/nowhere"


@pytest.fixture
def config(tmp_path: Path, environment: dict[str, str]) -> Path:
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    return tmp_path / "config"


def test_install_writes_a_unit_and_settings_for_their_owner_alone(
    run, config: Path, here: Path
) -> None:
    done = run("service", "install", *UNIT, "--no-start", *OPTIONS, MLX_SERVER_API_KEY="sesame")
    assert done.returncode == 0, done.stderr
    assert "systemctl --user enable" in done.stdout
    settings = config / "mlx-manager" / "service.env"
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    assert read_by_a_shell(settings) == {
        "MLX_SERVER_API_KEY": "sesame",
        "MLX_SERVER_HF_CACHE": "false",
        "MLX_SERVER_MODELS_DIR": str(Path.cwd() / "models"),
        "MLX_SERVER_MODEL_ALIASES": "a=b,c=d",
        "MLX_SERVER_PORT": "9000",
        "HF_HOME": str(config.parent / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    unit = config / "systemd" / "user" / "mlx-manager.service"
    assert f"EnvironmentFile={settings}" in unit.read_text()
    assert "sesame" not in unit.read_text()


RELATIVE = {
    "MLX_SERVER_API_KEYS_FILE": "keys.toml",
    "MLX_SERVER_AUDIT_LOG": "~/audit.db",
    "MLX_SERVER_AVAILABLE_MODELS": "./one, two/three,owner/four,~/five",
    "MLX_SERVER_BLAS": "lib/libblas.so",
    "MLX_SERVER_MODEL": "two/three",
    "MLX_SERVER_MODELS_DIR": "models",
    "MLX_SERVER_MODELS_FILE": "./models.toml",
    "MLX_SERVER_MODEL_ALIASES": "small=./one,gpt-*=two/three,large=owner/four",
    "MLX_SERVER_RESPONSE_STORE": "../answers.db",
    "HF_HOME": "hub",
    "HF_HUB_CACHE": "~/hub",
}
ABSOLUTE = {
    "MLX_SERVER_API_KEYS_FILE": "{here}/keys.toml",
    "MLX_SERVER_AUDIT_LOG": "{home}/audit.db",
    "MLX_SERVER_AVAILABLE_MODELS": "{here}/one,{here}/two/three,owner/four,{home}/five",
    "MLX_SERVER_BLAS": "{here}/lib/libblas.so",
    "MLX_SERVER_MODEL": "{here}/two/three",
    "MLX_SERVER_MODELS_DIR": "{here}/models",
    "MLX_SERVER_MODELS_FILE": "{here}/models.toml",
    "MLX_SERVER_MODEL_ALIASES": "small={here}/one,gpt-*={here}/two/three,large=owner/four",
    "MLX_SERVER_RESPONSE_STORE": "{here}/../answers.db",
    "HF_HOME": "{here}/hub",
    "HF_HUB_CACHE": "{home}/hub",
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the model `two/three`, and one named as the embedded model is."""
    folder = tmp_path / "here"
    for name in ("two/three", "mlx-manager/demo", "models"):
        (folder / name).mkdir(parents=True)
    (folder / "models.toml").write_text("")
    add_key(folder / "keys.toml", "alice", {})
    monkeypatch.chdir(folder)
    return folder


def installed(run, config: Path, *options: str, **variables: str) -> dict[str, str]:
    done = run("service", "install", *UNIT, "--no-start", *options, **variables)
    assert done.returncode == 0, done.stderr
    return read_by_a_shell(config / "mlx-manager" / "service.env")


def test_paths_mean_the_same_in_the_services_folder(run, config: Path, here: Path) -> None:
    told = installed(run, config, **RELATIVE)
    places = {"here": str(here), "home": str(config.parent)}
    assert {name: told[name] for name in ABSOLUTE} == {
        name: value.format(**places) for name, value in ABSOLUTE.items()
    }


def test_all_that_says_how_a_server_runs_is_carried() -> None:
    named = {*BESIDES, "MLX_MAX_MB_PER_BUFFER", "OTEL_TRACES_SAMPLER_ARG", "https_proxy"}
    others = {"NO_COLOR", "MLX_MANAGER_API_KEY", "PATH", "MLX_TEST_ALL", "SHELF_HOME"}
    assert carried(dict.fromkeys(named | others, "/1"), {}).keys() == named - others
    told = {"HF_TOKEN_PATH": "a", "MLX_PTX_CACHE_DIR": "~/b", "HF_HUB_OFFLINE": "c"}
    told["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE"] = "d"
    told["SSL_CERT_FILE"] = "e"
    assert carried(told, {}) == {
        "HF_TOKEN_PATH": str(Path("a").absolute()),
        "MLX_PTX_CACHE_DIR": str(Path("~/b").expanduser()),
        "HF_HUB_OFFLINE": "c",
        "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE": str(Path("d").absolute()),
        "SSL_CERT_FILE": str(Path("e").absolute()),
    }


def test_an_option_is_told_as_its_variable_is(run, config: Path, here: Path) -> None:
    variables = {k: v for k, v in RELATIVE.items() if k[:3] == "MLX" and k != "MLX_SERVER_BLAS"}
    options = {f"--{k[11:].lower().replace('_', '-')}": value for k, value in variables.items()}
    by_option = installed(run, config, *(word for pair in options.items() for word in pair))
    by_variable = installed(run, config, **variables)
    assert by_option == by_variable


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MLX_SERVER_MODEL", "mlx-community/Llama"),
        ("MLX_SERVER_MODEL", "mlx-manager/demo"),
        ("MLX_SERVER_AVAILABLE_MODELS", "mlx-community/Llama,mlx-manager/demo"),
        ("MLX_SERVER_MODEL_ALIASES", "two/three=mlx-community/Llama,./one=mlx-manager/demo"),
        ("MLX_SERVER_MODELS_DIR", "/"),
        ("MLX_SERVER_ADMIN_TOKEN", "~/two/three"),
        ("MLX_SERVER_BLAS", "off"),
        ("HF_TOKEN", "./one"),
    ],
)
def test_what_is_no_relative_path_stays_as_it_is(
    run, config: Path, here: Path, variable: str, value: str
) -> None:
    assert installed(run, config, **{variable: value})[variable] == value


def test_a_secret_is_not_shown(run, config: Path) -> None:
    done = run("service", "install", *UNIT, "--print", MLX_SERVER_API_KEY="sesame")
    assert "sesame" not in done.stdout + done.stderr
    assert 'MLX_SERVER_API_KEY="********"' in done.stdout
    assert not config.exists()


def test_status_and_uninstall_know_what_is_installed(run, config: Path) -> None:
    assert run("service", "status", *UNIT).returncode == 4
    assert run("service", "uninstall", *UNIT).returncode == 4
    run("service", "install", *UNIT, "--no-start")
    found = run("service", "status", *UNIT, "--json")
    assert json.loads(found.stdout)["installed"] is True
    assert found.returncode == 3
    assert run("service", "uninstall", *UNIT).returncode == 0
    assert not list(config.rglob("*.service"))
    assert not list(config.rglob("*.env"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--prot", "1"), 2, "--prot"),
        (("--port", "99999"), 2, "--port (MLX_SERVER_PORT)"),
        (("--run-as", "alice"), 2, "--system"),
        (("--kind", "cron"), 2, "systemd or launchd"),
        (("--model", "a\nb"), 2, "line break"),
        (("--host", "0.0.0.0"), 2, "without a key"),
        (("--models-file", "/nowhere.toml"), 2, "/nowhere.toml can't be read"),
        (("--models-dir", "/nowhere"), 2, "/nowhere: there is no such folder"),
        (("--api-keys-file", "/nowhere.toml"), 2, "no keys' file /nowhere.toml"),
    ],
)
def test_what_cannot_be_installed_says_why(
    run, config: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = run("service", "install", *arguments)
    assert done.returncode == code
    assert words in done.stderr
    assert not config.exists()


@needs_linux("systemd")
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
@pytest.mark.parametrize("user", [None, "root"])
def test_systemd_accepts_the_unit(tmp_path: Path, user: str | None) -> None:
    program = tmp_path / "with space 100%" / "serve"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "mlx-manager.service"
    unit.write_text(Service("systemd", user, (str(program), "$1"), 45, tmp_path).definition())
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(["--user"] if user is None else []), unit],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert checked.returncode == 0, checked.stderr
    assert "mlx-manager.service" not in checked.stderr


def test_launchd_gets_a_plist_whose_shell_reads_the_settings(run, config: Path) -> None:
    done = run("service", "install", "--kind", "launchd", "--no-start", "--model-aliases", 'a"$b=c')
    assert done.returncode == 0
    assert "launchctl bootstrap" in done.stdout
    plist = config.parent / "Library" / "LaunchAgents" / "mlx-manager.server.plist"
    described = plistlib.loads(plist.read_bytes())
    assert described["RunAtLoad"] is True
    shell, flag, script, settings = described["ProgramArguments"]
    before, _, _ = script.partition("exec")
    said = subprocess.run(
        [shell, flag, before + "env", settings], capture_output=True, text=True, check=True, env={}
    )
    assert 'MLX_SERVER_MODEL_ALIASES=a"$b=c' in said.stdout.splitlines()


@slow
def test_launchd_starts_no_server_again_whose_settings_are_wrong(
    run, program, tmp_path: Path, environment: dict[str, str]
) -> None:
    run("service", "install", "--kind", "launchd", "--no-start")
    plist = tmp_path / "Library" / "LaunchAgents" / "mlx-manager.server.plist"
    described = plistlib.loads(plist.read_bytes())
    assert described["KeepAlive"] == {"SuccessfulExit": False}
    assert described["ThrottleInterval"] == 60
    told = described["EnvironmentVariables"]
    for wrong in (("--max-rows", "0"), ("--models-dir", "/nowhere"), ("--host", "0.0.0.0")):
        ended = program("serve", "--port", "0", *wrong, **told)
        assert (ended.returncode, ended.stdout) == (0, "")
        assert "launchd does not start it again" in ended.stderr
    assert program("serve", "--port", "0", *wrong).returncode == 2
    assert program("serve", "--port", "0", "--model", "/nowhere", **told).returncode == 1


def test_commands_to_paste_hold_where_the_home_has_a_space(run, tmp_path: Path) -> None:
    home = tmp_path / "my home"
    done = run("service", "install", "--kind", "launchd", "--no-start", HOME=str(home))
    *_, definition = shlex.split(done.stdout.splitlines()[1])
    assert Path(definition) == home / "Library" / "LaunchAgents" / "mlx-manager.server.plist"
    (log,) = (line for line in done.stderr.splitlines() if line.startswith("Its log: "))
    *_, file = shlex.split(log)
    assert Path(file) == home / "Library" / "Logs" / "mlx-manager.log"


def read_by_a_shell(file: Path) -> dict[str, str]:
    said = subprocess.run(
        ["/bin/sh", "-c", f'set -a; . "{file}"; env -0'],
        capture_output=True,
        text=True,
        check=True,
        env={},
    )
    pairs = (line.partition("=") for line in said.stdout.split("\0") if line)
    return {name: value for name, _, value in pairs if name.startswith(("MLX", "HF"))}


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=30))
def test_every_value_is_read_back_as_it_was(value: str) -> None:
    comment, line, end = environment_text({"X": value}).split("\n")
    assert (comment[0], end) == ("#", "")
    assert unescaped(line.removeprefix('X="').removesuffix('"')) == value


def unescaped(text: str) -> str:
    """systemd's reading of a double-quoted value: src/basic/env-file.c, and POSIX's of one."""
    out, rest = "", iter(text)
    for character in rest:
        if character == "\\":
            following = next(rest)
            out += following if following in '"\\`$' else "\\" + following
        else:
            assert character not in '"`$'
            out += character
    return out


def test_a_line_break_is_refused() -> None:
    with pytest.raises(InvalidValue, match="X has a line break"):
        environment_text({"X": "a\nb"})


@pytest.mark.parametrize(
    ("word", "written"),
    [("serve", "serve"), ("/a b", '"/a b"'), ("50%", "50%%"), ("$x", "$$x"), ('"', '"\\""')],
)
def test_words_of_a_command_mean_themselves(word: str, written: str) -> None:
    assert unit_word(word) == written
