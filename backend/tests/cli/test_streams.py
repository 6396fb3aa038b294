"""Where the program reads and writes: closed, full, or not what it should be."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from linux import needs_linux
from thorough import slow

PROGRAM = [sys.executable, "-m", "mlx_manager.cli"]
SERVER = [sys.executable, "-m", "mlx_manager.mlx_server.main"]


@needs_linux("/dev/full")
def test_output_that_can_not_be_written_is_told(environment: dict[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "list", "--json"],
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "mlx-manager: The output can't be written: No space left on device.\n"


def test_letters_that_a_terminal_lacks_are_question_marks(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*PROGRAM, "doctor", "--port", "0"],
        env=environment | {"PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"? port" in done.stdout


@pytest.mark.parametrize(
    "command", [["doctor", "--port", "0"], pytest.param(["ps"], marks=slow)], ids=" ".join
)
def test_a_terminal_has_no_colours_where_none_are_wanted(
    environment: dict[str, str], command: list[str]
) -> None:
    for wanted in (True, False):
        child = pexpect.spawn(
            PROGRAM[0],
            [*PROGRAM[1:], *command],
            env=environment | ({} if wanted else {"NO_COLOR": "1"}),
            encoding="utf-8",
            timeout=60,
        )
        child.expect(pexpect.EOF)
        child.close()
        assert ("\x1b[3" in child.before) == wanted


@pytest.mark.parametrize("command", ["doctor --port 0", "ps", "list", "chat --once hi", "chat"])
def test_a_dumb_terminal_is_sent_no_escape_sequences(
    environment: dict[str, str], server: str, command: str
) -> None:
    own = {"TERM": "dumb", "MLX_MANAGER_URL": server, "MLX_SERVER_ADMIN_TOKEN": "open-sesame"}
    child = pexpect.spawn(
        PROGRAM[0],
        [*PROGRAM[1:], *command.split()],
        env=environment | own,
        encoding="utf-8",
        timeout=60,
    )
    shown = ""
    if command == "chat":
        for line in ("What can you do?", "/help", "/nothing", "/exit"):
            child.expect_exact("> ")
            shown += child.before
            child.send(f"{line}\r")
    child.expect(pexpect.EOF)
    shown += child.before
    child.close()
    assert shown.strip()
    assert "\x1b" not in shown


def test_a_question_is_asked_with_nothing_to_read_from(environment, server: str) -> None:
    command = f'"{sys.executable}" -m mlx_manager.cli chat --url {server} --once hi <&-'
    done = subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


ALL = "0<&- 1>&- 2"


@needs_linux("systemd's socket, whose path may be longer than 104 characters")
@pytest.mark.parametrize(
    ("closed", "program"),
    [
        pytest.param("1", [*PROGRAM, "serve"], marks=slow),
        pytest.param("2", [*PROGRAM, "serve"], marks=slow),
        pytest.param(ALL, [*PROGRAM, "serve"], marks=slow),
        # It is the same command, but has been imported before it can open anything.
        (ALL, SERVER),
    ],
)
def test_a_server_runs_with_nothing_to_write_to(
    environment, tmp_path: Path, closed: str, program: list[str]
) -> None:
    # It tells its manager that it is ready, which it can't say in print.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        process = subprocess.Popen(
            ["sh", "-c", f'exec "$@" {closed}>&-', "sh", *program, "--port", "0"],
            env=environment | {"NOTIFY_SOCKET": str(tmp_path / "notify")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            told = manager.recv(4096).decode()
        finally:
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert told.startswith("READY=1")
    assert process.returncode == 0, said


def test_what_is_piped_in_must_be_text(environment: dict[str, str], server: str) -> None:
    done = subprocess.run(
        [*PROGRAM, "chat", "--url", server],
        env=environment,
        input=b"\xff\xfe\x00",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"mlx-manager: What is piped in is no UTF-8 text")


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder that `without_rights` may not enter."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0)
    return folder


def without_rights(
    environment: dict[str, str], *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    if shutil.which("setpriv") is None:
        pytest.skip("root may read everything")
    rights = "-dac_override,-dac_read_search"
    return subprocess.run(
        ["setpriv", "--bounding-set", rights, *PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "use"),
    [("rm owner/model --yes", "used"), ("key add alice --file {}/keys.toml", "written")],
)
def test_a_folder_that_is_somebody_elses_is_named(
    environment: dict[str, str], closed: Path, command: str, use: str
) -> None:
    done = without_rights(environment, *command.format(closed).split(), HF_HOME=str(closed / "hf"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"mlx-manager: {closed}/")
    assert done.stderr.endswith(f"can't be {use}: Permission denied.\n")


def test_a_cache_that_is_somebody_elses_hides_no_other_model(
    environment: dict[str, str], closed: Path
) -> None:
    done = without_rights(environment, "list", HF_HOME=str(closed / "hf"))
    assert done.returncode == 0, done.stderr
    assert "mlx-manager/demo" in done.stdout
    assert done.stderr == f"models in {closed}/hf/hub are not offered: Permission denied\n"
    silent = without_rights(environment, "list", "--no-hf-cache", HF_HOME=str(closed / "hf"))
    assert silent.stdout == done.stdout
    assert silent.stderr == ""


def test_a_home_that_is_somebody_elses_leaves_the_embedded_model(
    environment: dict[str, str], closed: Path
) -> None:
    at_home = {name: value for name, value in environment.items() if name != "HF_HOME"}
    done = without_rights(at_home, "chat", "--once", "hi", HOME=str(closed / "home"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@slow
def test_doctor_says_that_the_cache_is_somebody_elses(
    environment: dict[str, str], closed: Path
) -> None:
    done = without_rights(environment, "doctor", "--port", "0", HF_HOME=str(closed / "hf"))
    assert done.returncode == 0, done.stderr
    assert f"{closed}/hf/hub: Permission denied" in done.stdout
    assert "move it with HF_HOME" in done.stdout
    done = without_rights(environment, "doctor", "--port", "0", MLX_SERVER_MODELS_DIR=str(closed))
    assert f"{closed}: Permission denied" in done.stdout
    assert "move it with MLX_SERVER_MODELS_DIR" in done.stdout


HOMELESS = """
import pwd

