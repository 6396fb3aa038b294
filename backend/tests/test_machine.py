"""Facts for public reports: they are numbers, and nothing in them is a person's."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path

import pytest

from mlx_manager import machine

PSI = """some avg10=1.50 avg60=0.25 avg300=0.00 total=123
full avg10=0.00 avg60=0.00 avg300=0.00 total=45
"""


def test_stalls_are_read_as_numbers() -> None:
    assert machine.stalls(PSI) == {
        "some": {"avg10": 1.5, "avg60": 0.25, "avg300": 0.0, "total": 123.0},
        "full": {"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total": 45.0},
    }


def test_a_kernel_without_stalls_says_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "PRESSURE", tmp_path / "absent")
    assert machine.memory_pressure() == {}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("can't open /Users/alice/Library/x.metal", "can't open ~/Library/x.metal"),
        ("can't open '/home/bob/x': no", "can't open '~/x': no"),
        ("at /usr/lib/x", "at /usr/lib/x"),
    ],
)
def test_homes_are_left_out(said: str, shown: str) -> None:
    assert machine.impersonal(said) == shown


def test_this_person_and_this_machine_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "zaphod")
    monkeypatch.setenv("HOME", "/var/zaphod-home")
    monkeypatch.setattr(socket, "gethostname", lambda: "heart-of-gold.local")
    said = "zaphod@heart-of-gold.local: /var/zaphod-home/kernel.metal in /private/zaphod/x"
    assert machine.impersonal(said) == "USER@HOST: ~/kernel.metal in /private/USER/x"


def test_words_that_hold_the_name_of_a_person_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "metal")
    assert machine.impersonal("metal_kernel") == "metal_kernel"


def test_only_numbers_of_variables_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "1")
    monkeypatch.setenv("MTL_DEBUG_LAYER", "/Users/alice")
    assert machine.described()["variables"] == {"MLX_MAX_OPS_PER_BUFFER": "1"}


def test_the_facts_are_json_without_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.dumps(machine.described())
    assert str(Path.home()) not in found
    assert f'"{getpass.getuser()}"' not in found
    assert socket.gethostname() not in found
