"""Encoders against what sentence-transformers and transformers (PyTorch) make of the same folders.

The references were computed once, one text at a time, and are kept beside the tests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import pytest_asyncio
from here import start_here
from minilm import TEXTS, minilm_folder
from pools import events_of
from safetensors.numpy import load_file, save_file
from tiny_encoders import (
    ASKED,
    CLS,
    EMBEDDERS,
    JUDGES,
    NO,
    QUERY,
    RERANKERS,
    ROLES,
    SAID,
    SEP,
    YES,
    make_tiny_encoder,
    make_tiny_judge,
    type_of,
    write,
)

from mlx_manager.mlx_server.backends.embedding import EncoderBackend
from mlx_manager.mlx_server.backends.tokenising import AT_ONCE, HEAD
from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.core import EmbeddingRequest, GenerationRequest, RerankRequest, Text
from mlx_manager.mlx_server.encoders import encoder
from mlx_manager.mlx_server.encoders import loop as encoder_engine
from mlx_manager.mlx_server.encoders.encoder import EncoderModel
from mlx_manager.mlx_server.encoders.loop import EncoderEngine
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidParameter,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotSupported,
    UnsupportedParameter,
    WrongModelKind,
)
from mlx_manager.mlx_server.main import open_pool
from mlx_manager.mlx_server.models.pool import ModelPoolManager

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFERENCES = Path(__file__).parent.parent / "references"
TINY = json.loads((REFERENCES / "tiny_encoders.json").read_text())


def matrix(encoded: Any) -> np.ndarray[Any, Any]:
    return np.array([list(row) for row in encoded.rows], np.float32)


def are_alike(a: Any, b: Any) -> bool:
    """Equal but for rounding, which differs by a text's place in a batch on some processors."""
    return bool(np.abs(a - b).max() < 1e-5)


