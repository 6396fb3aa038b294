"""Families' declarations, each against names of models and against modules of mlx-lm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import pytest
from execution.decoder import common_decoders
from mlx import nn
from mlx_lm.utils import _get_classes
from tiny_models import FAMILIES as TINY

from mlx_manager.mlx_server.execution.spec.parts import names_of, parts_of
from mlx_manager.mlx_server.models.adapters import detect_model_family, get_adapter
from mlx_manager.mlx_server.models.families import FAMILIES
from mlx_manager.mlx_server.models.family import Family
from mlx_manager.mlx_server.models.module_facts import ModuleFacts
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS

TYPES = {
    "apertus": ("apertus",),
    "cohere": ("cohere", "cohere2"),
    "deepseek": ("deepseek", "deepseek_v3", "deepseek_v41"),
    "default": ("mamba2", "olmo3", "gpt2", "kimi_k2"),
    "dots": ("dots1",),
    "ernie": ("ernie4_5", "ernie4_5_moe"),
    "exaone": ("exaone4", "exaone_moe"),
    "gemma": ("gemma", "gemma3_text", "gemma4_text", "recurrent_gemma"),
    "glm": ("glm4_moe", "glm_moe_dsa"),
    "gpt-oss": ("gpt_oss",),
    "granite": ("granite", "granitemoehybrid"),
    "hunyuan": ("hunyuan", "hunyuan_v1_dense"),
    "idefics": ("idefics3", "smolvlm"),
    "internvl": ("internvl", "internvl_chat"),
    "laguna": ("laguna",),
    "lfm": ("lfm2", "lfm2_moe", "lfm2-vl"),
    "llama": ("llama", "llama4_text"),
    "mellum": ("mellum",),
    "mistral": ("mistral", "ministral3", "mixtral", "pixtral"),
    "phi": ("phi", "phi3", "phimoe", "phi-msft"),
    "qwen": ("qwen2", "qwen3_moe", "qwen3_5", "qwen2_5_vl"),
    "seed-oss": ("seed_oss",),
    "smollm": ("smollm3",),
    "spark": ("spark2_5",),
    "starcoder": ("starcoder2",),
}
NAMES = {
    "mlx-community/Llama-3.2-3B-Instruct-4bit": "llama",
    "codellama/CodeLlama-7b-Instruct-hf": "llama",
    "mlx-community/Qwen2.5-7B-Instruct-4bit": "qwen",
    "Qwen/QwQ-32B": "qwen",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistral",
    "mistralai/Devstral-Small-2507": "mistral",
    "google/gemma-2-2b-it": "gemma",
    "microsoft/Phi-3.5-mini-instruct": "phi",
    "zai-org/GLM-4.6": "glm",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": "deepseek",
    "mlx-community/DeepSeek-R1-Distill-Qwen-7B-4bit": "deepseek",
    "openai/gpt-oss-20b": "gpt-oss",
    "ibm-granite/granite-3.3-2b-instruct": "granite",
    "tencent/Hunyuan-7B-Instruct": "hunyuan",
    "CohereLabs/c4ai-command-a-03-2025": "cohere",
    "LiquidAI/LFM2-1.2B": "lfm",
    "rednote-hilab/dots.llm1.inst": "dots",
    "ByteDance-Seed/Seed-OSS-36B-Instruct": "seed-oss",
    "HuggingFaceTB/SmolLM3-3B": "smollm",
    "EleutherAI/pythia-70m": "default",
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("name", [*FAMILIES, "default"])
def test_the_config_tells_the_family_before_the_name(name: str) -> None:
    for model_type in TYPES[name]:
        assert detect_model_family({"model_type": model_type}) == name
        assert get_adapter({"model_type": model_type}, "my/Llama-like").family == name


@pytest.mark.parametrize(("name", "expected"), NAMES.items())
def test_a_name_tells_the_family_without_a_config(name: str, expected: str) -> None:
    assert detect_model_family(name) == expected
    assert get_adapter(name).family == expected
    assert get_adapter(None, name).family == expected


def test_tool_formats_that_families_name_are_known(family: Family) -> None:
    assert not family.tool_format or family.tool_format in FORMATS


@cache
def tiny_modules() -> list[tuple[set[str], set[str]]]:
    """The names of the classes of every module in tiny models, and of its parts; no weights."""
    told = [{"model_type": kind, **config} for kind, config in TINY.items()]
    several = (common_decoders.HYBRIDS, common_decoders.SHORTS, common_decoders.EXPERTS)
    pairs = [pair for each in several for pair in each.items()]
    pairs += [*common_decoders.MODELS.values(), *common_decoders.GEMMA4S.values()]
    told += [{"model_type": kind, **common_decoders.DIMENSIONS, **more} for kind, more in pairs]
    return [
        (set(names_of(module)), parts_of(module) | set(vars(module)))
        for config in told
        for module in make(json.loads(json.dumps(config))).modules()
    ]


def make(config: dict[str, object]) -> nn.Module:
    model_class, args_class = _get_classes(config)
    return model_class(args_class.from_dict(config))


def classes_in(facts: ModuleFacts) -> Iterator[str]:
    for each in fields(facts):
        yield from (
            name for name in getattr(facts, each.name) if isinstance(name, str) and "." in name
        )


def parts_in(facts: ModuleFacts) -> Iterator[set[str]]:
    yield from ({*block.norms, block.feed_forward} for block in facts.blocks)
    yield from (attention.parts for attention in facts.attentions)
    yield from ({*mlp.gate_up, mlp.down} for mlp in facts.mlps)
    yield from (set(pair) for pair in facts.experts)
    yield from (shared.parts for shared in facts.shared_experts)
    for name in (*facts.last_norms, *facts.heads, *facts.kv_heads, *facts.scales):
        yield {name}


def test_facts_are_about_modules_that_mlx_lm_has(family: Family) -> None:
    """A class or a part that is renamed there would be read by other facts, or by none."""
    seen = {name for names, _ in tiny_modules() for name in names}
    assert set(classes_in(family.modules)) <= seen
    for wanted in parts_in(family.modules):
        assert any(wanted <= parts for _, parts in tiny_modules()), wanted
