"""Chat templates, each with a byte-level tokenizer that has the tokens it writes.

The published ones are read from a folder beside the repository and are not part of it. Those in
`reduced/` are our own, modelled on published ones, which each names.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mlx_manager.mlx_server.core import Conversation
from mlx_manager.mlx_server.models.adapters import Adapter

TEMPLATES = Path(__file__).parents[5].parent / "shared" / "templates"
REDUCED_TEMPLATES = Path(__file__).parent / "reduced"

_TOKEN = re.compile(
    r"<\|[\w ]+\|>|<｜[^｜]+｜>|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|"
    r"ARGS|CALL_ID|TOOL_CONTENT|IMG)\]|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|</?seed:\w+>"
)
_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that are added but not special: they have text."""


@dataclass(frozen=True)
class Published:
    """A template: its file, its model's type, and the texts of BOS and EOS.

    more: further special tokens. adds_bos: whether the tokenizer puts BOS
    before a text.
    """

    name: str
    model_type: str
    bos: str | None
    eos: str
    more: tuple[str, ...] = ()
    adds_bos: bool = True


PUBLISHED = (
    Published("GLM-4.6", "glm4_moe", None, "<|endoftext|>", ("<|endoftext|>",)),
    Published("Mistral-Small-3.2-24B-Instruct-2506", "mistral3", "<s>", "</s>"),
    Published(
        "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
        "llama",
        "<|begin_of_text|>",
        "<|im_end|>",
        ("<|eot_id|>",),
    ),
    Published("Qwen-QwQ-32B", "qwen2", None, "<|im_end|>", ("<|endoftext|>",)),
    Published("Qwen-Qwen2.5-7B-Instruct", "qwen2", None, "<|im_end|>", ("<|endoftext|>",)),
    Published("Qwen-Qwen3-0.6B", "qwen3", None, "<|im_end|>", ("<|endoftext|>",)),
    Published(
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "llama",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    Published("google-gemma-2-2b-it", "gemma2", "<bos>", "<eos>"),
    Published(
        "ibm-granite-granite-3.3-2B-Instruct",
        "granite",
        "<|end_of_text|>",
        "<|end_of_text|>",
        ("<|tool_call|>",),
        adds_bos=False,
    ),
    Published("meta-llama-Llama-3.1-8B-Instruct", "llama", "<|begin_of_text|>", "<|end_of_text|>"),
    Published(
        "meta-llama-Llama-3.2-3B-Instruct",
        "llama",
        "<|begin_of_text|>",
        "<|end_of_text|>",
        ("<|eom_id|>", "<|python_tag|>"),
    ),
    Published("microsoft-Phi-3.5-mini-instruct", "phi3", "<s>", "<|endoftext|>"),
    Published("mistralai-Mistral-Nemo-Instruct-2407", "mistral", "<s>", "</s>"),
    Published("openai-gpt-oss-120b", "gpt_oss", "<|startoftext|>", "<|return|>", adds_bos=False),
)
REDUCED = (
    Published(
        "seed-oss",
        "seed_oss",
        "<seed:bos>",
        "<seed:eos>",
        ("</seed:cot_budget_reflect>",),
        adds_bos=False,
    ),
    Published("command-a", "cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    Published("nemotron", "nemotron-nas", "<|begin_of_text|>", "<|eot_id|>"),
    Published(
        "phi-4-mini",
        "phi3",
        None,
        "<|endoftext|>",
        (
            *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
            *("<|tool_call|>", "<|/tool_call|>"),
        ),
    ),
    Published("hunyuan-a13b", "hunyuan", "<|startoftext|>", "<|eos|>", adds_bos=False),
    Published("hunyuan-7b", "hunyuan_v1_dense", "<|startoftext|>", "<|eos|>", adds_bos=False),
    Published("olmo-3", "olmo3", None, "<|im_end|>", ("<|endoftext|>",)),
    Published(
        "apertus",
        "apertus",
        "<s>",
        "<|assistant_end|>",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    Published("internlm", "internlm3", "<s>", "<|im_end|>"),
)
NAMES = [published.name for published in PUBLISHED]
REDUCED_NAMES = [reduced.name for reduced in REDUCED]


@cache
def loaded(name: str) -> tuple[dict[str, Any], TokenizerWrapper]:
    """The model's config.json, and its tokenizer as mlx-lm loads it."""
    folder_of_templates = TEMPLATES if name in NAMES else REDUCED_TEMPLATES
    if not folder_of_templates.is_dir():
        pytest.skip("the published templates are not here")
    published = next(found for found in (*PUBLISHED, *REDUCED) if found.name == name)
    template = (folder_of_templates / f"{name}.jinja").read_text()
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), published, template)
        return {"model_type": published.model_type}, load(Path(folder))


def prompt_ids(
    adapter: Adapter, conversation: Conversation, tokenizer: TokenizerWrapper
) -> list[int]:
    """The tokens that the model gets to see."""
    return adapter.encode_text(adapter.render_text(conversation, tokenizer), tokenizer)


def write_tokenizer(folder: Path, published: Published, template: str | None) -> None:
    """A folder with one token a byte, and the special tokens that the template names."""
    written = _TOKEN.findall(template or "")
    specials = [published.bos, published.eos, *published.more, *written]
    tokenizer = byte_tokenizer(
        [text for text in dict.fromkeys(specials) if text],
        [t for t in _PLAIN if t in (template or "")],
    )
    if published.bos and published.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{published.bos} $A",
            special_tokens=[(published.bos, tokenizer.token_to_id(published.bos))],
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": published.bos,
        "eos_token": published.eos,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def byte_tokenizer(special: list[str], added: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    return tokenizer