def quantize(folder: Path) -> None:
    """As a converter to MLX leaves a model: packed layers, and said so in config.json."""
    stored: Any = mx.load(str(folder / "model.safetensors"))
    packed: dict[str, mx.array] = {}
    for name, array in stored.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and array.ndim == 2 and array.shape[1] % 32 == 0:
            parts = mx.quantize(array, group_size=32, bits=8)
            packed |= dict(zip((name, f"{layer}.scales", f"{layer}.biases"), parts, strict=True))
        else:
            packed[name] = array.astype(mx.float16)
    mx.save_safetensors(str(folder / "model.safetensors"), packed, {"format": "mlx"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": 8}
    (folder / "config.json").write_text(json.dumps(config))


def take_in(folder: Path, *, leaving: bool) -> None:
    """Put the layers after the pooling among the model's weights, as a converter to MLX does.

    leaving: the folders of these layers stay, without their weights.
    """
    weights = load_file(folder / "model.safetensors")
    for index, place in enumerate(sorted(folder.glob("*_Dense"))):
        file = place / "model.safetensors"
        for name, array in load_file(file).items():
            weights[f"dense.{index}.{name.removeprefix('linear.')}"] = array
        file.unlink()
        if not leaving:
            (place / "config.json").unlink()
            place.rmdir()
    save_file(weights, folder / "model.safetensors", {"format": "mlx"})


@pytest.fixture(scope="module")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    for name, how in EMBEDDERS.items():
        make_tiny_encoder(folder / name, type_of(name), **how)
        quantize(make_tiny_encoder(folder / f"packed-{name}", type_of(name), **how))
    for name, how in JUDGES.items():
        make_tiny_judge(folder / name, **how)
        if not how.get("template") and not how.get("reranker"):
            quantize(make_tiny_judge(folder / f"packed-{name}", **how))
    for name in ("gemma-apart", "gemma-inside", "gemma-bare", "gemma-packed"):
        made = make_tiny_encoder(
            folder / name,
            "gemma3_text",
            pooling="mean_tokens",
            dense=(48, 32),
            activation="Identity",
        )
        if name != "gemma-apart":
            take_in(made, leaving=name == "gemma-inside")
        if name == "gemma-packed":
            quantize(made)
    for name in RERANKERS:
        make_tiny_encoder(folder / f"rank-{name}", name, reranker=True)
    make_tiny_encoder(folder / "quiet")
    make_tiny_encoder(folder / "matryoshka", is_matryoshka=True, matryoshka_dimensions=[8, 16, 32])
    prompted = make_tiny_encoder(folder / "prompted")
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": None}
    (prompted / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    for name in ("beyond", "rank-beyond"):
        beyond = make_tiny_encoder(folder / name, reranker=name.startswith("rank"))
        tokenizer = json.loads((beyond / "tokenizer.json").read_text())
        last = tokenizer["added_tokens"][-1]
        tokenizer["added_tokens"].append({**last, "id": 260, "content": "<image>"})
        (beyond / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("damaged", "rank-damaged"):
        damaged = make_tiny_encoder(folder / name, reranker=name.startswith("rank"))
        weights = load_file(damaged / "model.safetensors")
        embedded = next(key for key in weights if key.endswith("word_embeddings.weight"))
        vocabulary = json.loads((damaged / "tokenizer.json").read_text())["model"]["vocab"]
        weights[embedded][vocabulary["~"]] = np.nan
        save_file(weights, damaged / "model.safetensors", {"format": "pt"})
    shouting = make_tiny_encoder(folder / "short")
    (shouting / "sentence_bert_config.json").write_text('{"max_seq_length": 8, "do_lower_case": 1}')
    make_tiny_encoder(folder / "logits", reranker=True, sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})  # fmt: skip
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(models_dir: Path) -> AsyncIterator[ModelPoolManager]:
    settings = MLXServerSettings(models_dir=models_dir, hf_cache=False, max_models=80)
    async with open_pool(settings, start=start_here) as opened:
        assert isinstance(opened, ModelPoolManager)
        yield opened


async def embed(
    pool: ModelPoolManager, model: str, *inputs: str | tuple[int, ...], **asked: Any
) -> Any:
    async with pool.lease(model, "embedding") as lease:
        return await lease.backend.embed(EmbeddingRequest(model, inputs, **asked), lambda: None)


async def rank(pool: ModelPoolManager, model: str, *documents: str, **asked: Any) -> Any:
    async with pool.lease(model, "reranker") as lease:
        return await lease.backend.rank(
            RerankRequest(model, QUERY, documents, **asked), lambda: None
        )


@pytest.mark.parametrize("name", EMBEDDERS)
async def test_vectors_are_the_references(pool: ModelPoolManager, name: str):
    expected = np.array(TINY["embed"][name])
    found = matrix(await embed(pool, name, *SAID))
    assert np.abs(found[:, :8] - expected).max() < 3e-5
    if EMBEDDERS[name].get("normalize", True):
        assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("name", RERANKERS)
async def test_scores_are_the_references(pool: ModelPoolManager, name: str):
    expected = TINY["rank"][name]
    scores = matrix(await rank(pool, f"rank-{name}", *SAID))[:, 0]
    logits = matrix(await rank(pool, f"rank-{name}", *SAID, activate=False))[:, 0]
    assert np.abs(scores - expected["scores"]).max() < 3e-5
    assert np.abs(logits - expected["logits"]).max() < 1e-4


@pytest.mark.parametrize("name", JUDGES)
async def test_a_reranker_that_answers_with_a_word_scores_as_its_makers_say(
    pool: ModelPoolManager, name: str
):
    scores = matrix(await rank(pool, name, *SAID))[:, 0]
    assert np.abs(scores - TINY["judge"][name]).max() < 3e-5
    if (asked := TINY["judge"].get(f"{name}, asked")) is not None:
        instructed = matrix(await rank(pool, name, *SAID, instruction=ASKED))[:, 0]
        assert np.abs(instructed - asked).max() < 3e-5


async def test_an_instruction_is_refused_where_there_is_no_place_for_it(pool: ModelPoolManager):
    with pytest.raises(UnsupportedParameter, match="`instruction`: rank-bert takes none"):
        await rank(pool, "rank-bert", "a", instruction=ASKED)


async def test_a_document_is_cut_and_the_text_around_it_is_not(pool: ModelPoolManager):
    name = "Qwen3-Reranker-tied"
    whole = await rank(pool, name, "x")
    cut = await rank(pool, name, "x" + "y" * 2000, truncate=whole.tokens)
    assert cut.tokens == whole.tokens
    assert are_alike(matrix(cut), matrix(whole))
    assert (await rank(pool, name, "y" * 2000, truncate=-1)).tokens == 1024
    with pytest.raises(ContextLengthExceeded, match="the query and document 1 resulted in"):
        await rank(pool, name, "x", "y" * 2000)
    with pytest.raises(ContextLengthExceeded, match="the query resulted in"):
        await rank(pool, name, "x", instruction="z" * 2000)
    with pytest.raises(InvalidParameter, match="which leaves nothing of 100 for a document"):
        await rank(pool, name, "x", truncate=100)


async def test_sentence_transformers_tells_the_words_of_a_reranker(tmp_path: Path):
    for name, own in (("both", {"false_token_id": NO}), ("one", {"false_token_id": None})):
        folder = make_tiny_judge(tmp_path / name, template=ROLES)
        kinds = {"": "base.modules.transformer.Transformer", "1_LogitScore": "cross_encoder.modules.logit_score.LogitScore"}  # fmt: skip
        modules = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]  # fmt: skip
        write(folder / "modules.json", modules)
        write(folder / "1_LogitScore" / "config.json", {"true_token_id": YES, **own})
        prompts = {"prompts": {"foxes": "Judge it."}, "default_prompt_name": "foxes"}
        write(folder / "config_sentence_transformers.json", prompts)
    settings = MLXServerSettings(models_dir=tmp_path, hf_cache=False)
    async with open_pool(settings, start=start_here) as pool:
        both = matrix(await rank(pool, "both", *SAID))[:, 0]
        one = matrix(await rank(pool, "one", *SAID, activate=False))[:, 0]
    # The prompt is the template's default.
    assert np.abs(both - TINY["judge"]["template"]).max() < 3e-5
    assert not np.allclose(one, np.log(both / (1 - both)), atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classifier_from_token": ["no", "maybe"]}, "its tokenizer has no token 'maybe'"),
        ({"classifier_from_token": "yes"}, "classifier_from_token 'yes'; two tokens"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "A"}}, "nothing tells in which text query and document"),
        ({"auto_map": {"AutoModel": "own.Model"}, "classifier_from_token": ["no", "yes"]}, "comes with code of its own"),
        ({"model_type": "gemma3_text", "classifier_from_token": ["no", "yes"]}, "a 'gemma3_text' reranker that answers with a word"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "classifier_from_token": ["no", "yes"]}, "a RoPE scaling"),
    ],
)  # fmt: skip
async def test_a_reranker_whose_words_or_text_are_not_known_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
):
    make_tiny_judge(tmp_path / "odd", **change)
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises((ModelNotSupported, ModelLoadFailed), match=message):
            await pool.get_model("odd")


