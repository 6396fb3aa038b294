"""Text that comes token by token is the text of all tokens together."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlx_manager import demo_model
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.text.detokenizer import TokenTexts

TEXT = "Hello world, hello  worlds! naïve café 你好 🎉👩‍👩‍👧 don't\n\tthe end. the end "
SPECIAL = ["<s>", "<|eot|>", "<｜tool▁calls｜>"]


def wrap(tokenizer: Tokenizer, kind: object) -> TokenizerWrapper:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "é token")])
    return TokenizerWrapper(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False
        ),
        kind,
    )


def byte_level() -> TokenizerWrapper:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return wrap(tokenizer, BPEStreamingDetokenizer)


def sentencepiece(strips: bool) -> TokenizerWrapper:
    pieces = ["▁", "▁world", "▁Hello", "Hello", "wor", "ld", "é", "▁the", "a", "b", "🎉", "\n"]
    tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return wrap(tokenizer, partial(SPMStreamingDetokenizer, trim_space=strips))


def words() -> TokenizerWrapper:
    names = ["[UNK]", "hello", "world", "##s", ",", "don", "'", "t", "中"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return wrap(tokenizer, NaiveStreamingDetokenizer)


KINDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(strips=True),
    "sentencepiece, no prefix space": sentencepiece(strips=False),
    "any other": words(),
}


def streamed(tokenizer: TokenizerWrapper, ids: list[int], output: OutputFormat) -> str:
    detokenizer = TokenTexts(tokenizer).stream(output)
    return "".join(map(detokenizer.add, ids)) + detokenizer.finish()


def valid(text: str) -> bool:
    return "\ufffd" not in text


@settings(max_examples=150)
@given(st.sampled_from(sorted(KINDS)), st.data())
def test_pieces_join_to_what_decoding_all_at_once_gives(kind: str, data: st.DataObject) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    text = streamed(tokenizer, ids, OutputFormat())
    if kind == "byte level" or valid(whole):
        assert text == whole
    else:
        # SentencePiece's decoder writes U+FFFD for each byte of a character that is incomplete.
        assert not valid(text)


def test_real_text_survives() -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert streamed(tokenizer, ids, PLAIN) == TEXT


def test_a_completion_keeps_the_space_that_it_begins_with() -> None:
    tokenizer = KINDS["sentencepiece"]
    world = tokenizer.convert_tokens_to_ids("▁world")
    assert streamed(tokenizer, [world, world], PLAIN) == " world world"
    assert streamed(tokenizer, [world, world], OutputFormat()) == "world world"
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode(" world", add_special_tokens=False)
    assert streamed(tokenizer, ids, PLAIN) == " world"
    assert streamed(tokenizer, ids, OutputFormat()) == " world"


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_special_tokens_have_no_text_unless_they_are_markers(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("a", *SPECIAL, "b", "<think>")]
    assert streamed(tokenizer, ids, OutputFormat()) == "ab<think>"
    marker = tokenizer.convert_tokens_to_ids(SPECIAL[2])
    shown = SPECIAL[2] if kind == "byte level" else SPECIAL[2].replace("▁", " ")
    assert streamed(tokenizer, ids, OutputFormat(keep=frozenset({marker}))) == f"a{shown}b<think>"


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = KINDS["sentencepiece"]
    detokenizer = TokenTexts(tokenizer).stream(PLAIN)
    assert [detokenizer.add(byte) for byte in "🎉".encode()] == ["", "", "", "🎉"]


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_an_incomplete_character_at_the_end_is_one_replacement(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "🎉".encode()[:3]]
    if kind == "byte level":
        ids = [tokenizer.convert_tokens_to_ids(char) for char in "ðŁİ"]
    assert streamed(tokenizer, ids, PLAIN) == "\ufffd"


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_ids_beyond_the_vocabulary_have_no_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    assert streamed(tokenizer, [len(tokenizer) + 5], PLAIN) == ""


@pytest.mark.parametrize(
    ("text", "before"),
    [
        ("<|eot|>the end<|eot|>world<|eot|>", "<|eot|>the end"),
        ("<s><|eot|>the end<|eot|>world<|eot|>the <think>\n", "<s><|eot|>the end"),
        # One turn alone, none, and a beginning that would be too long for one.
        ("<s>the end<|eot|>the", ""),
        ("the end", ""),
        ("<|eot|>a<|eot|>" + "world, " * 80, ""),
        ("", ""),
    ],
)
def test_a_prompt_s_last_turn_begins_as_the_answer_s(text: str, before: str) -> None:
    tokenizer = KINDS["byte level"]
    ids = tokenizer.encode(text)
    turn = TokenTexts(tokenizer).last_turn(ids)
    assert tokenizer.decode(ids[:turn]) == before


def test_prompts_that_differ_in_the_last_turn_alone_are_alike_up_to_it() -> None:
    tokenizer = load_tokenizer(Path(demo_model.__file__).parent)
    system = {"role": "system", "content": "You answer questions about the town. " * 20}
    prompts = [
        tokenizer.apply_chat_template(
            [system, {"role": "user", "content": question}], add_generation_prompt=True
        )
        for question in ("How old is it?", "Who lives there, and since when?")
    ]
    turns = [TokenTexts(tokenizer).last_turn(ids) for ids in prompts]
    assert turns[0] == turns[1] > 100
    assert prompts[0][: turns[0]] == prompts[1][: turns[1]]
