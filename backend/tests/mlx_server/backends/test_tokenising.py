from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mlx_manager.mlx_server.backends.tokenising import (
    AT_ONCE,
    BORDER,
    HEAD,
    SLICE,
    Encode,
    sliced,
    tokenised,
)

LETTERS = "abcdefgh"


def wordpiece() -> Tokenizer:
    """As BERT's: blanks are no tokens, and a long word is one."""
    pieces = ["[UNK]", *LETTERS, *(f"##{letter}" for letter in LETTERS), "##abc", "bad", "cafe"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def bpe() -> Tokenizer:
    """A text is one word, as SentencePiece has it."""
    merges = [("a", "b"), ("b", "a"), ("ab", "c"), ("d", "d"), ("dd", "dd"), ("abc", "a")]
    pieces = [*LETTERS, " ", *("".join(pair) for pair in merges)]
    return Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))


def unigram() -> Tokenizer:
    """As XLM-RoBERTa's, whose unknown characters in a row are one token."""
    pieces = [("<unk>", 0.0), ("\u2581", -2.0), *((letter, -4.0) for letter in LETTERS[:5])]
    pieces += [("\u2581bad", -5.0), ("abc", -6.0), ("dd", -7.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    return tokenizer


def encoding(tokenizer: Tokenizer) -> tuple[Encode, list[int]]:
    """With how many characters there were in each call."""
    calls: list[int] = []

    def encode(texts: Sequence[str]) -> list[list[int]]:
        calls.append(sum(map(len, texts)))
        return [made.ids for made in tokenizer.encode_batch(list(texts))]

    return encode, calls


words = st.text(LETTERS, min_size=1, max_size=12)
long_words = st.builds(lambda word, times: word * times, words, st.integers(20, 900))
blanks = st.integers(1, 9000).map(lambda count: " " * count)
passages = st.lists(words, min_size=1, max_size=8).flatmap(
    lambda some: st.integers(1, 400).map(lambda times: " ".join(some) * times)
)
long_texts = st.lists(st.one_of(words, long_words, blanks, passages), max_size=8).map("".join)


@pytest.mark.parametrize("make", [wordpiece, bpe, unigram])
@given(text=long_texts, enough=st.integers(3, 1500))
@example(text="d" * 20_001, enough=5)
def test_the_first_tokens_are_those_of_the_whole_text(
    make: Callable[[], Tokenizer], text: str, enough: int
):
    tokenizer = make()
    encode, _ = encoding(tokenizer)
    [found] = tokenised(encode, [text], enough)
    [every] = encode([text])
    if not found.unread:
        assert found.ids == every
        return
    assert len(found.ids) > enough
    if make is unigram:
        # Where there is a choice ("d" and "dd" of an odd number of them) the end decides it, but not
        # what is said.
        mine, whole = ("".join(map(tokenizer.id_to_token, ids)) for ids in (found.ids, every))
        assert whole.startswith(mine)
    else:
        assert found.ids == every[: len(found.ids)]


def test_of_prose_no_more_is_read_than_is_needed():
    encode, calls = encoding(wordpiece())
    [found] = tokenised(encode, ["a bad cafe " * 10**5], 128)
    assert found.unread
    assert calls == [HEAD]


def test_what_is_not_read_is_estimated_from_what_is():
    encode, _ = encoding(wordpiece())
    text = "a bad cafe " * 10**5
    [found], [every] = tokenised(encode, [text], 128), encode([text])
    assert len(found.ids) < len(every) // 100
    assert found.total == pytest.approx(len(every), rel=0.01)


def test_a_text_of_few_tokens_is_read_to_its_end_however_long():
    encode, _ = encoding(wordpiece())
    texts = ["bad" + " " * 100_000 + "cafe", "a" * 100_000, "b" * (HEAD - 1)]
    found = tokenised(encode, texts, 8)
    assert [content.unread for content in found] == [0, 0, 0]
    assert [len(content.ids) for content in found] == [2, 1, 1]


def test_what_the_border_may_have_changed_is_not_told():
    encode, _ = encoding(bpe())
    [found] = tokenised(encode, ["e" * 2 * HEAD], 8)
    assert len(found.ids) == HEAD - BORDER


@given(st.lists(st.integers(0, 40_000).map("x".__mul__), max_size=200), st.integers(1, 8000))
def test_slices_are_all_inputs_in_their_order_and_few_at_a_time(inputs: list[str], enough: int):
    parts = list(sliced(inputs, enough))
    assert [first for first, _ in parts] == [
        sum(len(part) for _, part in parts[:index]) for index in range(len(parts))
    ]
    assert [text for _, part in parts for text in part] == inputs
    for _, part in parts:
        size = sum(min(len(text), max(HEAD, 8 * enough)) for text in part)
        assert 1 <= len(part) <= AT_ONCE
        assert size <= SLICE or len(part) == 1