async def test_a_reranker_may_be_without_an_activation(pool: ModelPoolManager):
    plain = matrix(await rank(pool, "logits", *SAID))
    assert np.abs(plain[:, 0] - TINY["rank"]["bert"]["logits"]).max() < 1e-4


@pytest.mark.parametrize(
    "name", [*EMBEDDERS, "rank-bert", "rank-modernbert", "Qwen3-Reranker-tied"]
)
async def test_a_text_gives_the_same_whoever_shares_its_batch(pool: ModelPoolManager, name: str):
    texts = [" ".join(SAID)[: 3 + 6 * n] for n in range(16)]
    ask = embed if name in EMBEDDERS else rank
    together = matrix(await ask(pool, name, *texts))
    alone = np.concatenate([matrix(await ask(pool, name, text)) for text in texts])
    at_once = await asyncio.gather(*(ask(pool, name, text) for text in texts))
    assert np.abs(together - alone).max() < 2e-5
    assert np.abs(np.concatenate([matrix(one) for one in at_once]) - alone).max() < 2e-5


@pytest.mark.parametrize(
    "name", [*EMBEDDERS, "rank-bert", "rank-modernbert", "Qwen3-Reranker-tied"]
)
async def test_a_text_gives_the_same_a_layer_at_a_time(
    pool: ModelPoolManager, name: str, monkeypatch: pytest.MonkeyPatch
):
    ask = embed if name in EMBEDDERS else rank
    alone, parts = matrix(await ask(pool, name, *SAID)), []
    go_on, begin = EncoderEngine._go_on, EncoderEngine._begin

    def begun(engine: EncoderEngine) -> Any:
        monkeypatch.setattr(engine, "_by_layers", True)
        return begin(engine)

    def in_parts(engine: EncoderEngine, *given: Any) -> Any:
        # As if each layer took long.
        monkeypatch.setattr(encoder_engine, "ALONE", 0.0)
        parts.append(1)
        return go_on(engine, *given)

    monkeypatch.setattr(EncoderEngine, "_begin", begun)
    monkeypatch.setattr(EncoderEngine, "_go_on", in_parts)
    assert np.abs(matrix(await ask(pool, name, *SAID)) - alone).max() < 2e-5
    assert len(parts) > 1


async def test_hundreds_of_texts_keep_their_order(pool: ModelPoolManager):
    texts = [f"{n} {SAID[n % 4][: n % 7]}" for n in range(2 * AT_ONCE + 5)]
    together = await embed(pool, "bert-mean", *texts)
    assert together.tokens == sum(len(text.encode()) + 2 for text in texts)
    for index in (0, AT_ONCE - 1, AT_ONCE, 2 * AT_ONCE, len(texts) - 1):
        alone = matrix(await embed(pool, "bert-mean", texts[index]))
        assert np.abs(matrix(together)[index] - alone[0]).max() < 2e-5


@pytest.mark.parametrize(
    "name", ["bert-max", "gemma3_text", "modernbert", "mpnet", "qwen3", "rank-modernbert"]
)
async def test_a_text_gives_the_same_in_a_batch_that_is_filled_up(
    pool: ModelPoolManager, name: str, monkeypatch: pytest.MonkeyPatch
):
    async def answered() -> np.ndarray[Any, Any]:
        texts = ("hello world", "hello there", "hello, you")
        return matrix(await (rank if name.startswith("rank") else embed)(pool, name, *texts))

    alone, shapes = await answered(), []

    def filled_up(self: EncoderModel, rows: int, longest: int) -> tuple[int, int]:
        shapes.append(encoder.next_shape(rows, longest))
        return shapes[-1]

    monkeypatch.setattr(EncoderModel, "filled_up", filled_up)
    assert np.abs(await answered() - alone).max() < 1e-5
    assert (4, 64) in shapes


