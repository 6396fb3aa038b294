"""Tokenizers that are made in pieces are those that transformers and mlx-lm make in one go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from mlx_manager.mlx_server.models import bpe
from mlx_manager.mlx_server.models.bpe import in_pieces
from mlx_manager.mlx_server.models.tokenizers import Tokenizers, read_tokenizer
from mlx_manager.mlx_server.utils.bare import BareErrors

TEMPLATES = Path(__file__).parents[5] / "shared" / "templates"
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    'naïve café, 你好 <think>[x] \\ "quoted"</think> don\'t',
    "<s>hello  world</s><|im_end|>",
]
ENDS = ["<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|endoftext|>", "<|padding|>"]
ENDS += ["<bos>", "<eos>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>"]
ENDS += ["<PAD>", "<|END_OF_TURN_TOKEN|>", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[PAD]"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens([*ENDS, "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_special_tokens([*(f"▁<{name}>" for name in ("PRE", "MID", "SUF", "EOT"))])
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=440, show_progress=False, special_tokens=["<unk>", "<s>", *ENDS[3:], *fallback]
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens(ENDS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece}


def written(
    folder: Path,
    tokenizer: Tokenizer,
    config: Mapping[str, Any] | None = None,
    **told: Any,
) -> Path:
    """A model's folder with that tokenizer; `told`: in tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **(config or {})}))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**own, **told}))
    return folder


def check_same(made: PreTrainedTokenizerBase, whole: PreTrainedTokenizerBase) -> None:
    assert type(made) is type(whole)
    assert json.loads(made.backend_tokenizer.to_str()) == json.loads(
        whole.backend_tokenizer.to_str()
    )
    assert made.special_tokens_map == whole.special_tokens_map
    assert made.all_special_ids == whole.all_special_ids
    assert made.get_vocab() == whole.get_vocab()
    assert made.init_kwargs == whole.init_kwargs
    assert made.name_or_path == whole.name_or_path
    for text in TEXTS:
        assert read(made, text) == read(whole, text)


def read(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], str] | str:
    """Its tokens and what they say; or why there are none."""
    try:
        with BareErrors("it can't be read"):
            ids = tokenizer.encode(text)
            return ids, tokenizer.decode(ids)
    except (TypeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in {name for name in TOKENIZER_MAPPING_NAMES.values() if name}
        if getattr(tokenizer_class_from_name(name), "model", None) is models.BPE
    ),
)
def test_a_class_of_transformers_makes_the_same_of_it(tmp_path: Path, name: str, kind: str) -> None:
    folder = written(tmp_path, KINDS[kind](), tokenizer_class=name)
    try:
        whole = AutoTokenizer.from_pretrained(folder)
    except (KeyError, TypeError, ValueError) as error:
        pytest.skip(f"{name} makes nothing of such a tokenizer: {error!r}")
    with in_pieces(folder, {}) as made:
        if made is None:
            pytest.skip(f"{name} needs more than its special tokens")
    check_same(made.tokenizer, whole)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("byte level", "PreTrainedTokenizerFast"),
        ("byte level", "GPT2Tokenizer"),
        ("byte level", "Qwen2Tokenizer"),
        ("byte level", "LlamaTokenizer"),
        ("sentencepiece", "PreTrainedTokenizerFast"),
        ("sentencepiece", "LlamaTokenizer"),
    ],
)
def test_the_usual_ones_are_made_in_pieces(tmp_path: Path, kind: str, name: str) -> None:
    folder = written(tmp_path, KINDS[kind](), tokenizer_class=name)
    with in_pieces(folder, {}) as made:
        assert made is not None


# ---------------------------------------------------------------------------------------------
# As mlx-lm has it
# ---------------------------------------------------------------------------------------------


def check_wrapped_the_same(made: TokenizerWrapper, whole: TokenizerWrapper) -> None:
    apart = ("_tokenizer", "_detokenizer")
    kept, other = (
        {name: value for name, value in vars(each).items() if name not in apart}
        for each in (made, whole)
    )
    assert kept == other
    assert type(made.detokenizer) is type(whole.detokenizer)
    assert getattr(made.detokenizer, "tokenmap", None) == getattr(
        whole.detokenizer, "tokenmap", None
    )
    check_same(made._tokenizer, whole._tokenizer)


