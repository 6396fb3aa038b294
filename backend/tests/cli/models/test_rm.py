"""Deleting models: what may go, what never does, and who is asked."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pexpect
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import live_server
from thorough import slow

from mlx_manager.demo_model import demo_model_path
from mlx_manager.mlx_server.errors import InvalidRequest, ModelNotFound
from mlx_manager.mlx_server.models.removal import plan_removal


def cached(home: Path, name: str = "own/demo") -> Path:
    """A model in the cache of `home`, laid out as the hub's client does it."""
    root = home / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    for folder in ("blobs", "refs", "snapshots/1"):
        (root / folder).mkdir(parents=True)
    (root / "refs" / "main").write_text("1")
    for file in demo_model_path().iterdir():
        if file.is_file():
            shutil.copy(file, root / "blobs" / file.name)
            (root / "snapshots" / "1" / file.name).symlink_to(root / "blobs" / file.name)
    return root


def test_a_cached_model_is_deleted_and_its_bytes_counted_once(program, tmp_path: Path) -> None:
    root = cached(tmp_path)
    done = program("rm", "own/demo", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["folders"] == [str(root)]
    assert 8_600_000 < json.loads(done.stdout)["bytes"] < 8_700_000
    assert not root.exists()
    assert program("rm", "own/demo", "--yes").returncode == 4


def test_a_person_is_asked_first(environment: dict[str, str], tmp_path: Path) -> None:
    root = cached(tmp_path)
    answers = (("n\n", 1), ("\x03", 130), ("\x04", 1), ("y\n", 0))
    for answer, code in answers:
        child = pexpect.spawn(
            sys.executable,
            ["-m", "mlx_manager.cli", "rm", "own/demo"],
            env=environment,
            encoding="utf-8",
            timeout=60,
        )
        child.expect_exact("Delete it?")
        child.send(answer)
        child.expect(pexpect.EOF)
        child.close()
        assert child.exitstatus == code
        assert root.exists() == (code != 0)


def test_a_model_of_the_folder_goes_and_its_neighbours_stay(program, tmp_path: Path) -> None:
    for name in ("my own (4+ bit)", "owner/other"):
        shutil.copytree(demo_model_path(), tmp_path / "models" / name)
    done = program("rm", "my own (4+ bit)", "--yes", "--models-dir", str(tmp_path / "models"))
    assert re.fullmatch(
        r"my own \(4\+ bit\) is deleted: [0-9.]+ MB are free again\.\n", done.stdout
    )
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["owner"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("mlx-manager/demo", "--yes"), 5, "embedded"),
        (("../models/mine", "--yes"), 5, "no name of a model"),
        (("/etc", "--yes"), 5, "no name of a model"),
        (("linked", "--yes"), 5, "is a link to"),
        (("nobody/nothing", "--yes"), 4, "There is no model"),
        (("x" * 300, "--yes"), 1, "File name too long"),
        (("mine",), 2, "--yes"),
    ],
)
def test_what_may_not_go_stays(program, tmp_path, arguments, code: int, words: str) -> None:
    mine = shutil.copytree(demo_model_path(), tmp_path / "models" / "mine")
    elsewhere = shutil.copytree(demo_model_path(), tmp_path / "elsewhere")
    (tmp_path / "models" / "linked").symlink_to(elsewhere)
    done = program("rm", *arguments, MLX_SERVER_MODELS_DIR=str(tmp_path / "models"))
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert (mine / "config.json").exists()
    assert (elsewhere / "config.json").exists()


def test_a_loaded_model_stays_until_it_is_unloaded(program, server: str, models_dir: Path) -> None:
    shutil.copytree(models_dir / "mine", models_dir / "twin")
    admin = {"MLX_SERVER_ADMIN_TOKEN": "open-sesame", "MLX_MANAGER_URL": server}
    arguments = ("rm", "twin", "--yes", "--models-dir", str(models_dir))
    assert program("load", "mine", **admin).returncode == 0
    done = program(*("mine" if word == "twin" else word for word in arguments), **admin)
    assert done.returncode == 5
    assert "mlx-manager unload mine" in done.stderr
    assert program("unload", "mine", **admin).returncode == 0
    assert program(*arguments, **admin).returncode == 0
    assert [path.name for path in models_dir.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("loaded", "of"), [("helper", "mine"), pytest.param("aide", "twin", marks=slow)]
)
def test_files_stay_that_are_loaded_under_another_name(
    run, program, tmp_path: Path, loaded: str, of: str
) -> None:
    models = tmp_path / "models"
    for name in ("mine", "twin"):
        shutil.copytree(demo_model_path(), models / name)
    file = tmp_path / "models.toml"
    file.write_text(
        '[models.helper]\nbase = "mine"\nweights = "keep"\n'
        f'[models.aide]\nbase = "{models / "twin"}"\nweights = "keep"\n'
    )
    with live_server(
        tmp_path / "log", models_dir=models, models_file=file, admin_token="open-sesame"
    ) as server:
        admin = {"MLX_SERVER_ADMIN_TOKEN": "open-sesame", "MLX_MANAGER_URL": server.url}
        assert run("load", loaded, **admin).returncode == 0
        remove = ("rm", of, "--yes", "--models-dir", str(models))
        done = program(*remove, **admin)
        assert (done.returncode, done.stdout) == (5, "")
        assert f"has {loaded} loaded, from the files of {of}: `mlx-manager unload" in done.stderr
        assert run("unload", loaded, **admin).returncode == 0
        assert program(*remove, **admin).returncode == 0
    assert of not in {path.name for path in models.iterdir()}


@given(st.text(st.sampled_from("ab./~-_ \\\n"), max_size=12))
def test_no_name_leads_out_of_its_place(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    place = tmp_path_factory.getbasetemp() / "place" / "models"
    try:
        found = plan_removal(name, place, place.parent / "cache")
    except (InvalidRequest, ModelNotFound):
        return
    for folder in found.folders:
        assert os.path.commonpath([folder.resolve(), place.resolve()]) == str(place.resolve())
