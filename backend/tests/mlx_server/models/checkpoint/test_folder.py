from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_tiny_model

from mlx_manager.mlx_server.errors import ModelLoadFailed
from mlx_manager.mlx_server.models.checkpoint.folder import (
    UNKNOWN_CONTEXT,
    ModelFolder,
    context_length,
)
from mlx_manager.mlx_server.models.checkpoint.weight_files import check_safetensors


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}}, 131072),
        ({"max_position_embeddings": 32768, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}, 163840),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, 131072),
        ({"max_position_embeddings": 40960, "rope_scaling": None}, 40960),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        ({"text_config": {"max_position_embeddings": 65536}}, 65536),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": 40960}}, 81920),
        ({"max_position_embeddings": 32768, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8}}}, 32768),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": "40960"}}, 81920),
        ({"n_positions": 1024}, 1024),
        ({"n_ctx": 2048}, 2048),
        ({}, UNKNOWN_CONTEXT),
    ],
)  # fmt: skip
def test_context_length_counts_what_rope_scaling_adds(config: dict, length: int):
    assert context_length(config) == length


def test_tokenizers_figure_decides_only_where_there_is_no_other():
    assert context_length({"max_position_embeddings": 131072}, 2048) == 131072
    assert context_length({}, 2048) == 2048


def test_unknown_length_of_a_tokenizer_is_no_length(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1e30}')
    assert ModelFolder.read(tmp_path).context_length == UNKNOWN_CONTEXT
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 4096}')
    assert ModelFolder.read(tmp_path).context_length == 4096


@given(
    st.dictionaries(
        st.sampled_from(["max_position_embeddings", "n_ctx", "rope_scaling", "rope_parameters"]),
        st.none()
        | st.integers()
        | st.floats()
        | st.text()
        | st.dictionaries(st.text(), st.integers()),
    )
)
def test_any_config_has_a_context_length(config: dict):
    assert context_length(config) > 0


def test_sound_weights_pass(tmp_path: Path):
    folder = ModelFolder.read(make_tiny_model(tmp_path / "m"))
    folder.check()
    assert folder.model_type == "llama"
    assert folder.nbytes == (tmp_path / "m" / "model.safetensors").stat().st_size


@given(data=st.data())
def test_every_truncation_is_found(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory):
    header = json.dumps(
        {
            "__metadata__": {"format": "mlx"},
            "w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]},
        }
    ).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(64)
    file = tmp_path_factory.mktemp("t") / "model.safetensors"
    file.write_bytes(whole)
    check_safetensors(file)
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors"):
        check_safetensors(file)


@given(junk=st.binary(max_size=200))
def test_junk_is_no_safetensors_file(junk: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("junk") / "model.safetensors"
    file.write_bytes(junk)
    with pytest.raises(ModelLoadFailed, match=r"model\.safetensors"):
        check_safetensors(file)


def test_problems_name_the_file(tmp_path: Path):
    with pytest.raises(ModelLoadFailed, match="nowhere is not a folder"):
        ModelFolder.read(tmp_path / "nowhere")
    with pytest.raises(ModelLoadFailed, match=r"config\.json can't be read: No such file"):
        ModelFolder.read(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(ModelLoadFailed, match=r"config\.json is not JSON"):
        ModelFolder.read(tmp_path)
    config.write_text("[]")
    with pytest.raises(ModelLoadFailed, match=r"config\.json is not a JSON object"):
        ModelFolder.read(tmp_path)
    config.write_text("{}")
    with pytest.raises(ModelLoadFailed, match="There are no weights"):
        ModelFolder.read(tmp_path).check()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(
        ModelLoadFailed, match=r"missing from .*: model-00001-of-00002\.safetensors"
    ):
        ModelFolder.read(tmp_path).check()
    index.write_text("{}")
    with pytest.raises(ModelLoadFailed, match="has no weight_map"):
        ModelFolder.read(tmp_path).check()
