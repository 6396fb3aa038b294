from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_encoders import make_tiny_encoder
from tiny_models import make_tiny_model

from mlx_manager.demo_model import demo_model_path
from mlx_manager.mlx_server.api.v1.models import card
from mlx_manager.mlx_server.config import (
    DEMO_MODEL,
    DEMO_VISION_MODEL,
    EMBEDDED,
    CatalogSources,
)
from mlx_manager.mlx_server.errors import ModelNotFound
from mlx_manager.mlx_server.models.architectures import has_architecture
from mlx_manager.mlx_server.models.catalog import RESCAN_SECONDS, Catalog
from mlx_manager.mlx_server.models.settings import ModelSettings, ModelsFile
from mlx_manager.mlx_server.models.status import ModelStatus


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def catalog(
    tmp_path: Path, clock: Clock | None = None, models: ModelsFile | None = None, **sources: object
) -> Catalog:
    return Catalog(
        CatalogSources(**sources),  # type: ignore[arg-type]
        models,
        cache_folder=tmp_path / "hub",
        clock=clock or Clock(),
    )


def cached_model(tmp_path: Path, repository: str, model_type: str = "llama") -> Path:
    folder = tmp_path / "hub" / f"models--{repository.replace('/', '--')}" / "snapshots" / "1"
    make_tiny_model(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', f'"{model_type}"'))
    return folder


def test_embedded_model_is_offered_with_nothing_configured(tmp_path: Path):
    source, *_ = catalog(tmp_path).models()
    assert (source.id, source.path, source.origin) == (DEMO_MODEL, demo_model_path(), "embedded")
    assert source.family == "llama"
    assert source.context_length > 0


def test_every_place_is_looked_at_and_the_default_comes_first(tmp_path: Path):
    own = make_tiny_model(tmp_path / "own", "qwen3")
    make_tiny_model(tmp_path / "models" / "flat", "mistral")
    make_tiny_model(tmp_path / "models" / "owner" / "deep", "gemma2")
    (tmp_path / "models" / "not-a-model").mkdir()
    cached_model(tmp_path, "owner/cached")
    models = catalog(
        tmp_path,
        default_model=str(own),
        available_models=("owner/cached", "owner/elsewhere"),
        models_dir=tmp_path / "models",
    ).models()
    assert [(model.id, model.origin, model.model_type) for model in models] == [
        (str(own), "configured", "qwen3"),
        (DEMO_MODEL, "embedded", "llama"),
        (DEMO_VISION_MODEL, "embedded", "idefics3"),
        ("owner/cached", "configured", "llama"),
        ("owner/elsewhere", "configured", ""),
        ("flat", "models_dir", "mistral"),
        ("owner/deep", "models_dir", "gemma2"),
    ]
    assert models[4].path is None
    assert models[0].nbytes == (own / "model.safetensors").stat().st_size
    assert models[0].context_length == 2048


def test_folders_that_come_and_go_meanwhile_hide_no_others(tmp_path: Path):
    make_tiny_model(tmp_path / "models" / "fine")
    looked = threading.Event()

    def come_and_go() -> None:
        while not looked.is_set():
            for number in range(20):
                (tmp_path / "models" / f"passing-{number}").mkdir()
            for number in range(20):
                (tmp_path / "models" / f"passing-{number}").rmdir()

    models = catalog(tmp_path, models_dir=tmp_path / "models")
    others = threading.Thread(target=come_and_go)
    others.start()
    try:
        for _ in range(300):
            models.rescan()
            assert [model.id for model in models.models()] == [*EMBEDDED, "fine"]
    finally:
        looked.set()
        others.join()


def test_a_folder_within_a_models_is_a_part_of_it(tmp_path: Path):
    make_tiny_encoder(tmp_path / "models" / "flat")
    make_tiny_encoder(tmp_path / "models" / "owner" / "deep")
    assert (tmp_path / "models" / "flat" / "1_Pooling" / "config.json").is_file()
    offered = catalog(tmp_path, models_dir=tmp_path / "models").models()
    assert [source.id for source in offered] == [*EMBEDDED, "flat", "owner/deep"]


def test_models_three_folders_deep_are_found(tmp_path: Path):
    make_tiny_model(tmp_path / "models" / "owner" / "name" / "4bit")
    make_tiny_model(tmp_path / "models" / "owner" / "name" / "8bit")
    make_tiny_encoder(tmp_path / "models" / "owner" / "encoders" / "bge")
    offered = catalog(tmp_path, models_dir=tmp_path / "models").models()
    names = ["owner/encoders/bge", "owner/name/4bit", "owner/name/8bit"]
    assert [source.id for source in offered] == [*EMBEDDED, *names]
    named = catalog(tmp_path, models_dir=tmp_path / "models", default_model=names[1])
    assert named.find(names[1]).path == tmp_path / "models" / names[1]


@pytest.mark.parametrize("within", ["", "hub"])
def test_a_folder_of_models_may_be_a_cache_of_the_hub(
    tmp_path: Path, within: str, caplog: pytest.LogCaptureFixture
):
    cached_model(tmp_path, "owner/text")
    cached_model(tmp_path, "owner/speech", "whisper")
    make_tiny_model(tmp_path / "hub" / "beside")
    models_dir = tmp_path / "hub" if not within else tmp_path
    found = catalog(tmp_path, models_dir=models_dir, hf_cache=False)
    beside = f"{within}/beside".strip("/")
    assert [source.id for source in found.models()] == [*EMBEDDED, beside, "owner/text"]
    assert found.find("owner/text").origin == "models_dir"
    named = catalog(tmp_path, models_dir=tmp_path / "hub", default_model="owner/text")
    assert named.find("owner/text").path is not None
    assert caplog.text == ""


def a_model(folder: Path) -> None:
    make_tiny_model(folder)


def weights_alone(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.gguf").touch()


def begun_downloads(folder: Path) -> None:
    begun = folder / "models--owner--begun" / "snapshots" / "1"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text('{"model_type": "llama"}')


def too_deep(folder: Path) -> None:
    make_tiny_model(folder / "a" / "b" / "c" / "d")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.mkdir, "no model was found in .*models. Looked for were NAME/config.json"),
        (weights_alone, "no model was found in .*VARIANT/config.json in it, and a Hugging Face"),
        (too_deep, "no model was found in .*models"),
        (a_model, "models is a model and no folder of models: name it with --model"),
        (begun_downloads, "none of the models in .*models can be served: owner/begun. A model is"),
    ],
)
def test_a_folder_of_models_without_any_is_told_of_once(
    tmp_path: Path,
    make: Callable[[Path], None],
    said: str,
    caplog: pytest.LogCaptureFixture,
):
    make(tmp_path / "models")
    clock = Clock()
    found = catalog(tmp_path, clock, models_dir=tmp_path / "models")
    for _ in range(3):
        assert [source.id for source in found.models()] == [*EMBEDDED]
        clock.now += RESCAN_SECONDS
    assert re.search(said, caplog.text)
    assert len(caplog.records) == 1
    make_tiny_model(tmp_path / "models" / "fine")
    assert len(found.models()) == len(EMBEDDED) + 1
    assert len(caplog.records) == 1