def templates() -> list[str]:
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja")) or ["none at hand"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", templates())
def test_mlx_lm_infers_the_same_of_it(tmp_path: Path, template: str, kind: str) -> None:
    file = TEMPLATES / f"{template}.jinja"
    if not file.exists():
        pytest.skip(f"there are no chat templates at {TEMPLATES}")
    folder = written(tmp_path, KINDS[kind](), {"eos_token_id": [1, 2]})
    (folder / "chat_template.jinja").write_text(file.read_text())
    check_wrapped_the_same(
        read_tokenizer(folder, False), load_tokenizer(folder, eos_token_ids=[1, 2])
    )


@pytest.mark.parametrize(
    "tokens",
    [
        ["<|channel>", "<channel|>", "<|channel>thought"],
        ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
        ["<|tool_call_start|>", "<|tool_call_end|>"],
        ["<longcat_think>", "</longcat_think>"],
    ],
)
@pytest.mark.parametrize("added", [True, False])
def test_mlx_lm_finds_the_tokens_that_it_looks_for(
    tmp_path: Path, tokens: list[str], added: bool
) -> None:
    tokenizer = byte_level()
    if added:
        tokenizer.add_tokens(tokens)
        folder = written(tmp_path, tokenizer)
    else:
        folder = written(tmp_path, tokenizer)
        content = json.loads((folder / "tokenizer.json").read_text())
        before = len(content["model"]["vocab"]) + len(content["added_tokens"])
        content["model"]["vocab"] |= {token: before + i for i, token in enumerate(tokens)}
        (folder / "tokenizer.json").write_text(json.dumps(content))
    check_wrapped_the_same(read_tokenizer(folder, False), load_tokenizer(folder))


def test_its_own_way_to_tell_its_tokens_is_back_afterwards(tmp_path: Path) -> None:
    wrapper = read_tokenizer(written(tmp_path, byte_level()), False)
    wrapper.add_tokens(["a new one"])
    assert "a new one" in wrapper.get_vocab()


# ---------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------

TOKENS = st.text(min_size=1, max_size=8).filter(lambda text: " " not in text)


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """Of a tokenizer.json: any tokens, some of them merges of others, some of them added."""
    singles = draw(st.lists(TOKENS, min_size=2, max_size=12, unique=True))
    pairs = draw(st.lists(st.tuples(*[st.sampled_from(singles)] * 2), max_size=8, unique=True))
    tokens = list(dict.fromkeys([*singles, *(a + b for a, b in pairs)]))
    numbers = draw(st.permutations(range(len(tokens))))
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": draw(st.sampled_from([None, singles[0]])),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": draw(st.booleans()),
        "byte_fallback": draw(st.booleans()),
        "ignore_merges": draw(st.booleans()),
        "vocab": dict(zip(tokens, numbers, strict=True)),
        "merges": draw(st.sampled_from([[" ".join(pair) for pair in pairs], [*map(list, pairs)]])),
    }
    tokenizer = Tokenizer(models.BPE(vocab=dict(model["vocab"]), merges=[]))
    tokenizer.add_tokens(draw(st.lists(st.one_of(TOKENS, st.sampled_from(tokens)), max_size=4)))
    tokenizer.add_special_tokens(draw(st.lists(TOKENS, max_size=2)))
    whole = json.loads(tokenizer.to_str())
    whole["model"] = draw(st.permutations(list(model.items())).map(dict))
    return whole


@settings(deadline=None)
@given(
    content=contents(),
    form=st.sampled_from(
        [
            {},
            {"indent": 2},
            {"ensure_ascii": False},
            {"indent": 1, "ensure_ascii": False},
            {"separators": (",", ":")},
        ]
    ),
    text=st.text(max_size=20),
)
def test_any_tokenizer_json_gives_the_same(
    content: dict[str, Any], form: dict[str, Any], text: str
) -> None:
    order = list(content["model"])
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
        )
        (folder / "tokenizer.json").write_text(json.dumps(content, **form), encoding="utf-8")
        whole = AutoTokenizer.from_pretrained(folder)
        with in_pieces(folder, {}) as made:
            # Where the merges come first, they are left to transformers.
            assert (made is not None) == (order.index("vocab") < order.index("merges"))
    if made is not None:
        check_same(made.tokenizer, whole)
        assert read(made.tokenizer, text) == read(whole, text)


