from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tiny models: a, b and c."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc"):
        make_tiny_model(folder / name, seed=seed)
    return folder
