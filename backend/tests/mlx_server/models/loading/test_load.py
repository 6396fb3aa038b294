from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_adapters, load_model
from tiny_models import make_tiny_adapter, make_tiny_model

from mlx_manager.mlx_server.config import PoolLimits
from mlx_manager.mlx_server.errors import (
    ModelLoadFailed,
    ModelNotSupported,
    ModelTooLarge,
    OutOfMemory,
)
from mlx_manager.mlx_server.models.catalog import ModelSource, described
from mlx_manager.mlx_server.models.loading.load import load
from mlx_manager.mlx_server.models.loading.weights import default_device
from mlx_manager.mlx_server.models.settings import Recipe
from mlx_manager.mlx_server.utils.memory import Ledger, clear_cache
from mlx_manager.mlx_server.utils.text import sized

PLENTY = 10**9


def source(folder: Path) -> ModelSource:
    return described("m", folder, "models_dir")


def edit(folder: Path, **changes: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))


def test_model_comes_with_tokenizer_adapter_and_measured_size(tmp_path: Path):
    ledger = Ledger(PLENTY)
    folder = make_tiny_model(tmp_path / "m", "qwen3", dtype=mx.bfloat16)
    loaded = load(source(folder), PoolLimits(weights="keep"), ledger)
    assert (loaded.id, loaded.path, loaded.family) == ("m", folder, "qwen")
    assert loaded.context_length == 2048
    assert loaded.weights.name == "stored"
    assert loaded.weights.dtype == "bfloat16"
    assert loaded.weights.reason == "the setting is keep"
    assert ledger.figures()["weights:m"] == loaded.nbytes < source(folder).nbytes
    prompt = mx.array([loaded.tokenizer.encode("hi")])
    assert loaded.model(prompt).shape == (1, 3, len(loaded.tokenizer))
    assert loaded.adapter.get_stop_tokens(loaded.tokenizer)


@pytest.mark.skipif(default_device() != "cpu", reason="the layout is a CPU's")
def test_the_log_says_how_the_weights_of_a_model_lie(tmp_path: Path, caplog):
    with caplog.at_level("INFO"):
        load(source(make_tiny_model(tmp_path / "m")), PoolLimits(), Ledger(PLENTY))
    [line] = [line for line in caplog.messages if "by columns" in line]
    assert line.startswith("m: of ")


def test_converted_model_stands_in_the_ledger_with_its_new_size(tmp_path: Path):
    folder = make_tiny_model(
        tmp_path / "m", dtype=mx.bfloat16, quantize={"group_size": 32, "bits": 4}
    )
    ledger = Ledger(PLENTY)
    loaded = load(source(folder), PoolLimits(weights="dequantize"), ledger)
    assert loaded.weights.name.startswith("dequantized")
    assert ledger.figures()["weights:m"] == loaded.nbytes > 2 * source(folder).nbytes


def test_conversion_leaves_room_for_kv_pages(tmp_path: Path):
    folder = make_tiny_model(
        tmp_path / "m", dtype=mx.bfloat16, quantize={"group_size": 32, "bits": 4}
    )
    size = source(folder).nbytes
    clear_cache()
    loaded = load(source(folder), PoolLimits(), Ledger(int(1.3 * size), cache_bytes=lambda: 0))
    assert loaded.weights.name == "stored"
    assert "too small" in loaded.weights.reason
    with pytest.raises(ModelTooLarge, match="in the form dequantized"):
        load(
            source(folder),
            PoolLimits(weights="dequantize"),
            Ledger(int(1.3 * size), cache_bytes=lambda: 0),
        )


