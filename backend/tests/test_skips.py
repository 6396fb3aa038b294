"""Tests that are skipped say why: in the summary at the end, and where they need Linux."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LINUX_ALONE = re.compile(r"""["'/{]/?proc/|/dev/full|AF_UNIX|"unshare"|ucontext|/sys/fs""")
SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="needs a GPU")
@pytest.mark.parametrize("n", range(3))
def test_on_a_gpu(n): pass

def test_with_npm(): pytest.skip("there is no npm here")

def test_that_runs(): pass
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_each_reason_is_said_once_with_its_number(tmp_path: Path, processes: str) -> None:
    shutil.copy(HERE / "conftest.py", tmp_path)
    shutil.copytree(HERE / "startup", tmp_path / "startup")
    (tmp_path / "test_some.py").write_text(SKIPPED)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", f"-n{processes}", "-c", "/dev/null", "test_some.py"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        check=False,
    )
    *_, heading, first, second, last = done.stdout.splitlines()
    assert "why tests were skipped" in heading
    assert [first.split(maxsplit=1), second.split(maxsplit=1)] == [
        ["3", "needs a GPU"],
        ["1", "there is no npm here"],
    ]
    assert last.startswith("1 passed, 4 skipped in ")


def test_what_only_linux_has_is_marked_where_it_is_used() -> None:
    """The emulation's sources are compiled by the fixture that is marked."""
    unmarked = [
        str(file.relative_to(HERE))
        for file in sorted(HERE.rglob("*.py"))
        if "node_modules" not in file.parts
        and file != Path(__file__)
        and LINUX_ALONE.search(file.read_text())
        and not re.search(r"needs_linux\(|skip_without_linux\(", file.read_text())
    ]
    assert unmarked == []


def test_a_mac_skips_them_with_reasons() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "tests/mlx_server/utils/test_notify.py"],
        cwd=HERE.parent,
        env={"MLX_TEST_SYSTEM": "darwin", "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "needs Linux: systemd's sockets" in done.stdout
    assert "passed" not in done.stdout