def test_a_token_by_the_name_of_a_key_is_a_token(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["vocab", "merges", '"vocab": {', '"merges": [', "1,"])
    folder = written(tmp_path, tokenizer)
    with in_pieces(folder, {}) as made:
        assert made is not None
    check_same(made.tokenizer, AutoTokenizer.from_pretrained(folder))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda content: content.pop("model"), id="no model"),
        pytest.param(lambda content: content["model"].pop("type"), id="no type"),
        pytest.param(lambda content: content["model"].pop("merges"), id="no merges"),
        pytest.param(lambda content: content["model"]["merges"].append("a"), id="half a merge"),
        pytest.param(lambda content: content["model"]["merges"].append(["a"]), id="one of a pair"),
        pytest.param(
            lambda content: content["model"]["merges"].append("Ω ß"), id="merges no token"
        ),
        pytest.param(lambda content: content["model"]["vocab"].update(x=-1), id="below zero"),
        pytest.param(lambda content: content["model"]["vocab"].update(x=2**32), id="too large"),
        pytest.param(lambda content: content["model"]["vocab"].update(x="y"), id="no number"),
        pytest.param(lambda content: content.pop("added_tokens"), id="none added"),
        pytest.param(lambda content: content["added_tokens"][0].update(id=7), id="another's id"),
        pytest.param(lambda content: content["added_tokens"][0].pop("content"), id="added nothing"),
    ],
)
def test_what_is_not_as_it_should_be_is_left_to_transformers(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = changed(written(tmp_path, byte_level()), change)
    with in_pieces(folder, {}) as made:
        assert made is None


@pytest.mark.parametrize("broken", ["", "{", "[]", '"BPE"', '{"model": {"vocab": {"BPE": 1'])
def test_a_broken_file_is_left_to_transformers(tmp_path: Path, broken: str) -> None:
    folder = written(tmp_path, byte_level())
    (folder / "tokenizer.json").write_text(broken)
    with in_pieces(folder, {}) as made:
        assert made is None


def test_another_kind_of_tokenizer_is_left_to_transformers(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "BPE": 2}, unk_token="<s>"))
    folder = written(tmp_path, words)
    with in_pieces(folder, {}) as made:
        assert made is None
    assert Tokenizers().text(folder).encode("BPE") == [2]


def test_tokens_that_only_the_settings_add_are_given_their_numbers_by_transformers(
    tmp_path: Path,
) -> None:
    folder = written(tmp_path, byte_level(), pad_token="a token of its own")
    with in_pieces(folder, {}) as made:
        assert made is None
    tokenizer = Tokenizers().text(folder)
    assert tokenizer.pad_token_id == len(tokenizer) - 1


def test_a_token_of_the_vocabulary_that_the_settings_name_is_that_token(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = written(
        tmp_path, tokenizer, pad_token="quick" if tokenizer.token_to_id("quick") else "Ġ"
    )
    with in_pieces(folder, {}) as made:
        assert made is not None
    check_same(made.tokenizer, AutoTokenizer.from_pretrained(folder))


def test_code_of_the_folder_s_own_is_left_to_transformers(tmp_path: Path) -> None:
    with in_pieces(written(tmp_path, byte_level()), {"trust_remote_code": True}) as made:
        assert made is None


@pytest.mark.parametrize(
    ("config", "told"), [({"model_type": "mistral"}, {}), ({}, {"fix_mistral_regex": True})]
)
def test_large_ones_that_transformers_may_mend_are_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], told: dict[str, Any]
) -> None:
    folder = written(tmp_path, byte_level(), config, **told)
    with in_pieces(folder, {}) as made:
        assert made is not None
    monkeypatch.setattr(bpe, "LARGE", 300)
    with in_pieces(folder, {}) as made:
        assert made is None


def test_where_nothing_can_be_written_it_is_made_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "m", byte_level())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert isinstance(Tokenizers().text(folder)._tokenizer, PreTrainedTokenizerFast)


def test_others_have_their_turn_while_the_vocabulary_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path, byte_level())
    turns: list[float] = []
    monkeypatch.setattr(bpe, "sleep", turns.append)
    monkeypatch.setattr(bpe, "TURN", 10)
    with in_pieces(folder, {}) as made:
        assert made is not None
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    assert len(turns) >= (len(content["vocab"]) + len(content["merges"])) // 10
