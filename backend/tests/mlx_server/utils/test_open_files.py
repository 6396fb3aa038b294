from __future__ import annotations

import resource
from pathlib import Path

from linux import needs_linux
from live import live_server

from mlx_manager.mlx_server.utils import open_files


@needs_linux("/proc tells a server's limits")
def test_a_server_that_has_loaded_its_model_may_open_as_many_files_as_it_could(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = open_files.OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    with live_server(tmp_path / "log.txt") as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
    assert int(line.split()[3]) == min(open_files.OPEN_FILES, most)
