"""For every test: nothing fails because a busy machine is slow or runs it in the background, and
collections cost little."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# `settings()` is the profile so far, which is another one where the variable CI is set.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# Logfire, which the tests' environment has, would be imported by pydantic in each of the processes
# that tests start: 0.3 s of two.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# Whoever is started in the background of a script ignores Ctrl-C, and so would the programs that
# tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported and collected stays to the end: to look through it again takes every
    full collection 0.1 s, a fifth of the run."""
    alike = [name for name, tests in Counter(i.nodeid for i in session.items).items() if tests > 1]
    # Of tests with one name only one would run where they are given out to several processes.
    assert not alike
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end why tests were skipped: each reason once, with the number of its tests."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("why tests were skipped", sep="-")
        for reason, tests in sorted(reasons.items(), key=lambda found: (-found[1], found[0])):
            terminalreporter.write_line(f"{tests:6}  {reason}")


@pytest.fixture(scope="session", autouse=True)
def _apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What keeps processes that run tests beside each other from their parent's terminal, whose
    size they inherit and a program would take for that of its own, and gives them one folder for
    temporary files, new in each run: of what MLX compiles there for a CPU each kernel is compiled
    once, and appears under its name when it is whole.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = tmp_path_factory.getbasetemp().parent / "together"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.delenv("COLUMNS", raising=False)
        patch.delenv("LINES", raising=False)
        patch.setenv("PYTHONPATH", str(_quicker_imports(folder)), prepend=os.pathsep)
        compiler = shutil.which("g++")
        if compiler is not None and sys.platform == "linux":
            patch.setenv("PATH", str(_quicker(Path(compiler), folder)), prepend=os.pathsep)
        yield


def _quicker_imports(folder: Path) -> Path:
    """Where the Pythons that tests start find what makes their imports quicker."""
    startup = folder / "startup"
    startup.mkdir(exist_ok=True)
    new = startup / f"new-{os.getpid()}"
    shutil.copyfile(Path(__file__).parent / "startup" / "sitecustomize.py", new)
    new.replace(startup / "sitecustomize.py")
    return startup


def _quicker(compiler: Path, folder: Path) -> Path:
    """Where there is a `g++` to which MLX's header, nine tenths of each kernel's compilation, is
    compiled already: by the first that needs it, while others do without."""
    include = Path(find_spec("mlx.core").origin).parent / "include"
    header = "mlx/backend/cpu/compiled_preamble.h"
    ready = folder / "headers" / f"{header}.gch"
    ready.parent.mkdir(parents=True, exist_ok=True)
    script = f"""#!/bin/sh
case "$*" in *" -I {include} "*)
    if mkdir "{folder}/begun" 2>/dev/null; then
        "{compiler}" -x c++-header -std=c++17 -O3 -Wall -fPIC -shared -I "{include}" \\
            "{include}/{header}" -o "{folder}/half" && mv "{folder}/half" "{ready}"
    fi
    exec "{compiler}" -I "{folder}/headers" "$@"
esac
exec "{compiler}" "$@"
"""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    new = programs / f"new-{os.getpid()}"
    new.write_text(script)
    new.chmod(0o755)
    new.replace(programs / "g++")
    return programs


@pytest.fixture
def mlx_limit() -> Iterator[int]:
    """MLX's limit, which it has again after the test."""
    import mlx.core as mx

    before = mx.get_memory_limit()
    yield before
    mx.set_memory_limit(before)
