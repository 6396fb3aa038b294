"""`mlx-manager serve` on machines that can't serve."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from live import PROGRAM


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libcudart.so.12: not found')", "libcudart.so.12: not found"),
        ("import os; os.abort()", "exit status -6"),
    ],
    ids=["a library is missing", "it ends the process"],
)
def test_where_mlx_cant_be_imported_the_reason_and_the_way_out_are_said(
    source: str, said: str, tmp_path: Path
) -> None:
    package = tmp_path / "mlx"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "core.py").write_text(source)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [PROGRAM, "serve", "--port", "0"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 1
    assert "MLX can't be imported" in ran.stderr
    assert said in ran.stderr
    assert "pip install" in ran.stderr
