"""Trains the byte-level BPE tokenizer and writes every file of the model but its weights.

python tokenizer.py            # writes into mlx_manager/demo_model
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus import CUT, texts
from phrases import QUESTIONS, SMALLTALK, expand
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from words import WORDS

MODEL = Path(__file__).parents[2] / "mlx_manager" / "demo_model"
VOCABULARY = 3072
SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|finetune_right_pad_id|>",
)

# A capitalised word never takes the space before it, so that a name is the same tokens after a
# space, after a quote and at the start: small models copy tokens, not spellings. A digit is a
# token. Punctuation takes a space inside it, so that `": "` is one token.
PATTERN = (
    r"\p{Lu}+\p{Ll}*"
    r"| ?\p{Ll}+"
    r"| ?[\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+(?: [^\s\p{L}\p{M}\p{N}]*)?"
    r"|\s*[\r\n]+"
    r"|\s+"
)


def train_tokenizer() -> Tokenizer:
    """Learns the merges from the corpus (its special tokens taken out)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(), trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    bos = SPECIAL[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    return tokenizer


def _tokenizer_texts() -> Iterator[str]:
    """The corpus, with its vocabulary weighed up against the invented words in it."""
    rng = random.Random(0)
    yield from map(_without_special, texts(0, 20_000))
    for topic in (*QUESTIONS, *SMALLTALK):
        yield from (topic.answer for _ in range(100))
        yield from (key for key in topic.keys for _ in range(60))
        for phrasing in topic.phrasings.train:
            yield from (expand(phrasing, rng) for _ in range(60))
    for words in WORDS.values():
        yield from (f"{word} {word}" for word in words for _ in range(80))


def _without_special(text: str) -> str:
    for token in SPECIAL:
        text = text.replace(token, "\n")
    return text.replace(CUT, "")


def model_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json: a Llama of four million parameters."""
    ends = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "intermediate_size": 640,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": tokenizer.token_to_id("<|begin_of_text|>"),
        "eos_token_id": [tokenizer.token_to_id(end) for end in ends],
        "pad_token_id": tokenizer.token_to_id("<|finetune_right_pad_id|>"),
    }


def files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The JSON files beside tokenizer.json."""
    config = model_config(tokenizer)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "config.json": config,
        "generation_config.json": ends | {"do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "<|finetune_right_pad_id|>",
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=MODEL)
    out = parser.parse_args().out
    tokenizer = train_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    for name, value in files(tokenizer).items():
        (out / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
