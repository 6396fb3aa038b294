from __future__ import annotations

from pathlib import Path

import pytest

from mlx_manager.mlx_server.devices.cpu.cache import (
    last_level_cache,
    size_in_bytes,
    sysctl_sizes,
    sysfs_sizes,
)

MIB = 2**20
M3_MAX = """hw.l2cachesize: 4194304
hw.perflevel0.l2cachesize: 16777216
"""
INTEL_MAC = """hw.l3cachesize: 12582912
hw.l2cachesize: 262144
"""


def described(folder: Path, *caches: tuple[str, str]) -> Path:
    """A folder as Linux describes a core's caches in, by their types and sizes."""
    for number, (kind, size) in enumerate(caches):
        place = folder / f"index{number}"
        place.mkdir(parents=True)
        (place / "type").write_text(f"{kind}\n")
        (place / "size").write_text(f"{size}\n")
    return folder


def test_linux_tells_the_caches_of_a_core(tmp_path: Path) -> None:
    epyc = described(
        tmp_path / "epyc",
        ("Data", "32K"),
        ("Instruction", "64K"),
        ("Unified", "1024K"),
        ("Unified", "32768K"),
    )
    assert sysfs_sizes(epyc) == [32 * 1024, MIB, 32 * MIB]


def test_a_cache_of_instructions_holds_no_weights(tmp_path: Path) -> None:
    folder = described(tmp_path / "cache", ("Instruction", "64M"), ("Data", "32K"))
    assert sysfs_sizes(folder) == [32 * 1024]


def test_a_machine_that_tells_nothing_or_nonsense_has_no_sizes(tmp_path: Path) -> None:
    assert sysfs_sizes(tmp_path / "none") == []
    assert sysfs_sizes(described(tmp_path / "cache", ("Unified", "0K"), ("Unified", "?"))) == []
    (tmp_path / "bare" / "index0").mkdir(parents=True)
    assert sysfs_sizes(tmp_path / "bare") == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("48K", 48 * 1024), ("266240K\n", 260 * MIB), ("32M", 32 * MIB), ("1G", 2**30), ("512", 512)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1K", "32 kB", "1.5M"])
def test_what_is_no_size_is_0(text: str) -> None:
    assert size_in_bytes(text) == 0


def test_macos_tells_the_largest_of_what_it_has() -> None:
    assert max(sysctl_sizes(M3_MAX)) == 16 * MIB
    assert max(sysctl_sizes(INTEL_MAC)) == 12 * MIB
    assert sysctl_sizes("hw.l3cachesize: 0\n") == sysctl_sizes("") == []
    assert sysctl_sizes("sysctl: unknown oid 'hw.l3cachesize'\n") == []


def test_this_machine_has_a_cache() -> None:
    assert last_level_cache() >= 2**18