async def test_minilm_gives_its_published_references_vectors():
    folder = minilm_folder()
    packed = json.loads((REFERENCES / "minilm.json").read_text())
    expected = np.stack([np.frombuffer(base64.b64decode(row), "<f2") for row in packed])
    settings = MLXServerSettings(model=str(folder), hf_cache=False)
    async with open_pool(settings, start=start_here) as pool:
        found = await embed(pool, str(folder), *TEXTS, truncate=-1)
        few = matrix(await embed(pool, str(folder), *TEXTS[::-3], truncate=-1))
    # The references are kept in 16 bits.
    assert np.abs(matrix(found) - expected).max() < 2e-4
    assert np.abs(few - expected[::-3]).max() < 2e-4
    assert max(map(len, found.rows)) == 384


async def test_token_ids_are_read_as_they_are(pool: ModelPoolManager):
    given = (CLS, *b"hello", SEP)
    async with pool.lease("bert-mean") as lease:
        ids = (await lease.backend.tokenize(Text("hello"))).ids
        assert await lease.backend.detokenize(ids) == "[CLS]hello[SEP]"
    by_text, by_ids = matrix(await embed(pool, "bert-mean", "hello", tuple(ids)))
    assert are_alike(by_text, by_ids)
    assert len(ids) == len(given)
    with pytest.raises(
        InvalidParameter, match=r"`input\[1\]`: token ids must be between 0 and 259"
    ):
        await embed(pool, "bert-mean", "x", (5, 260))


async def test_a_token_that_the_model_was_never_given_is_refused(pool: ModelPoolManager):
    with pytest.raises(InvalidRequest, match=r"`input\[1\]` has the token '<image>' \(260\)"):
        await embed(pool, "beyond", "x", "a <image>")
    with pytest.raises(InvalidRequest, match=r"`documents\[0\]` has the token '<image>'"):
        await rank(pool, "rank-beyond", "<image>")
    assert (await embed(pool, "beyond", "x")).tokens == 3


async def test_what_is_no_number_is_a_failure_that_names_the_text(pool: ModelPoolManager):
    with pytest.raises(GenerationFailed, match=r"text 1 .* no finite number"):
        await embed(pool, "damaged", "a", "a~", "b")
    with pytest.raises(GenerationFailed, match=r"text 2 .* no finite number"):
        await rank(pool, "rank-damaged", "a", "b", "a~")
    assert len((await embed(pool, "damaged", "a", "b")).rows) == 2


async def test_tokens_are_counted_with_the_special_ones(pool: ModelPoolManager):
    assert (await embed(pool, "bert-mean", "abc", (1, 2))).tokens == 5 + 2
    assert (await embed(pool, "qwen3", "abc")).tokens == 4
    assert (await rank(pool, "rank-bert", "abc", "d")).tokens == 2 * (3 + len(QUERY)) + 3 + 1
    assert (await rank(pool, "rank-roberta", "abc")).tokens == 4 + len(QUERY) + 3


async def test_what_is_too_long_is_refused_or_cut_as_asked(pool: ModelPoolManager):
    refusal = "maximum context length is 128 tokens. However, input 1 resulted in 202 tokens"
    with pytest.raises(ContextLengthExceeded, match=refusal) as error:
        await embed(pool, "bert-mean", "x", "y" * 200)
    assert error.value.param == "input[1]"
    cut = await embed(pool, "bert-mean", "y" * 200, truncate=-1)
    assert cut.tokens == 128
    assert are_alike(matrix(cut), matrix(await embed(pool, "bert-mean", "y" * 126)))
    shorter = await embed(pool, "bert-mean", "abcdefgh", truncate=5)
    assert are_alike(matrix(shorter), matrix(await embed(pool, "bert-mean", "abc")))
    ids = await embed(pool, "bert-mean", tuple(b"abcdefgh"), truncate=3)
    assert ids.tokens == 3
    for most in (0, 2, 129):
        with pytest.raises(InvalidParameter, match="-1 or between 3 and 128"):
            await embed(pool, "bert-mean", "x", truncate=most)
    with pytest.raises(ContextLengthExceeded, match=r"query and document 1 resulted in \d+ tokens"):
        await rank(pool, "rank-bert", "x", "y" * 200)
    assert (await rank(pool, "rank-bert", "y" * 200, truncate=40)).tokens == 40


@pytest.fixture(name="tokenised")
def _tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many characters the encoders' tokenizers were given in each call."""
    calls: list[int] = []
    encode = EncoderBackend._encode

    def counted(self: EncoderBackend, texts: Sequence[str]) -> list[list[int]]:
        calls.append(sum(map(len, texts)))
        return encode(self, texts)

    monkeypatch.setattr(EncoderBackend, "_encode", counted)
    return calls


