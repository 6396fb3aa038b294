from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from devices.emulated import (  # noqa: F401  # fixtures
    _products_of_a_server,
    compile_cuda,
    compile_metal,
    llama,
    nvidia_accepts,
)
from smollm2 import make_smollm2, smollm2_gguf


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the real SmolLM2-135M-Instruct; what it holds stays as it is."""
    folder = make_smollm2(tmp_path_factory.mktemp("real") / "smollm2", smollm2_gguf())
    yield folder
    # pytest keeps the folders of three runs, and this one has 270 MB.
    shutil.rmtree(folder)
