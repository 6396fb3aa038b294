from __future__ import annotations

import pytest

from mlx_manager.mlx_server.utils.text import sized


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.00 kB"),
        (1536, "1.50 kB"),
        (32 * 2**20, "32.0 MB"),
        (1023.4 * 2**20, "1,023 MB"),
        (1023.9 * 2**20, "1.00 GB"),
        (8 * 2**30, "8.00 GB"),
        (9.999 * 2**30, "10.0 GB"),
        (256 * 2**30, "256 GB"),
        (2**40, "1.00 TB"),
        (5000 * 2**40, "5,000 TB"),
        (-(2**20), "-1.00 MB"),
    ],
)
def test_a_size_has_the_units_of_the_settings(nbytes: float, shown: str) -> None:
    assert sized(nbytes) == shown