def test_too_large_a_model_is_refused_before_it_is_read_with_the_numbers(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    size = source(folder).nbytes
    with pytest.raises(
        ModelTooLarge, match=f"take {sized(size)}, and the memory limit is 1000 bytes"
    ):
        load(source(folder), PoolLimits(), Ledger(1000))
    ledger = Ledger(size + 1000, cache_bytes=lambda: 0)
    ledger.reserve("pages:other", 2000)
    with pytest.raises(OutOfMemory, match=f"take {sized(size)}, and {sized(size - 1000)} of"):
        load(source(folder), PoolLimits(), ledger)
    assert "weights:m" not in ledger.figures()


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def overwrite(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def change_tokenizer(**changes: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def set_config(**changes: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder, **changes)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), ModelLoadFailed, r"config\.json can't be read"),
        (remove("model.safetensors"), ModelLoadFailed, "There are no weights"),
        (overwrite("model.safetensors", "version https://git-lfs"), ModelLoadFailed, "not a safetensors file"),
        (overwrite("config.json", "{}"), ModelLoadFailed, "names no model_type"),
        (overwrite("tokenizer.json", "{"), ModelLoadFailed, r"m can't be loaded: .*tokenizer\.json"),
        (remove("tokenizer.json"), ModelLoadFailed, "m can't be loaded"),
        (set_config(model_type="xyzformer"), ModelNotSupported, r"'xyzformer' model, .* mlx-lm \d"),
        (set_config(model_file="model.py"), ModelNotSupported, "MLX_SERVER_TRUST_REMOTE_CODE"),
        (set_config(num_hidden_layers=3), ModelLoadFailed, r"config\.json says num_hidden_layers 3, and the weights hold 2"),
        (set_config(hidden_size="wide"), ModelLoadFailed, "m can't be loaded"),
        (set_config(num_attention_heads=None), ModelLoadFailed, "m can't be loaded"),
        (set_config(eos_token_id="</s>"), ModelLoadFailed, "m can't be loaded: .*'eos_token_id'"),
        (set_config(text_config="x"), ModelLoadFailed, "m can't be loaded"),
        (set_config(quantization_config={"quant_method": "gptq", "bits": 4}), ModelLoadFailed, "m can't be loaded"),
        (set_config(model_type="qwen3"), ModelLoadFailed, r"m can't be loaded: Missing 4 parameters"),
        (set_config(attention_bias=True, mlp_bias=True), ModelLoadFailed, r"Missing 14 parameters.{,520} \.\.\.$"),
        (overwrite("tokenizer.json", "{}"), ModelLoadFailed, "m can't be loaded: 'added_tokens' is missing"),
        (change_tokenizer(model={"type": "Newer"}), ModelLoadFailed, r"m can't be loaded: tokenizers \d\S+ can't read its tokenizer\.json"),
        (overwrite("model.safetensors.index.json", '{"weight_map": {"a": 5}}'), ModelLoadFailed, r"index\.json has a weight_map"),
    ],
)  # fmt: skip
def test_damage_is_named_and_leaves_nothing_behind(
    damage: Callable[[Path], None], error: type[ModelLoadFailed], message: str, tmp_path: Path
):
    folder = make_tiny_model(tmp_path / "m")
    damage(folder)
    ledger = Ledger(PLENTY)
    with pytest.raises(error, match=f"(?s){message}"):
        load(source(folder), PoolLimits(), ledger)
    assert "weights:m" not in ledger.figures()


@pytest.mark.parametrize("name", ["Tiny [4bit]", "a*", "a?"])
def test_a_path_that_looks_like_a_pattern_is_a_path(tmp_path: Path, name: str):
    folder = make_tiny_model(tmp_path / name, seed=1)
    make_tiny_model(tmp_path / "ab", seed=2)
    loaded = load(source(folder), PoolLimits(), Ledger(PLENTY))
    stored = mx.load(str(folder / "model.safetensors"))
    assert mx.array_equal(loaded.model.lm_head.weight, stored["lm_head.weight"])


