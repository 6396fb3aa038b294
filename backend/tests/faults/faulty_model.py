"""The embedded model with a spell in its embedding: five odd tokens, and a sixth that says what
goes wrong when they are looked up. Code of a model repository, as the server may be told to run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mlx_manager import demo_model

SPELL = [11, 3000, 11, 2999, 11]
RAISES, SPINS, HANGS, EXITS, GPU_FAILS, GPU_IGNORES = range(100, 106)

METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = f"{METAL}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
IGNORED = (
    f"{METAL}Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)
"""As MLX writes them."""

SOURCE = f"""
import time

from mlx import nn
from mlx_lm.models.llama import Model as Llama, ModelArgs

SPELL = {SPELL}


class Embedding(nn.Embedding):
    def __call__(self, x):
        tokens = x.reshape(-1).tolist()
        for start in range(len(tokens) - len(SPELL)):
            end = start + len(SPELL)
            if tokens[start:end] == SPELL:
                self.go_wrong(tokens[end])
        return super().__call__(x)

    def go_wrong(self, how):
        if how == {RAISES}:
            raise ValueError("these tokens can't be looked up")
        while how == {SPINS}:
            pass
        if how == {HANGS}:
            time.sleep(86400)
        if how == {EXITS}:
            raise SystemExit
        if how == {GPU_FAILS}:
            raise RuntimeError("{TIMEOUT}")
        if how == {GPU_IGNORES}:
            raise RuntimeError("{IGNORED}")


class Model(Llama):
    def __init__(self, args):
        super().__init__(args)
        self.model.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
"""


def make_faulty_model(folder: Path) -> Path:
    """To be served with `trust_remote_code`."""
    shutil.copytree(Path(demo_model.__file__).parent, folder)
    (folder / "faulty.py").write_text(SOURCE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "faulty.py"}))
    return folder