def nobody(uid):
    raise KeyError(uid)

pwd.getpwuid = nobody
from mlx_manager.cli import main
main()
"""


def without_home(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a container's user without a name, of whom nobody knows where their home is."""
    theirs = ("HOME", "HF_HOME", "USER", "LOGNAME", "LNAME", "USERNAME")
    nameless = {name: value for name, value in environment.items() if name not in theirs}
    return subprocess.run(
        [sys.executable, "-c", HOMELESS, *arguments],
        stdin=subprocess.DEVNULL,
        env=nameless,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "list --models-dir ~/m",
        "list --model ~/m",
        "key list",
        "key add alice",
        "service status",
        "service install --print",
    ],
)
def test_what_needs_an_unknown_home_says_so_in_a_line(
    environment: dict[str, str], command: str
) -> None:
    done = without_home(environment, *command.split())
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "set HOME" in done.stderr


def test_a_system_service_of_a_nameless_user_wants_a_name(environment: dict[str, str]) -> None:
    done = without_home(environment, "service", "install", "--system", "--print")
    assert done.returncode == 2, done.stderr
    assert "--run-as" in done.stderr


def test_doctor_says_that_the_home_is_unknown(environment: dict[str, str]) -> None:
    done = without_home(environment, "doctor", "--port", "0")
    assert done.returncode == 0, done.stderr
    assert "the home folder ~ is unknown" in done.stdout


def test_a_narrow_terminal_cuts_no_name_and_no_number(
    environment: dict[str, str], models_dir: Path
) -> None:
    child = pexpect.spawn(
        sys.executable,
        ["-m", "mlx_manager.cli", "list", "--models-dir", str(models_dir)],
        env=environment,
        encoding="utf-8",
        dimensions=(20, 30),
        timeout=60,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    for whole in ("mlx-manager/demo", "8,192", "embedded"):
        assert whole in child.before
