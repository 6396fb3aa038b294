"""Rerankers told from text models, and the place that a chat template has for a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_encoders import CARD, INSTRUCTION, JUDGES, NO, YES, make_tiny_judge, write

from mlx_manager.mlx_server.encoders.pairs import MAKERS, answers_of, of_template
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.kinds import kind_of
from mlx_manager.mlx_server.models.loading.tokenizers import read_encoder_tokenizer

STRUCTURED = """{%- set query = messages | selectattr("role", "eq", "query") | first -%}
{%- set document = messages | selectattr("role", "eq", "document") | first -%}
Q {{ query.content[0].text }} D {{ document.content[0].text }}{{ " A" if add_generation_prompt }}"""
WITHOUT_ROLES = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"  # fmt: skip


@pytest.mark.parametrize(
    ("place", "config", "kind"),
    [
        ("Qwen3-Reranker-0.6B", {}, "reranker"),
        ("models--mlx--qwen3-reranker-4B-4bit/snapshots/0123", {}, "reranker"),
        ("mine", {"_name_or_path": "Qwen/Qwen3-Reranker-8B"}, "reranker"),
        ("mine", {"classifier_from_token": ["no", "yes"]}, "reranker"),
        ("mine", {"architectures": ["Qwen3ForSequenceClassification"]}, "reranker"),
        ("mine", {"architectures": ["Qwen3Model"]}, "embedding"),
        ("mine", {}, "text"),
        ("Qwen3-Reranker-0.6B/beside/mine", {}, "text"),
        ("Qwen3-Reranker-like", {"model_type": "llama"}, "text"),
    ],
)
def test_kinds(tmp_path: Path, place: str, config: dict[str, Any], kind: str):
    assert kind_of(ModelFolder.read(make_tiny_judge(tmp_path / place, **config))) == kind


def test_a_broken_list_of_modules_makes_no_reranker(tmp_path: Path):
    folder = make_tiny_judge(tmp_path / "Qwen3-Reranker-0.6B")
    write(folder / "modules.json", {})
    assert kind_of(ModelFolder.read(folder)) == "embedding"


def test_the_makers_text_is_that_of_their_model_card():
    before, after = CARD
    asked = f"{before}<Instruct>: {INSTRUCTION}\n<Query>: q\n<Document>: "
    assert MAKERS.before("q", None) == MAKERS.before("q", INSTRUCTION) == asked
    assert MAKERS.after == after


def test_a_template_with_roles_has_places_for_a_pair_and_an_instruction(tmp_path: Path):
    folder = make_tiny_judge(tmp_path / "m", **JUDGES["template"])
    prompt = of_template(ModelFolder.read(folder), read_encoder_tokenizer(folder, False))
    assert prompt is not None
    assert prompt.before("q", None) == "<|im_start|>Judge it.: q / "
    assert prompt.before("q", "Find") == "<|im_start|>Find: q / "
    assert prompt.after == "<|im_end|>"


def test_contents_may_be_lists_of_parts_and_options_come_from_the_folder(tmp_path: Path):
    folder = make_tiny_judge(tmp_path / "m", template=STRUCTURED)
    options = {"add_generation_prompt": True, "restore_suffix": True}
    write(folder / "sentence_bert_config.json", {"processing_kwargs": {"chat_template": options}})
    prompt = of_template(ModelFolder.read(folder), read_encoder_tokenizer(folder, False))
    assert prompt is not None
    assert (prompt.before("q", "Find"), prompt.after) == ("Q q D ", " A")
    assert prompt.instructed is None


@pytest.mark.parametrize("template", ["", WITHOUT_ROLES, "{{ raise_exception('no') }}"])
def test_a_template_without_the_roles_has_no_place(tmp_path: Path, template: str):
    folder = make_tiny_judge(tmp_path / "m", template=template)
    assert of_template(ModelFolder.read(folder), read_encoder_tokenizer(folder, False)) is None


def test_the_words_are_the_tokenizers_tokens(tmp_path: Path):
    folder = make_tiny_judge(tmp_path / "Qwen3-Reranker-0.6B")
    tokenizer = read_encoder_tokenizer(folder, False)
    answers = answers_of(ModelFolder.read(folder), tokenizer, "m")
    assert answers is not None
    assert (answers.yes, answers.no) == (YES, NO)
