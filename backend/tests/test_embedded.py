from __future__ import annotations

import tempfile

import pytest

from mlx_manager.embedded import StartFailed, embedded_server


def test_without_a_folder_for_temporary_files_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    missing = pytest.raises(StartFailed, match="needs a folder for temporary files")
    with missing, embedded_server(None):
        raise AssertionError("a server was started")
