from __future__ import annotations

import tempfile

import pytest

from mlx_manager.embedded import StartFailed, embedded_server


def test_without_a_folder_for_temporary_files_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    missing = pytest.raises(StartFailed, match="needs a folder for temporary files")
    with missing, embedded_server(None):
        raise AssertionError("a server was started")


def test_nothing_of_the_folder_that_it_is_started_in_is_run(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the folder was taken for a library')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_SERVER_MAX_ROWS", "none")
    with pytest.raises(StartFailed, match="MAX_ROWS"), embedded_server(None):
        raise AssertionError("a server was started")
