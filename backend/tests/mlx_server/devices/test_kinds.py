"""Checks of kernels at a load: which kernels serve, and which checks are not run again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_manager.mlx_server.devices.kept import Kept
from mlx_manager.mlx_server.devices.kernel import Unsupported
from mlx_manager.mlx_server.devices.kinds import Checks, KernelKind, alone, sources_digest


@dataclass
class Kernels:
    """Kernels whose check gives `wrong`, or raises it; counts how often they were checked."""

    wrong: str | Exception | None = None
    runs: list[int] = field(default_factory=list)

    def check(self, of: int) -> str | None:
        self.runs.append(of)
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong


def kind(*kernels: Kernels) -> KernelKind[int, Kernels]:
    return KernelKind("squares", lambda _: list(kernels), Kernels.check)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "checks"


def checks(folder: Path, machine: str = "one") -> Checks:
    """Return the checks of another process."""
    return Checks(Kept(folder), lambda: machine)


def test_a_check_that_was_passed_is_not_run_again(folder) -> None:
    right = Kernels()
    for _ in range(3):
        assert kind(right).serving(8, checks(folder)) is right
    assert right.runs == [8]


def test_another_shape_or_machine_or_kind_is_checked(folder) -> None:
    right = Kernels()
    kind(right).serving(8, checks(folder))
    kind(right).serving(16, checks(folder))
    kind(right).serving(8, checks(folder, "two"))
    KernelKind("cubes", kind(right).build, Kernels.check).serving(8, checks(folder))
    assert right.runs == [8, 16, 8, 8]


def test_a_check_that_failed_is_run_again(folder) -> None:
    wrong = Kernels("off by 1")
    for _ in range(2):
        assert kind(wrong).serving(8, checks(folder)) == Unsupported("off by 1")
    assert wrong.runs == [8, 8]
    wrong.wrong = None
    assert kind(wrong).serving(8, checks(folder)) is wrong


def test_a_kernel_that_can_not_be_run_says_why(folder) -> None:
    broken = Kernels(RuntimeError("no such function"))
    said = "the kernel can't be run: no such function"
    assert kind(broken).serving(8, checks(folder)) == Unsupported(said)
    assert kind(broken).outcome(8) == said


def test_the_first_kernels_that_are_right_serve(folder, caplog) -> None:
    wrong, right, last = Kernels("off by 1"), Kernels(), Kernels()
    assert kind(wrong, right, last).serving(8, checks(folder)) is right
    assert "the kernels for squares are not used: off by 1" in caplog.text
    assert not last.runs
    # Which of them was right is remembered, too.
    assert kind(right, wrong).serving(8, checks(folder)) is right
    assert right.runs == [8, 8]


def test_a_report_checks_what_was_passed_before(folder) -> None:
    right = Kernels()
    kind(right).serving(8, checks(folder))
    assert kind(right).outcome(8) is None
    assert kind(right).serving(8) is right
    assert right.runs == [8, 8, 8]


def test_a_shape_without_kernels_has_a_reason(folder) -> None:
    none = Unsupported("squares of 7")
    without: KernelKind[int, Kernels] = KernelKind("squares", alone(lambda _: none), Kernels.check)
    assert without.serving(7, checks(folder)) is none
    assert without.outcome(7) is none
    assert not folder.exists()


@pytest.mark.parametrize(
    "spoil", [lambda content: content[:-1], lambda _: b"", lambda _: b"passed"]
)
def test_a_spoiled_file_is_ignored(folder, spoil) -> None:
    right = Kernels()
    kind(right).serving(8, checks(folder))
    (file,) = folder.iterdir()
    file.write_bytes(spoil(file.read_bytes()))
    kind(right).serving(8, checks(folder))
    kind(right).serving(8, checks(folder))
    assert right.runs == [8, 8]


def test_files_are_the_users_alone(folder) -> None:
    kind(Kernels()).serving(8, checks(folder))
    assert folder.stat().st_mode & 0o077 == 0
    assert [file.stat().st_mode & 0o077 for file in folder.iterdir()] == [0]


def test_where_nothing_can_be_kept_every_load_checks(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    right = Kernels()
    for kept in (Kept(None), Kept(tmp_path / "file")):
        assert kind(right).serving(8, Checks(kept, lambda: "one")) is right
        assert kind(right).serving(8, Checks(kept, lambda: "one")) is right
    assert len(right.runs) == 4


def test_a_change_of_any_source_is_another_machine(tmp_path) -> None:
    (tmp_path / "cuda").mkdir()
    source, notes = tmp_path / "cuda" / "add.cu", tmp_path / "notes.txt"
    source.write_text("one")
    before = sources_digest(tmp_path)
    notes.write_text("no source")
    assert sources_digest(tmp_path) == before
    source.write_text("two")
    assert sources_digest(tmp_path) != before
    source.rename(tmp_path / "add.cu")
    assert sources_digest(tmp_path) != before