async def test_of_a_text_that_is_far_too_long_only_the_beginning_is_made_tokens(
    pool: ModelPoolManager, tokenised: list[int]
):
    long = "word " * 100_000
    refusal = r"{} resulted in \d{{6}} tokens"
    with pytest.raises(ContextLengthExceeded, match=refusal.format("input 1")) as error:
        await embed(pool, "bert-mean", "x", long)
    assert error.value.param == "input[1]"
    with pytest.raises(
        ContextLengthExceeded, match=refusal.format("the query and document 1")
    ) as error:
        await rank(pool, "rank-bert", "x", long)
    assert error.value.param == "documents[1]"
    assert await rank(pool, "rank-bert", "y" * 200, long, truncate=40)
    cut = matrix(await embed(pool, "bert-mean", long, truncate=-1))
    assert are_alike(cut, matrix(await embed(pool, "bert-mean", long[:126])))
    assert max(tokenised) <= 2 * HEAD


async def test_a_text_that_there_will_never_be_memory_for_is_too_long(tmp_path: Path):
    for name, reranker in (("long", False), ("rank-long", True)):
        make_tiny_encoder(
            tmp_path / name, "modernbert", reranker=reranker, max_position_embeddings=4000
        )
    settings = MLXServerSettings(
        # No other model is kept.
        model=str(tmp_path / "long"),
        models_dir=tmp_path,
        hf_cache=False,
        memory_limit_gb=0.05,
    )
    refusal = r"{} resulted in (\d+) tokens\. .* [\d.,]+ \w+\..* enough for (\d+) .*`: \2\.$"
    async with open_pool(settings, start=start_here) as pool:
        assert isinstance(pool, ModelPoolManager)
        with pytest.raises(ContextLengthExceeded, match=refusal.format("input 1")) as error:
            await embed(pool, "long", "x", "y" * 3000)
        assert error.value.param == "input[1]"
        with pytest.raises(ContextLengthExceeded, match=refusal.format("the query and document 0")):
            await rank(pool, "rank-long", "y" * 3000)
        most = int(error.value.message.rpartition(" ")[2].rstrip("."))
        assert 512 < most < 3000
        assert (await embed(pool, "long", "y" * 3000, truncate=most)).tokens == most
        with pytest.raises(ContextLengthExceeded, match=refusal.format("input 0")):
            await embed(pool, "long", "y" * 3000, truncate=most + 1)


async def test_too_long_a_query_is_named(pool: ModelPoolManager, tokenised: list[int]):
    for query, said in (("q" * 200, "203 tokens"), ("q" * 100_000, r"10\d{4} tokens")):
        asked = RerankRequest("rank-bert", query, ("x", "y"))
        async with pool.lease("rank-bert", "reranker") as lease:
            with pytest.raises(
                ContextLengthExceeded, match=f" 128 tokens.*the query resulted in {said}"
            ) as error:
                await lease.backend.rank(asked, lambda: None)
        assert error.value.param == "query"
    assert max(tokenised) <= HEAD


