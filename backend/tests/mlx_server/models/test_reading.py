from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from tiny_models import FAMILIES, make_tiny_model

from mlx_manager.mlx_server.models.building import build, planned
from mlx_manager.mlx_server.models.folder import ModelFolder
from mlx_manager.mlx_server.models.reading import as_stored, read
from mlx_manager.mlx_server.models.weight_files import headers_of
from mlx_manager.mlx_server.utils.steps import advance, finish

ON_CUDA = mx.cuda.is_available() and mx.default_device().type == mx.gpu


def noted(folder: Path):
    """A model not yet read, what its files hold, and which of that its parameters are."""
    found: dict[str, mx.array] = {}
    model, _ = build(planned(ModelFolder.read(folder)), found)
    stored = as_stored(model, found, headers_of(ModelFolder.read(folder).weights))
    return model, found, stored


def bits(array: mx.array) -> bytes:
    return bytes(np.array(array.reshape(-1).view(mx.uint8)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_taken_from_a_file_is_what_the_parameter_would_be(family, tmp_path):
    folder = make_tiny_model(tmp_path / family, family, dtype=mx.bfloat16)
    model, _, stored = noted(folder)
    parameters = dict(tree_flatten(model.parameters()))
    assert stored
    for one in stored:
        for path in one.paths:
            data = one.file.read_bytes()[one.start : one.start + one.array.nbytes]
            assert bits(parameters[path]) == data, path


def test_every_parameter_of_a_folder_that_needs_no_change_is_taken(tmp_path):
    folder = make_tiny_model(
        tmp_path / "llama", "llama", dtype=mx.float16, quantize={"group_size": 32, "bits": 4}
    )
    model, _, stored = noted(folder)
    taken = sorted(path for one in stored for path in one.paths)
    assert taken == sorted(path for path, _ in tree_flatten(model.parameters()))


def test_what_the_architecture_makes_of_the_files_is_left_to_mlx(tmp_path):
    folder = make_tiny_model(tmp_path / "gemma", "llama")
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.0.self_attn.q_proj.weight"
    model, found, _ = noted(folder)
    model.model.layers[0].self_attn.q_proj.weight = found[name] + 1
    stored = as_stored(model, found, headers_of(ModelFolder.read(folder).weights))
    paths = {path for one in stored for path in one.paths}
    assert name not in paths
    assert len(paths) == len(weights) - 1


def test_a_tensor_that_two_files_have_is_left_to_mlx(tmp_path):
    folder = make_tiny_model(tmp_path / "llama", "llama")
    whole = (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = mx.load(str(whole))
    twice = {"lm_head.weight": weights["lm_head.weight"]}
    mx.save_safetensors(str(folder / "model-00002-of-00002.safetensors"), twice)
    _, _, stored = noted(folder)
    paths = {path for one in stored for path in one.paths}
    assert paths == weights.keys() - {"lm_head.weight"}


def test_one_tensor_in_two_places_is_read_once(tmp_path):
    model, found, _ = noted(make_tiny_model(tmp_path / "llama", "llama"))
    model.lm_head.weight = model.model.embed_tokens.weight
    headers = headers_of(ModelFolder.read(tmp_path / "llama").weights)
    shared = [one for one in as_stored(model, found, headers) if len(one.paths) > 1]
    assert [sorted(one.paths) for one in shared] == [
        ["lm_head.weight", "model.embed_tokens.weight"]
    ]


def test_a_noted_model_is_as_mlx_lm_makes_it(tmp_path):
    folder = make_tiny_model(tmp_path / "gemma3", "gemma3_text")
    model, _, _ = noted(folder)
    plain, _ = load_model(folder, lazy=True)
    assert type(model) is type(plain)
    assert "sanitize" not in vars(model)
    tokens = mx.array([[1, 2, 3]])
    assert mx.array_equal(model(tokens), plain(tokens))


@pytest.mark.skipif(ON_CUDA, reason="there is an NVIDIA GPU")
def test_elsewhere_mlx_reads_everything(tmp_path):
    model, found, _ = noted(make_tiny_model(tmp_path / "llama", "llama"))
    before = [id(array) for _, array in tree_flatten(model.parameters())]
    finish(read(model, found, ModelFolder.read(tmp_path / "llama").weights))
    assert [id(array) for _, array in tree_flatten(model.parameters())] == before


@pytest.mark.skipif(not ON_CUDA, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_on_a_gpu_every_bit_arrives(family, tmp_path):
    folder = make_tiny_model(tmp_path / family, family, dtype=mx.bfloat16)
    model, found, stored = noted(folder)
    finish(read(model, found, ModelFolder.read(folder).weights))
    parameters = dict(tree_flatten(model.parameters()))
    for one in stored:
        data = one.file.read_bytes()[one.start : one.start + one.array.nbytes]
        assert all(bits(parameters[path]) == data for path in one.paths)


@pytest.mark.skipif(not ON_CUDA, reason="needs an NVIDIA GPU")
def test_on_a_gpu_a_load_given_up_leaves_nothing(tmp_path):
    model, found, _ = noted(make_tiny_model(tmp_path / "llama", "llama"))
    steps = read(model, found, ModelFolder.read(tmp_path / "llama").weights)
    advance(steps)
    before = mx.get_active_memory()
    steps.close()
    assert mx.get_active_memory() <= before
