from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mlx_manager.mlx_server.errors import UnsupportedParameter
from mlx_manager.mlx_server.models.adapters import Adapter


def tokenizer_with(*special: str) -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "<s>", "a", "b", "z"])}
    fast = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = Whitespace()
    fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.add_special_tokens([AddedToken(name, special=True) for name in ("<s>", *special)])
    return PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="[UNK]", bos_token="<s>")


@pytest.mark.parametrize(
    ("names", "written"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<s> <|fim_prefix|> a b <|fim_suffix|> z <|fim_middle|>",
        ),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<s> <fim_prefix> a b <fim_suffix> z <fim_middle>",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<s> <｜fim▁begin｜> a b <｜fim▁hole｜> z <｜fim▁end｜>",
        ),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "<s> ▁<PRE> a b ▁<SUF> z ▁<MID>"),
        (("[PREFIX]", "[SUFFIX]"), "<s> [SUFFIX] z [PREFIX] a b"),
    ],
)
def test_the_middle_is_asked_for_in_the_models_own_way(names: tuple[str, ...], written: str):
    tokenizer = tokenizer_with(*names)
    ids = Adapter().encode_infill("a b", "z", tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == written.split()


def test_a_model_without_the_tokens_refuses_a_suffix():
    with pytest.raises(UnsupportedParameter, match="suffix"):
        Adapter().encode_infill("a", "z", tokenizer_with("<fim_prefix>"))