async def test_what_a_caller_who_left_has_sent_is_not_made_tokens_any_more(
    pool: ModelPoolManager, monkeypatch: pytest.MonkeyPatch
):
    begun, go_on = threading.Event(), threading.Event()
    given: list[str] = []
    encode = EncoderBackend._encode

    def held_up(self: EncoderBackend, texts: Sequence[str]) -> list[list[int]]:
        given.extend(texts)
        begun.set()
        assert go_on.wait(30)
        return encode(self, texts)

    async with pool.lease("bert-mean"):
        monkeypatch.setattr(EncoderBackend, "_encode", held_up)
        asking = asyncio.create_task(embed(pool, "bert-mean", *("x" * 3 * AT_ONCE)))
        assert await asyncio.to_thread(begun.wait, 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        # Questions are read in order: the worker knows of the end once it has told its figures.
        await pool.look()
        go_on.set()
        await embed(pool, "bert-mean", "after")
    assert given == ["x"] * AT_ONCE + ["after"]


async def test_chats_go_on_while_texts_are_made_tokens(
    pool: ModelPoolManager, monkeypatch: pytest.MonkeyPatch
):
    go_on = threading.Event()
    encode = EncoderBackend._encode

    def held_up(self: EncoderBackend, texts: Sequence[str]) -> list[list[int]]:
        assert go_on.wait(30)
        return encode(self, texts)

    async with pool.lease("bert-mean"):
        monkeypatch.setattr(EncoderBackend, "_encode", held_up)
        # More than asyncio has threads.
        asking = [asyncio.create_task(embed(pool, "bert-mean", "x")) for _ in range(40)]
        async with asyncio.timeout(20), pool.lease("mlx-manager/demo", "text") as lease:
            asked = GenerationRequest("mlx-manager/demo", Text("Hello"), max_tokens=2)
            assert [events async for events in events_of(lease.backend, asked)]
        go_on.set()
        assert len(await asyncio.gather(*asking)) == 40


async def test_settings_of_sentence_transformers_are_honoured(pool: ModelPoolManager):
    upper, lower = matrix(await embed(pool, "short", "HELLO", "hello"))
    assert are_alike(upper, lower)
    with pytest.raises(ContextLengthExceeded, match="length is 8 tokens"):
        await embed(pool, "short", "hello world")
    sizes = {model.id: model.context_length for model in await pool.models()}
    assert (sizes["short"], sizes["roberta"], sizes["bert-mean"]) == (8, 128, 128)


async def test_a_models_own_prompts_are_put_before_texts_by_name(pool: ModelPoolManager):
    plain, by_hand = matrix(await embed(pool, "prompted", "fox", "query: fox"))
    named = matrix(await embed(pool, "prompted", "fox", prompt="query"))
    assert are_alike(named[0], by_hand)
    assert not are_alike(named[0], plain)
    assert are_alike(matrix(await embed(pool, "prompted", "fox", prompt="document"))[0], plain)
    with pytest.raises(InvalidParameter, match="no prompt 'passage'; it has: document, query"):
        await embed(pool, "prompted", "fox", prompt="passage")


async def test_vectors_are_shortened_only_where_the_model_was_made_for_it(pool: ModelPoolManager):
    whole = matrix(await embed(pool, "matryoshka", *SAID))
    short = matrix(await embed(pool, "matryoshka", *SAID, dimensions=8))
    cut = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
    assert np.abs(short - cut).max() < 1e-6
    with pytest.raises(InvalidParameter, match="should be 8, 16, 32 with this model, not 9"):
        await embed(pool, "matryoshka", "x", dimensions=9)
    with pytest.raises(UnsupportedParameter, match="32 numbers and can't be cut"):
        await embed(pool, "bert-mean", "x", dimensions=8)
    assert matrix(await embed(pool, "bert-mean", "x", dimensions=32)).shape == (1, 32)


async def test_a_model_is_refused_what_its_kind_can_not_do(pool: ModelPoolManager):
    kinds = {model.id: model.kind for model in await pool.models()}
    assert kinds["mlx-manager/demo"] == "text"
    assert kinds["bert-mean"] == kinds["qwen3"] == "embedding"
    assert {kinds[name] for name in ("rank-bert", *JUDGES)} == {"reranker"}
    assert kinds["gemma3_text"] == "embedding"
    for model, kind in (
        ("mlx-manager/demo", "embedding"),
        ("bert-cls", "text"),
        ("bert-cls", "reranker"),
        ("rank-bert", "embedding"),
    ):
        with pytest.raises(WrongModelKind, match=f"{model} is an? .*; this takes an? "):
            async with pool.lease(model, kind):  # type: ignore[call-overload]
                pass


async def test_a_model_is_not_loaded_only_to_be_refused(models_dir: Path):
    settings = MLXServerSettings(models_dir=models_dir, hf_cache=False)
    async with open_pool(settings, start=start_here) as pool:
        with pytest.raises(WrongModelKind):
            async with pool.lease("bert-mean", "text"):
                pass
        states = {model.id: model.state for model in await pool.models()}
        assert states["bert-mean"] == "loadable"


async def lines(pool: ModelPoolManager, model: str) -> set[str]:
    """Return what the ledger has lines for of a model."""
    await pool.look()
    return {line for line in pool.figures()["ledger"] if line.endswith(f":{model}")}


async def test_work_is_in_the_ledger_and_gone_when_it_is_done(pool: ModelPoolManager):
    await embed(pool, "bert-mean", "x")
    before = await lines(pool, "bert-mean")
    assert "weights:bert-mean" in before
    await embed(pool, "bert-mean", *SAID)
    assert await lines(pool, "bert-mean") == before


async def test_a_text_that_is_too_long_worries_nobody_who_reads_the_log(
    pool: ModelPoolManager, caplog: pytest.LogCaptureFixture
):
    # It tells of such a text once, and past the log's own lines.
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        await embed(pool, "quiet", "word " * 200, truncate=-1)
    finally:
        library.removeHandler(caplog.handler)
    assert not [record for record in caplog.records if record.name.startswith("transformers")]


async def waiting(pool: ModelPoolManager, model: str) -> int:
    """Return how many texts wait to be read."""
    await pool.look()
    found: int = pool.figures()["engines"][model]["rows_waiting"]
    return found


async def test_a_caller_who_goes_takes_the_work_along(pool: ModelPoolManager):
    async with pool.lease("bert-mean", "embedding") as lease:
        texts = tuple("x" * (n % 100) for n in range(2000))
        request = EmbeddingRequest("bert-mean", texts)
        asking = asyncio.create_task(lease.backend.embed(request, lambda: None))
        while not await waiting(pool, "bert-mean"):
            pass
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await embed(pool, "bert-mean", "after")
        assert await waiting(pool, "bert-mean") == 0


async def test_chats_and_embeddings_are_answered_beside_each_other(pool: ModelPoolManager):
    async def chat() -> int:
        async with pool.lease("mlx-manager/demo", "text") as lease:
            asked = GenerationRequest("mlx-manager/demo", Text("Hello"), max_tokens=40)
            return len([events async for events in events_of(lease.backend, asked)])

    texts = tuple("y" * (20 + n % 60) for n in range(400))
    chatting = asyncio.create_task(chat())
    found = await embed(pool, "bert-mean", *texts)
    assert len(found.rows) == 400
    assert await chatting > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish'; 'gelu', 'gelu_new', .* are known"),
        ({"model_type": "nomic_bert"}, "'nomic_bert' model. Embedding models and rerankers of"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'; only 'absolute'"),
        ({"num_attention_heads": 5}, "hidden size 32 is to be divided among 5 attention heads"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps -1.0; it should be a positive number"),
        ({"id2label": {"0": "A", "1": "B"}, "architectures": ["BertForSequenceClassification"]}, "classifier of 2 labels"),
        ({"hidden_size": 64}, "has the shape"),
        ({"pad_token_id": 2 * 10**9}, "the pad_token_id 2000000000, .* between 0 and 259"),
        ({"pad_token_id": 260}, "the pad_token_id 260, .* between 0 and 259"),
        ({"pad_token_id": -1}, "the pad_token_id -1, .* between 0 and 259"),
    ],
)  # fmt: skip
async def test_what_can_not_be_served_is_said(tmp_path: Path, change: dict[str, Any], message: str):
    make_tiny_encoder(tmp_path / "odd")
    config = tmp_path / "odd" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises((ModelNotSupported, ModelLoadFailed), match=message):
            await pool.get_model("odd")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"encoder.layer.0.attention.gate.weight": (4, 4)}, "no place for the weights encoder.layer.0.attention.gate"),
        ({"classifier.weight": (1, 32)}, "no place for the weights classifier.weight"),
        ({"bert.embeddings.LayerNorm.bias": (32,)}, "the weights embeddings.LayerNorm.bias twice"),
        ({"encoder.layer.1.output.dense.bias": None}, "encoder.layer.1.output.dense.bias is missing"),
        ({"encoder.layer.1.output.dense.bias": (31,)}, r"has the shape \(31,\), and by config.json it is \(32,\)"),
        ({"encoder.layer.1.output.dense.bias": b""}, "output.dense.bias has the type mlx.core.uint8"),
    ],
)  # fmt: skip
async def test_weights_that_are_not_the_models_are_named(
    tmp_path: Path, changed: dict[str, Any], message: str
):
    file = make_tiny_encoder(tmp_path / "odd") / "model.safetensors"
    weights = load_file(file)
    for name, shape in changed.items():
        match shape:
            case None:
                del weights[name]
            case bytes():
                weights[name] = weights[name].astype(np.uint8)
            case _:
                weights[name] = np.zeros(shape, np.float32)
    save_file(weights, file, {"format": "pt"})
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises(ModelLoadFailed, match=message):
            await pool.get_model("odd")
        assert not await lines(pool, "odd")


