"""A real Prometheus that reads the /metrics of servers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import announced

UNPACKED = Path(__file__).parents[3] / ".venv-clients" / "prometheus" / "usr" / "bin"
LISTENS = re.compile(r'msg="Listening on" address=(\S+)')


MISSING = "there is no Prometheus here; `make clients` gets it where apt-get can"


def program(name: str) -> str | None:
    """`prometheus` or `promtool`: the machine's, or what `make clients` unpacked."""
    return shutil.which(name) or shutil.which(name, path=UNPACKED)


needs_prometheus = pytest.mark.skipif(program("promtool") is None, reason=MISSING)


@contextmanager
def prometheus(
    folder: Path, servers: Sequence[str], rules: Sequence[Path] = (), every: str = "500ms"
) -> Iterator[httpx.Client]:
    """Prometheus on a free port, with its data in `folder`; `servers` are scraped `every` so long.
    JSON is YAML, hence its configuration."""
    configuration = {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {
                "job_name": "mlx-manager",
                "static_configs": [
                    {"targets": [url.removeprefix("http://") for url in servers]},
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    binary = program("prometheus")
    assert binary is not None, MISSING
    command = [
        binary,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = announced(process, LISTENS, "Prometheus")
            with httpx.Client(base_url=f"http://{address}", timeout=60) as client:
                # It listens before it has opened its data, and answers everything with 503.
                until(lambda: client.get("/-/ready").is_success)
                yield client
        finally:
            process.kill()


def until(done: Callable[[], Any]) -> Any:
    """What `done` finds, once it finds something."""
    deadline = time.monotonic() + 60
    while not (found := done()):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # A query costs Prometheus something.
    return found


def ask(client: httpx.Client, path: str, **parameters: Any) -> Any:
    """What its API says under `data`; an expression that it does not take fails here."""
    answer = client.get(f"/api/v1/{path}", params=parameters).json()
    assert answer["status"] == "success", (answer.get("error"), parameters)
    return answer["data"]
