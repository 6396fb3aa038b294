"""The embedded model with a spell in its embedding: five odd tokens, and a sixth that says what
goes wrong when they are looked up. Code of a model repository, as the server may be told to run; it
runs in the model's worker.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mlx_manager import demo_model

SPELL = [11, 3000, 11, 2999, 11]
RAISES, SPINS, HANGS, EXITS, GPU_FAILS, GPU_IGNORES = range(100, 106)
ABORTS, SEGFAULTS, QUITS, HOLDS_LOCK, STARVES = range(106, 111)

METAL = "[METAL] Command buffer execution failed: "
TIMEOUT = f"{METAL}Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
IGNORED = (
    f"{METAL}Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)
"""As MLX writes them."""

SOURCE = f"""
import ctypes
import os
import resource
import time

import mlx.core as mx
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
        if how == {ABORTS}:
            os.abort()
        if how == {SEGFAULTS}:
            ctypes.string_at(0)
        if how == {QUITS}:
            os._exit(3)
        if how == {HOLDS_LOCK}:
            ctypes.PyDLL(None).sleep(86400)
        if how == {STARVES}:
            # 64 MB more than it has, where it wants a GB. Only under `needs_linux("/proc")`.
            pages = int(open("/proc/self/statm").read().split()[0])
            room = pages * resource.getpagesize() + 2**26
            resource.setrlimit(resource.RLIMIT_AS, (room, room))
            mx.eval(mx.zeros(2**28) + 1)


class Model(Llama):
    def __init__(self, args):
        super().__init__(args)
        self.model.embed_tokens = Embedding(args.vocab_size, args.hidden_size)
"""


def make_faulty_model(folder: Path, at_load: str = "") -> Path:
    """To be served with `trust_remote_code`. at_load: code that its load runs."""
    shutil.copytree(Path(demo_model.__file__).parent, folder)
    (folder / "faulty.py").write_text(f"{SOURCE}\n{at_load}\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "faulty.py"}))
    return folder