async def test_weights_for_other_tasks_are_left_out(tmp_path: Path):
    """A masked language model's head, tables that are computed, and a pooler that nothing reads."""
    folder = make_tiny_encoder(tmp_path / "bert")
    weights = {f"bert.{name}": array for name, array in load_file(folder / "model.safetensors").items()}  # fmt: skip
    weights |= {
        "cls.predictions.bias": np.zeros(260, np.float32),
        "bert.embeddings.position_ids": np.arange(128)[None],
    }
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, before in old.items():
        weights = {name.replace(new, before): array for name, array in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = MLXServerSettings(models_dir=tmp_path, hf_cache=False)
    async with open_pool(settings, start=start_here) as pool:
        found = matrix(await embed(pool, "bert", *SAID))
    assert np.abs(found[:, :8] - np.array(TINY["embed"]["bert-mean"])).max() < 3e-5


@pytest.mark.parametrize(
    ("reranker", "change", "message"),
    [
        (
            False,
            {"letters": "bcd"},
            "odd can't be loaded: its tokenizer has no token for the letter 'a'",
        ),
        (True, {"post_processor": None}, "no separator between the two texts of a pair"),
        (False, {"special": 260}, "the special token 260 to texts, .* ids are below 260"),
        (True, {"special": 3 * 10**9}, "the special token 3000000000 to texts, .* below 260"),
    ],
)
async def test_a_tokenizer_that_does_not_fit_is_told_before_the_weights_are_read(
    tmp_path: Path, reranker: bool, change: dict[str, Any], message: str
):
    file = make_tiny_encoder(tmp_path / "odd", reranker=reranker) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    match change:
        case {"letters": letters}:
            tokenizer["model"]["vocab"] = {
                letter: index for index, letter in enumerate((*letters, "[PAD]", "[CLS]", "[SEP]", "[UNK]"))
            }  # fmt: skip
        case {"special": number}:
            tokenizer["post_processor"]["special_tokens"]["[SEP]"]["ids"] = [number]
        case _:
            tokenizer |= change
    file.write_text(json.dumps(tokenizer))
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises(ModelLoadFailed, match=message):
            await pool.get_model("odd")
        assert not await lines(pool, "odd")


@pytest.mark.parametrize(("reranker", "known"), [(True, 1), (False, 0)])
async def test_a_segment_that_the_model_has_not_is_told(tmp_path: Path, reranker: bool, known: int):
    folder = make_tiny_encoder(tmp_path / "odd", reranker=reranker, type_vocab_size=known)
    arrays = load_file(folder / "model.safetensors")
    segments = next(key for key in arrays if "token_type" in key)
    arrays[segments] = arrays[segments][:known]
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises(
            ModelLoadFailed, match=rf"type_vocab_size of its config\.json is {known}"
        ):
            await pool.get_model("odd")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"sentence_bert_config\.json is not JSON"),
        ('{"max_seq_length": 12.5}', r"sentence_bert_config\.json: max_seq_length must be a whole"),
        ('{"max_seq_length": 0}', r"sentence_bert_config\.json: max_seq_length must be a whole"),
    ],
)
async def test_broken_settings_of_an_encoder_are_named_with_their_file(
    tmp_path: Path, text: str, message: str
):
    (make_tiny_encoder(tmp_path / "odd") / "sentence_bert_config.json").write_text(text)
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises(ModelLoadFailed, match=message):
            await pool.get_model("odd")


