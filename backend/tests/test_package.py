"""Published package: a wheel that, installed, has all that the program needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from mlx_manager import __version__

BACKEND = Path(__file__).parent.parent
LICENCE = BACKEND.parent / "LICENSE"
NAME = "mlx_manager_server"


def build(folder: Path, target: str, out: Path) -> Path:
    """The one file that hatchling makes of the project in `folder`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(BACKEND, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made of the sdist, as the release makes it."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Python 3.11.2, which Debian 12 has, takes no `filter`.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(unpacked)
    (folder,) = unpacked.iterdir()
    return build(folder, "wheel", tmp_path_factory.mktemp("wheel"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_bytes(archive.read(f"{NAME}-{__version__}.dist-info/METADATA"))


def test_the_distribution_has_a_name_that_is_ours(wheel: Path) -> None:
    found = metadata(wheel)
    assert (found["Name"], found["Version"]) == ("mlx-manager-server", __version__)


def test_the_builds_of_mlx_are_extras(wheel: Path) -> None:
    extras = set(metadata(wheel).get_all("Provides-Extra", []))
    assert {"cpu", "cuda12", "cuda13", "otel", "logfire", "vision"} <= extras


def test_the_licence_is_within(sdist: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.read(f"{NAME}-{__version__}.dist-info/licenses/LICENSE")
    assert inside == LICENCE.read_bytes()
    assert metadata(wheel)["License-Expression"] == "MIT"


def test_every_file_of_the_package_is_within(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    there = {
        path.relative_to(BACKEND).as_posix()
        for path in (BACKEND / "mlx_manager").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert inside == there


def test_what_the_wheel_installs_can_serve(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    install = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", *install, "--target", str(place), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    done = subprocess.run(
        [str(place / "bin" / "mlx-manager"), "doctor", "--port", "0", "--json"],
        env={**os.environ, "PYTHONPATH": str(place)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    findings = {finding["name"]: finding["value"] for finding in json.loads(done.stdout)}
    assert str(place) in findings["model"]
