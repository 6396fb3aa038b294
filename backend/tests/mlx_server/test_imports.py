"""Libraries that the server's own process does without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from linux import needs_linux
from live import live_server

WITHOUT = """
import asyncio, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"mlx", "mlx_lm", "mlx_metal", "mlx_cuda", "transformers", "torch"}:
            raise AssertionError(f"{name} is imported")

sys.meta_path.insert(0, Refuse())
from mlx_manager.mlx_server import main
from mlx_manager.mlx_server.config import MLXServerSettings

async def look():
    pool = main.make_pool(MLXServerSettings(hf_cache=False))
    await pool.look()
    pool.figures()
    print(*(model.id for model in await pool.models()))
    await pool.close()

main.create_app(MLXServerSettings(hf_cache=False)).openapi()
asyncio.run(look())
"""


def test_the_http_process_imports_neither_mlx_nor_what_reads_models():
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "mlx-manager/demo" in ran.stdout


@needs_linux("the files that a process has mapped")
def test_the_process_that_serves_has_not_loaded_mlx(tmp_path: Path) -> None:
    with live_server(tmp_path / "errors") as server:
        mapped = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libmlx" not in mapped
