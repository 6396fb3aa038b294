"""Kinds of input that a folder takes, told before and after it is loaded."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tiny_models import make_tiny_model
from tiny_vision import PLENTY, SEEING, make_seeing_model

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.models.catalog import described
from mlx_manager.mlx_server.models.loading.load import LoadedModel, load
from mlx_manager.mlx_server.models.modalities import (
    blindness,
    input_modalities,
    missing_libraries,
)
from mlx_manager.mlx_server.utils.memory import Ledger


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def loaded_from(folder: Path) -> LoadedModel:
    return load(described("m", folder, "models_dir"), PoolLimits(weights="keep"), Ledger(PLENTY))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = config_of(folder)
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def without(folder: Path, part: str) -> None:
    """Remove the tensors whose name has `part`."""
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    kept = {name: array for name, array in weights.items() if part not in name}
    assert len(kept) < len(weights)
    mx.save_safetensors(str(file), kept)


def tell_why(folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Load a folder that serves text, and return the log's reason."""
    with caplog.at_level(logging.WARNING):
        loaded = loaded_from(folder)
    assert loaded.vision is None
    prompt = mx.array([loaded.tokenizer.encode("hi")])
    assert loaded.model(prompt).shape[:2] == prompt.shape
    [line] = [line for line in caplog.messages if "takes no pictures" in line]
    return line


@pytest.mark.parametrize("kind", sorted(SEEING))
def test_a_folder_with_a_tower_takes_images(kind: str, tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path, kind)
    assert input_modalities(config_of(folder), folder) == ("text", "image")
    assert loaded_from(folder).vision is not None


def test_a_text_model_takes_text_and_the_log_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3")
    assert input_modalities(config_of(folder), folder) == ("text",)
    with caplog.at_level(logging.WARNING):
        assert loaded_from(folder).vision is None
    assert not any("pictures" in line for line in caplog.messages)


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl"])
def test_a_folder_whose_tower_was_left_out_serves_text(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_seeing_model(tmp_path, kind)
    for part in ("visual.",) if kind == "qwen3_vl" else ("vision_model.", "connector."):
        without(folder, part)
    assert input_modalities(config_of(folder), folder) == ("text",)
    assert "no tensors of the vision tower" in blindness(config_of(folder), folder)
    assert "no tensors of the vision tower" in tell_why(folder, caplog)


def test_a_tower_that_lacks_a_tensor_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_seeing_model(tmp_path, "qwen3_vl")
    without(folder, "blocks.1.attn.qkv.bias")
    assert "lacks blocks.1.attn.qkv.bias of the vision tower" in tell_why(folder, caplog)


def test_a_tower_of_other_sizes_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_seeing_model(tmp_path, "smolvlm")
    edit(folder, lambda config: config["vision_config"].update(intermediate_size=48))
    assert "of the vision tower has the shape" in tell_why(folder, caplog)


def test_a_tower_in_an_unknown_form_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As MLX reads a tensor of 8-bit floats, whose scales stand beside it."""
    folder = make_seeing_model(tmp_path, "mistral3")
    file = folder / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    name = "multi_modal_projector.linear_1.weight"
    mx.save_safetensors(str(file), weights | {name: weights[name].astype(mx.uint8)})
    assert "linear_1.weight of the vision tower is stored as mlx.core.uint8" in tell_why(
        folder, caplog
    )


def test_an_unknown_activation_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_seeing_model(tmp_path, "mistral3")
    edit(folder, lambda config: config["vision_config"].update(hidden_act="relu"))
    assert "activation is 'relu'" in tell_why(folder, caplog)


def test_a_tower_of_an_unknown_family_serves_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_seeing_model(tmp_path, "mistral3")
    edit(folder, lambda config: config["vision_config"].update(model_type="moonvit"))
    assert input_modalities(config_of(folder), folder) == ("text",)
    assert "towers of 'mistral3' models are not known here" in tell_why(folder, caplog)


def test_a_tokenizer_without_the_token_of_rows_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_seeing_model(tmp_path, "smolvlm")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"<image>"', '"<imago>"'))
    assert "no token <image>" in tell_why(folder, caplog)


@pytest.mark.parametrize(("module", "name"), [("mlx_vlm", "mlx-vlm"), ("PIL", "Pillow")])
def test_a_missing_library_is_named_with_the_way_to_install_it(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = make_seeing_model(tmp_path, "smolvlm")
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, module, None)
    missing_libraries.cache_clear()
    try:
        assert input_modalities(config_of(folder), folder) == ("text",)
        line = tell_why(folder, caplog)
    finally:
        missing_libraries.cache_clear()
    assert f"{name} is not installed" in line
    assert "pip install 'mlx-manager-server[vision]'" in line


def test_an_older_config_has_the_language_models_settings_beside_the_encoders(
    tmp_path: Path,
) -> None:
    folder = make_seeing_model(tmp_path, "qwen2_5_vl")
    expected = loaded_from(folder).vision

    def flatten(config: dict[str, Any]) -> None:
        text = config.pop("text_config")
        config.update({**text, "model_type": config["model_type"]})

    edit(folder, flatten)
    assert input_modalities(config_of(folder), folder) == ("text", "image")
    found = loaded_from(folder).vision
    assert expected is not None
    assert found is not None
    assert found.mrope == expected.mrope is not None


def test_a_text_model_under_another_name_is_found(tmp_path: Path) -> None:
    folder = make_seeing_model(tmp_path, "internvl_chat")
    edit(folder, lambda config: config.update(llm_config=config.pop("text_config")))
    assert input_modalities(config_of(folder), folder) == ("text", "image")
    assert loaded_from(folder).vision is not None


def test_the_template_of_the_processor_counts_where_the_tokenizer_has_another(
    tmp_path: Path,
) -> None:
    folder = make_seeing_model(tmp_path, "qwen2_5_vl")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = {"chat_template": settings["chat_template"]}
    (folder / "chat_template.json").write_text(json.dumps(template))
    texts = "{% for message in messages %}{{ message['content'] + '' }}{% endfor %}"
    settings["chat_template"] = texts
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert loaded_from(folder).tokenizer.chat_template == template["chat_template"]