def test_a_chat_template_may_be_where_processors_have_theirs(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    settings = folder / "tokenizer_config.json"
    others = json.loads(settings.read_text())
    template = others.pop("chat_template", None) or (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings.write_text(json.dumps(others))
    assert not load(source(folder), PoolLimits(), Ledger(PLENTY)).tokenizer.has_chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    loaded = load(source(folder), PoolLimits(), Ledger(PLENTY))
    assert loaded.tokenizer.chat_template == template


def test_code_of_a_repository_runs_only_when_trusted(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    (folder / "model.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    edit(folder, model_file="model.py")
    with pytest.raises(ModelNotSupported):
        load(source(folder), PoolLimits(), Ledger(PLENTY))
    assert load(source(folder), PoolLimits(trust_remote_code=True), Ledger(PLENTY)).model


def test_a_load_says_what_it_does(tmp_path: Path):
    said: list[str] = []
    folder = make_tiny_model(tmp_path / "m", quantize={"group_size": 32, "bits": 4})
    load(source(folder), PoolLimits(), Ledger(PLENTY), doing=said.append)
    assert said[:6] == [
        "its files are looked at",
        "its tokenizer is read",
        "its chat template is tried out",
        "its modules are made",
        "its weights are read",
        "the fastest form of its weights is chosen",
    ]
    assert said[-1] == "its weights are read (1 of 1)"


@pytest.mark.parametrize("place", ["its weights are read", "the fastest form of its weights"])
def test_a_load_that_fails_midway_gives_its_memory_back(tmp_path: Path, place: str):
    ledger = Ledger(PLENTY)
    held: list[int] = []

    def doing(said: str) -> None:
        if said.startswith(place):
            held.append(ledger.figures()["weights:m"])
            raise RuntimeError("that was enough")

    folder = make_tiny_model(tmp_path / "m")
    with pytest.raises(ModelLoadFailed, match="that was enough"):
        load(source(folder), PoolLimits(), ledger, doing=doing)
    assert held[0] > 0
    assert "weights:m" not in ledger.figures()


TOKENS = mx.array([[256, 104, 101, 108, 108, 111]])


@pytest.mark.parametrize("quantize", [None, {"group_size": 32, "bits": 4}])
def test_an_adapter_is_part_of_what_the_model_computes(tmp_path: Path, quantize: dict | None):
    folder = make_tiny_model(tmp_path / "m", quantize=quantize)
    adapter = make_tiny_adapter(tmp_path / "adapter", folder)
    reference = load_adapters(load_model(folder)[0], str(adapter))
    reference.eval()
    ledger = Ledger(PLENTY)
    loaded = load(source(folder), PoolLimits(weights="keep"), ledger, Recipe(adapter=adapter))
    assert mx.allclose(loaded.model(TOKENS), reference(TOKENS), atol=1e-4)
    plain = load(source(folder), PoolLimits(weights="keep"), Ledger(PLENTY))
    assert not mx.allclose(loaded.model(TOKENS), plain.model(TOKENS), atol=0.1)
    beside = loaded.nbytes - plain.nbytes
    assert beside == (0 if quantize is None else beside) >= 0
    assert ledger.figures()["weights:m"] == loaded.nbytes


def test_an_adapter_that_is_none_is_refused_before_the_weights_are_read(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    ledger = Ledger(PLENTY)
    for missing, message in (
        ("gone", "adapter_config.json can't be read"),
        ("m", "adapter_config"),
    ):
        with pytest.raises(ModelLoadFailed, match=message):
            load(source(folder), PoolLimits(), ledger, Recipe(adapter=tmp_path / missing))
    make_tiny_adapter(tmp_path / "adapter", folder)
    (tmp_path / "adapter" / "adapters.safetensors").unlink()
    with pytest.raises(ModelLoadFailed, match=r"adapters.safetensors can't be read"):
        load(source(folder), PoolLimits(), ledger, Recipe(adapter=tmp_path / "adapter"))
    make_tiny_adapter(tmp_path / "adapter", folder)
    weights, settings = (
        tmp_path / "adapter" / name for name in ("adapters.safetensors", "adapter_config.json")
    )
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(ModelLoadFailed, match=r"adapters.safetensors is truncated or damaged"):
        load(source(folder), PoolLimits(), ledger, Recipe(adapter=tmp_path / "adapter"))
    for written, message in (
        ("{}", "has no num_layers"),
        ('{"peft_type": "LORA"}', "in PEFT's format"),
    ):
        settings.write_text(written)
        with pytest.raises(ModelLoadFailed, match=message):
            load(source(folder), PoolLimits(), ledger, Recipe(adapter=tmp_path / "adapter"))
    other = make_tiny_model(tmp_path / "other", hidden_size=32)
    make_tiny_adapter(tmp_path / "adapter", other)
    with pytest.raises(ModelLoadFailed, match=r"m can't be loaded: .*incompatible"):
        load(source(folder), PoolLimits(), ledger, Recipe(adapter=tmp_path / "adapter"))
    assert "weights:m" not in ledger.figures()


def test_the_owner_may_shorten_the_context_and_not_lengthen_it(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m")
    shorter = load(source(folder), PoolLimits(), Ledger(PLENTY), Recipe(context_length=100))
    assert shorter.context_length == 100
    with pytest.raises(ModelLoadFailed, match="context_length of 4096, and it can take 2048"):
        load(source(folder), PoolLimits(), Ledger(PLENTY), Recipe(context_length=4096))


def test_a_models_own_weights_setting_goes_before_the_servers(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "m", dtype=mx.bfloat16)
    loaded = load(source(folder), PoolLimits(), Ledger(PLENTY), Recipe(weights="keep"))
    assert loaded.weights.reason == "the setting is keep"
