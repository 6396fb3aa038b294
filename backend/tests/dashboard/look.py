"""Draws the Grafana dashboard over a server that is being used, to be looked at.

A server with three models is asked things of every kind by few callers and by many, Prometheus
reads its metrics, and draw.mjs draws the file with Grafana's own front end in Chromium. Ends with 1
if a panel has no data or the page complains.

    make dashboard ARGS="--seconds 300 --theme light"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "mlx_server"))

from live import live_server  # noqa: E402
from minilm import minilm_folder  # noqa: E402
from prometheus import prometheus  # noqa: E402
from traffic import talk  # noqa: E402

from mlx_manager import demo_model  # noqa: E402

CALLERS = (2, 8, 40, 4, 16)
"""How many there are, one fifth of the time after the other."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
KEY = "a-key-for-the-dashboard"


async def use(url: str, seconds: float) -> None:
    for callers in CALLERS:
        end = time.monotonic() + seconds / len(CALLERS)
        models = ["mlx-manager/demo", "mlx-manager/demo", "other"]
        print(f"{callers} callers", flush=True)
        await talk(url, lambda end=end: time.monotonic() > end, callers, models, "minilm", KEY)


def draw(options: argparse.Namespace, url: str, minutes: float) -> dict[str, Any]:
    """What was on the page, which is then in `options.out`."""
    command = [
        *("node", HERE / "draw.mjs", "--prometheus", url, "--out", options.out),
        *("--minutes", f"{minutes:.0f}", "--every", "1s", "--theme", options.theme),
        *("--width", str(options.width), "--chromium", options.chromium),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    drawn: dict[str, Any] = json.loads(done.stdout)
    return drawn


def look(options: argparse.Namespace, folder: Path) -> int:
    shutil.copytree(Path(demo_model.__file__).parent, folder / "models" / "other")
    shutil.copytree(minilm_folder(), folder / "models" / "minilm")
    settings = {"models_dir": folder / "models", "memory_limit_gb": 0.8, "max_rows": 16}
    keys = {"api_key": KEY, "metrics_by_key": True, "open_metrics": True}
    began = time.monotonic()
    with (
        live_server(folder / "log.txt", **settings, **keys) as server,
        prometheus(folder, [server.url], every="1s") as client,
    ):
        asyncio.run(use(server.url, options.seconds))
        minutes = max(1, (time.monotonic() - began) / 60 + 0.5)
        drawn = draw(options, str(client.base_url), minutes)
    empty = [panel["title"] for panel in drawn["panels"] if panel["empty"]]
    for complaint in drawn["complaints"]:
        print(f"the page complains: {complaint}")
    for title in empty:
        print(f"no data: {title}")
    print(f"{len(drawn['panels'])} panels are drawn in {options.out}")
    return 1 if empty or drawn["complaints"] or not drawn["panels"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/dashboard.png"))
    parser.add_argument("--seconds", type=float, default=120, help="of use before it is drawn")
    parser.add_argument("--theme", choices=["dark", "light"], default="dark")
    parser.add_argument("--width", type=int, default=1600, help="of the window, in pixels")
    parser.add_argument("--chromium", default=next(filter(None, map(shutil.which, BROWSERS)), None))
    options = parser.parse_args()
    if options.chromium is None:
        parser.error("no Chromium was found; --chromium PATH says where one is")
    options.out = options.out.resolve()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return look(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
