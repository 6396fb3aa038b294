from __future__ import annotations

from pathlib import Path

import pytest
from smollm2 import make_smollm2, smollm2_gguf


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the real SmolLM2-135M-Instruct; what it holds stays as it is."""
    return make_smollm2(tmp_path_factory.mktemp("real") / "smollm2", smollm2_gguf())