@pytest.mark.parametrize("name", EMBEDDERS)
async def test_quantised_weights_give_nearly_the_same(pool: ModelPoolManager, name: str):
    rough, exact = [matrix(await embed(pool, f"{kind}{name}", *SAID)) for kind in ("packed-", "")]
    lengths = np.linalg.norm(rough, axis=1) * np.linalg.norm(exact, axis=1)
    assert ((rough * exact).sum(axis=1) / lengths).min() > 0.995
    assert np.abs(rough - exact).max() > 0


@pytest.mark.parametrize("name", ["Qwen3-Reranker-tied", "Qwen3-Reranker-untied"])
async def test_quantised_words_rank_nearly_the_same(pool: ModelPoolManager, name: str):
    rough = matrix(await rank(pool, f"packed-{name}", *SAID))[:, 0]
    assert np.abs(rough - TINY["judge"][name]).max() < 0.05


async def test_weights_may_be_kept_as_they_are(tmp_path: Path):
    quantize(make_tiny_encoder(tmp_path / "q"))
    settings = MLXServerSettings(models_dir=tmp_path, hf_cache=False, weights="keep")
    async with open_pool(settings, start=start_here) as pool:
        rough = matrix(await embed(pool, "q", *SAID))
    assert np.abs(rough[:, :8] - np.array(TINY["embed"]["bert-mean"])).max() < 0.02


async def test_layers_after_the_pooling_may_be_among_the_models_weights(
    pool: ModelPoolManager, caplog: pytest.LogCaptureFixture
):
    """As converters to MLX leave EmbeddingGemma, with and without sentence-transformers' folders."""
    apart = matrix(await embed(pool, "gemma-apart", *SAID))
    for name in ("gemma-inside", "gemma-bare"):
        assert are_alike(matrix(await embed(pool, name, *SAID)), apart)
    packed = matrix(await embed(pool, "gemma-packed", *SAID))
    assert (packed * apart).sum(axis=1).min() > 0.995


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"prompts": {"query": "q: ", "q": 5}}, r"`prompts\.q` should be a text, not 5"),
        ({"prompts": ["q: "]}, "`prompts` should be texts by name, not "),
        ({"default_prompt_name": ["q"]}, "`default_prompt_name` should be a text, not "),
    ],
)
async def test_prompts_that_are_no_texts_are_told_when_the_model_is_loaded(
    tmp_path: Path, said: dict[str, Any], message: str
):
    file = make_tiny_encoder(tmp_path / "odd") / "config_sentence_transformers.json"
    file.write_text(json.dumps(said))
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises(ModelLoadFailed, match=rf"{re.escape(file.name)}: {message}"):
            await pool.get_model("odd")


async def test_a_pooling_that_is_missing_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pooling = make_tiny_encoder(tmp_path / "odd", pooling="cls_token") / "1_Pooling" / "config.json"
    pooling.unlink()
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        await pool.get_model("odd")
    said = f"names a Pooling, and {pooling} is missing: the pooling is mean"
    assert [record.levelname for record in caplog.records if said in record.message] == ["WARNING"]


async def test_a_module_that_nobody_knows_is_refused(tmp_path: Path):
    folder = make_tiny_encoder(tmp_path / "odd")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 9, "name": "9", "path": "", "type": "custom.WordWeights"})
    (folder / "modules.json").write_text(json.dumps(modules))
    async with open_pool(
        MLXServerSettings(models_dir=tmp_path, hf_cache=False), start=start_here
    ) as pool:
        with pytest.raises(ModelNotSupported, match="a module 'WordWeights'"):
            await pool.get_model("odd")
