from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module, util
from pathlib import Path
from types import ModuleType

import mlx.core as mx
from mlx_lm.utils import load_model
from thorough import slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_http_rim_serves_its_stand_in_without_complaint():
    options = ("--in-process", "--streams", "2", "--tokens", "4", "--rounds", "1")
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "http_rim.py"), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\nin process: best " in ended.stdout


@slow
def test_two_ranks_are_measured_and_compared_on_any_machine(tmp_path: Path):
    options = ("--shapes", "tiny", "--rows", "1", "2", "--tokens", "8", "--rounds", "1")
    probe = ("--variants", "as it comes", "--hidden", "64", "--folder", str(tmp_path))
    probe += ("--seconds", "900")
    ended = subprocess.run(
        [sys.executable, str(FOLDER / "gpu" / "ranks.py"), *options, *probe],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "WRONG" not in ended.stdout
    assert "FAILED" not in ended.stdout
    assert "of 24 tokens of the first server's answers another is likeliest at" in ended.stdout
    assert "ours, 2 devices ÷ ours, 1 device: 1 rows" in ended.stdout


def test_what_benchmarks_import_of_the_program_is_there() -> None:
    lacking = []
    for file in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(name)) if name.startswith("mlx_manager"):
                    names = (alias.name for alias in node.names)
                    lacking += [
                        f"{file.name}: {name}.{each}" for each in names if not is_there(name, each)
                    ]
    assert lacking == []


def is_there(module: str, name: str) -> bool:
    found = import_module(module)
    return hasattr(found, name) or (
        hasattr(found, "__path__") and util.find_spec(f"{module}.{name}") is not None
    )


def loaded(name: str) -> ModuleType:
    """A module of the benchmarks, which are no package."""
    found = util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def test_tokens_that_are_outvoted_are_never_the_likeliest():
    never = [3, *range(90, 100)]
    weight = mx.random.normal((100, 8), key=mx.random.key(0))
    # Where a model expects nothing, all logits are negative.
    weight[:, 0] = 5 + mx.abs(weight[:, 0])
    outvoted = loaded("harness").outvoted(weight, never)
    assert mx.array_equal(outvoted[:3], weight[:3])
    hidden = mx.random.normal((500, 8), key=mx.random.key(1))
    hidden[:, 0] = mx.arange(500) - 250
    logits = hidden @ outvoted.T
    assert not set(logits.argmax(axis=-1).tolist()) & set(never)
    assert (logits[:100] < 0).all()


def test_the_embedded_model_of_the_benchmarks_never_ends_by_itself(tmp_path: Path):
    harness = loaded("harness")
    folder = harness.find_model("demo", tmp_path)
    weight = load_model(folder)[0].model.embed_tokens.weight
    ends = harness.end_tokens(folder)
    assert mx.array_equal(weight, harness.outvoted(weight, ends))
    assert len(ends) == 3