def test_a_file_that_is_never_read_hides_no_other_model(tmp_path: Path):
    make_tiny_model(tmp_path / "models" / "fine")
    for name in ("config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        folder = make_tiny_model(tmp_path / "models" / name.replace(".", "-"))
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert len(catalog(tmp_path, models_dir=tmp_path / "models").models()) == len(EMBEDDED) + 4


def test_only_what_the_owner_allows_is_downloadable(tmp_path: Path):
    def downloadable(**sources: object) -> dict[str, bool]:
        models = catalog(tmp_path, available_models=("a/more",), **sources).models()
        return {model.id: model.downloadable for model in models if model.path is None}

    assert downloadable() == {"a/more": False}
    assert downloadable(allow_download=True) == {"a/more": True}
    assert downloadable(default_model="a/first") == {"a/first": True, "a/more": False}


def test_cache_offers_only_architectures_that_can_be_run(tmp_path: Path):
    cached_model(tmp_path, "owner/text", "llama")
    cached_model(tmp_path, "owner/speech", "whisper")
    assert [model.id for model in catalog(tmp_path).models()] == [*EMBEDDED, "owner/text"]
    assert len(catalog(tmp_path, hf_cache=False).models()) == len(EMBEDDED)
    named = catalog(tmp_path, default_model="owner/text", hf_cache=False).find("owner/text")
    assert named.path is not None
    for model_type in ("llama", "mistral", "qwen3_next", "falcon_mamba"):
        assert has_architecture(model_type)


def test_broken_folder_is_offered_so_that_loading_can_say_what_is_wrong(tmp_path: Path):
    broken = tmp_path / "models" / "broken"
    broken.mkdir(parents=True)
    (broken / "config.json").write_text("{")
    source = catalog(tmp_path, models_dir=tmp_path / "models").find("broken")
    assert (source.path, source.model_type, source.nbytes) == (broken, "", 0)
    assert catalog(tmp_path, default_model="./absent").find("./absent").path == Path("absent")


@pytest.mark.parametrize(
    "config",
    [
        '{"model_type": "llama", "architectures": [null]}',
        '{"model_type": "llama", "architectures": 5}',
        '{"model_type": "llama", "text_config": "x"}',
        '{"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": Infinity}}',
        '{"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": NaN}}',
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=["no name", "a number", "a text", "infinite", "NaN", "deep"],
)
def test_a_config_of_nonsense_hides_no_other_model(tmp_path: Path, config: str):
    for name in ("a", "z"):
        make_tiny_model(tmp_path / "models" / name)
    (tmp_path / "models" / "odd").mkdir()
    (tmp_path / "models" / "odd" / "config.json").write_text(config)
    models = catalog(tmp_path, models_dir=tmp_path / "models").models()
    assert [source.id for source in models] == [*EMBEDDED, "a", "odd", "z"]


@pytest.mark.parametrize(
    ("architecture", "file", "changes"),
    [
        ("bert", "sentence_bert_config.json", {"max_seq_length": 12.5}),
        ("bert", "sentence_bert_config.json", {"max_seq_length": "12"}),
        ("bert", "sentence_bert_config.json", {"max_seq_length": -1}),
        ("bert", "sentence_bert_config.json", {"max_seq_length": True}),
        ("bert", "config.json", {"model_type": "\ud800"}),
        ("roberta", "config.json", {"max_position_embeddings": 4}),
        ("qwen3", "config.json", {"rope_scaling": {"rope_type": "linear", "factor": -1}}),
    ],
)
def test_what_a_folder_says_and_can_not_be_spoils_no_answer_about_models(
    tmp_path: Path, architecture: str, file: str, changes: dict[str, object]
):
    folder = make_tiny_encoder(tmp_path / "models" / "odd", architecture)
    said = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(said | changes))
    found = catalog(tmp_path, models_dir=tmp_path / "models").find("odd")
    status = ModelStatus(
        found.id,
        "loadable",
        found.origin,
        found.family,
        found.model_type,
        found.context_length,
        found.nbytes,
        kind=found.kind,
    )
    assert card(status, {}, 0).model_dump_json()
    assert found.context_length >= 0


@pytest.mark.parametrize("name", ["x" * 300, "/" + "x" * 300])
def test_a_name_that_no_folder_can_have_hides_no_other_model(tmp_path: Path, name: str):
    make_tiny_model(tmp_path / "models" / "a")
    offered = catalog(tmp_path, default_model=name, models_dir=tmp_path / "models").models()
    assert [source.id for source in offered] == [name, *EMBEDDED, "a"]
    assert offered[0].nbytes == 0


def test_a_name_that_is_no_text_is_not_offered(tmp_path: Path):
    make_tiny_model(tmp_path / "models" / "für alle")
    folder = make_tiny_model(tmp_path / "models" / "bad")
    try:
        folder.rename(folder.with_name(os.fsdecode(b"bad\xffname")))
    except OSError:
        pytest.skip("this file system has no such names")
    models = catalog(tmp_path, models_dir=tmp_path / "models").models()
    assert [source.id for source in models] == [*EMBEDDED, "für alle"]


@pytest.mark.parametrize("name", ["gone", "x" * 300])
def test_a_folder_of_models_that_is_none_offers_none(tmp_path: Path, name: str):
    models = catalog(tmp_path, models_dir=tmp_path / name).models()
    assert [source.id for source in models] == [*EMBEDDED]


def test_weights_that_come_after_the_config_are_counted(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "models" / "m")
    weights = folder / "model.safetensors"
    size = weights.stat().st_size
    weights.rename(tmp_path / weights.name)
    models = catalog(tmp_path, models_dir=tmp_path / "models")
    assert models.find("m").nbytes == 0
    (tmp_path / weights.name).rename(weights)
    models.rescan()
    assert models.find("m").nbytes == size


@pytest.mark.parametrize("name", ["", "..", "../own", "owner/../own", "/etc", "OWN", "own/"])
def test_a_name_is_looked_up_and_never_a_path(tmp_path: Path, name: str):
    make_tiny_model(tmp_path / "models" / "own")
    models = catalog(tmp_path, models_dir=tmp_path / "models")
    assert models.find("own").path == tmp_path / "models" / "own"
    with pytest.raises(
        ModelNotFound, match=r"Offered: mlx-manager/demo, mlx-manager/demo-vision, own\."
    ) as refusal:
        models.find(name)
    assert refusal.value.param == "model"


def test_disk_is_read_again_after_a_while_or_when_told(tmp_path: Path):
    clock = Clock()
    models = catalog(tmp_path, clock, models_dir=tmp_path / "models")
    assert len(models.models()) == len(EMBEDDED)
    make_tiny_model(tmp_path / "models" / "one")
    assert len(models.models()) == len(EMBEDDED)
    clock.now += RESCAN_SECONDS
    assert len(models.models()) == len(EMBEDDED) + 1
    make_tiny_model(tmp_path / "models" / "two")
    models.rescan()
    assert len(models.models()) == len(EMBEDDED) + 2


def test_changed_config_is_read_again(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "models" / "m")
    models = catalog(tmp_path, models_dir=tmp_path / "models")
    assert models.find("m").context_length == 2048
    config = folder / "config.json"
    config.write_text(config.read_text().replace("2048", "4096"))
    models.rescan()
    assert models.find("m").context_length == 4096


def test_what_a_model_is_for_is_known_while_its_lengths_are_not_and_those_once_they_are_mended(
    tmp_path: Path,
):
    clock = Clock()
    folders = {
        "bert": make_tiny_encoder(tmp_path / "models" / "bert") / "sentence_bert_config.json",
        "llama": make_tiny_model(tmp_path / "models" / "llama") / "tokenizer_config.json",
    }
    found = catalog(tmp_path, clock, models_dir=tmp_path / "models")
    for text, lengths in (("{", (0, 0)), ("{}", (128, 2048))):
        for file in folders.values():
            file.write_text(text)
        clock.now += RESCAN_SECONDS
        sources = [found.find(name) for name in folders]
        assert [source.kind for source in sources] == ["embedding", "text"]
        assert [source.model_type for source in sources] == ["bert", "llama"]
        assert tuple(source.context_length for source in sources) == lengths


def test_only_what_the_owner_allows_can_be_named(tmp_path: Path):
    for name in ("a/one", "a/two", "b"):
        make_tiny_model(tmp_path / "models" / name)
    allowed = catalog(tmp_path, models=ModelsFile(allow=("a/*",)), models_dir=tmp_path / "models")
    assert [model.id for model in allowed.models()] == [DEMO_MODEL, "a/one", "a/two"]
    assert allowed.allows(DEMO_MODEL), "the model that the server is started with"
    assert not allowed.allows("b")
    with pytest.raises(ModelNotFound, match=r"Offered: mlx-manager/demo, a/one, a/two\."):
        allowed.find("b")
    allowed.configure(ModelsFile(models={"c": ModelSettings(base="b")}))
    assert allowed.has("b")
    assert allowed.has("c")
    assert allowed.find("b").id == "b"


def test_a_name_of_the_owners_stands_for_the_files_of_another(tmp_path: Path):
    make_tiny_model(tmp_path / "models" / "base", "qwen3")
    elsewhere = make_tiny_model(tmp_path / "elsewhere")
    made = {
        "support": ModelSettings(base="base"),
        "folder": ModelSettings(base=str(elsewhere)),
        "hub": ModelSettings(base="owner/name"),
        "base": ModelSettings(pinned=True),
    }
    models = catalog(
        tmp_path,
        models=ModelsFile(("support", "folder", "hub"), made),
        models_dir=tmp_path / "models",
    )
    support = models.find("support")
    assert (support.path, support.model_type) == (tmp_path / "models" / "base", "qwen3")
    assert models.find("folder").path == elsewhere
    assert (models.find("hub").path, models.find("hub").downloadable) == (None, False)
    with pytest.raises(ModelNotFound, match="no model 'base'"):
        models.find("base")


def test_what_is_downloaded_for_a_name_of_the_owners_is_its_base(tmp_path: Path):
    file = ModelsFile(models={"support": ModelSettings(base="owner/weights")})
    source = catalog(tmp_path, models=file, allow_download=True).find("support")
    assert (source.path, source.repository, source.downloadable) == (None, "owner/weights", True)


def test_the_default_model_may_be_named_as_the_folder_of_models_has_it(tmp_path: Path):
    folder = make_tiny_model(tmp_path / "models" / "owner" / "own")
    source, *others = catalog(
        tmp_path, default_model="owner/own", models_dir=tmp_path / "models"
    ).models()
    assert (source.id, source.path, source.origin) == ("owner/own", folder, "models_dir")
    assert [other.id for other in others] == [*EMBEDDED]
