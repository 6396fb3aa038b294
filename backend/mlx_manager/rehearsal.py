"""A model's load by a process that nobody waits for; see `mlx_server/models/rehearsal.py`.

The first line of its stdin says, as JSON, which `model`, and by which `settings`. It ends when its
stdin does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading

from mlx_manager.embedded import stdin_ends

NICE = 10
"""Those who are answered come first."""


def end_with_parent() -> None:
    """Once stdin is at its end, nobody wants what is done here."""
    stdin_ends()
    os._exit(1)


def main() -> None:
    """Load the model, and end."""
    os.nice(NICE)
    told = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=end_with_parent, name="end with the parent", daemon=True).start()
    from mlx_manager.mlx_server.config import MLXServerSettings
    from mlx_manager.mlx_server.errors import MLXManagerError
    from mlx_manager.mlx_server.main import make_script_pool

    pool = make_script_pool(MLXServerSettings(**told["settings"]))
    try:
        asyncio.run(pool.get_model(told["model"]))
    except MLXManagerError as error:
        sys.exit(error.message)
    # Nothing is left to be done in order.
    os._exit(0)


if __name__ == "__main__":
    main()
