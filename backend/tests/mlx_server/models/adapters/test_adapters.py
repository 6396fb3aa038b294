"""Turn ends and raw prompts, without any published template."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from mlx_lm.chat_templates.muse_spark import RESPONSE_FORMAT
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models.adapters.published import Published, prompt_ids, write_tokenizer
from text.outputs import OFFERED, of_mlx, parse
from transformers import tokenization_utils_base

from mlx_manager.mlx_server.core import Conversation, Message, ToolCall
from mlx_manager.mlx_server.errors import InvalidParameter, InvalidRequest, MLXManagerError
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.models.adapters import (
    Adapter,
    LlamaAdapter,
    get_adapter,
)
from mlx_manager.mlx_server.models.adapters.answer import answer_edges, region_of


def test_the_template_text_comes_from_the_tokenizer() -> None:
    calls = []

    def apply_chat_template(*args: object, **kwargs: object) -> str:
        calls.append((args, kwargs))
        return "rendered"

    messages = [{"role": "user", "content": "hi"}]
    tokenizer = SimpleNamespace(apply_chat_template=apply_chat_template)
    assert LlamaAdapter().apply_chat_template(tokenizer, messages) == "rendered"
    assert calls == [((messages,), {"add_generation_prompt": True, "tokenize": False})]


def make(folder: Path, published: Published, template: str | None) -> TokenizerWrapper:
    write_tokenizer(folder, published, template)
    return load(folder)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_raw_prompts_get_exactly_one_bos(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, Published("x", "llama", "<s>", "</s>"), None)
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)
    bos = tokenizer.bos_token_id
    for text in ("a b", "<s>a b"):
        ids = adapter.encode_text(text, tokenizer)
        assert (ids[0], ids.count(bos)) == (bos, 1)
    assert adapter.encode_text("", tokenizer) == [bos]
    assert adapter.output_format(tokenizer, None, [bos]) == PLAIN


def test_a_prompt_that_is_too_long_is_for_the_server_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", told.append)
    tokenizer = make(tmp_path, Published("x", "llama", "<s>", "</s>"), None)
    tokenizer.model_max_length = 4
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)
    assert len(adapter.encode_text("a b " * 20, tokenizer)) > 4
    assert told == []


def test_a_tokenizer_without_bos_gets_none(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, Published("x", "qwen2", None, "</s>"), None)
    adapter = get_adapter({"model_type": "qwen2"}, "x", tokenizer)
    assert tokenizer.decode(adapter.encode_text("a b", tokenizer)) == "a b"


def test_a_template_that_forgets_the_bos_gets_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, Published("x", "llama", "<s>", "</s>"), CHATML)
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)
    ids = prompt_ids(adapter, Conversation((Message("user", "hi"),)), tokenizer)
    assert tokenizer.decode(ids) == "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_turn_end_is_learned_from_the_template(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, Published("x", "mamba2", "<s>", "</s>"), CHATML)
    adapter = get_adapter({"model_type": "mamba2"}, "x", tokenizer)
    assert type(adapter) is Adapter
    names = tokenizer.convert_ids_to_tokens(adapter.get_stop_tokens(tokenizer))
    assert names == ["</s>", "<|im_end|>"]


def test_a_token_that_opens_calls_ends_nothing(tmp_path: Path) -> None:
    template = CHATML + "{# <tool_call> tool_call.name #}{{ tools }}"
    tokenizer = make(tmp_path, Published("x", "qwen2", None, "</s>"), template)
    opener = tokenizer.convert_tokens_to_ids("<tool_call>")
    config = {"model_type": "qwen2", "eos_token_id": [opener]}
    assert opener not in get_adapter(config, "x", tokenizer).get_stop_tokens(tokenizer)


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, Published("x", "llama", "<s>", "</s>"), None)
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)
    with pytest.raises(InvalidRequest, match="/v1/completions") as refusal:
        prompt_ids(adapter, Conversation((Message("user", "hi"),)), tokenizer)
    assert refusal.value.param == "messages"


@pytest.mark.parametrize("template", ["hi\n{% if %}", "{{ messages | nobodys_filter }}"])
def test_a_broken_template_is_the_models_fault(tmp_path: Path, template: str) -> None:
    tokenizer = make(tmp_path, Published("x", "llama", "<s>", "</s>"), template)
    adapter = get_adapter({"model_type": "llama"}, "x", tokenizer)
    with pytest.raises(MLXManagerError, match=r"chat template is broken: .*, in line") as failure:
        prompt_ids(adapter, Conversation((Message("user", "hi"),)), tokenizer)
    assert (failure.value.status, failure.value.param) == (500, None)


def test_arguments_of_the_template_reach_it(tmp_path: Path) -> None:
    template = "{{ messages[0]['content'] }} {{ mood | default('none') }}"
    tokenizer = make(tmp_path, Published("x", "qwen2", None, "</s>"), template)
    adapter = get_adapter({"model_type": "qwen2"}, "x", tokenizer)
    conversation = Conversation((Message("user", "hi"),), template_args={"mood": "calm"})
    assert tokenizer.decode(prompt_ids(adapter, conversation, tokenizer)) == "hi calm"


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "tools"])
def test_arguments_of_the_template_can_not_be_those_of_the_renderer(
    tmp_path: Path, name: str
) -> None:
    tokenizer = make(tmp_path, Published("x", "qwen2", None, "</s>"), CHATML)
    adapter = get_adapter({"model_type": "qwen2"}, "x", tokenizer)
    conversation = Conversation((Message("user", "hi"),), template_args={name: "{{ 1 }}"})
    with pytest.raises(InvalidParameter, match=name) as refusal:
        prompt_ids(adapter, conversation, tokenizer)
    assert refusal.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", "{}"), ('{"a": 1}', '{"a": 1}'), ("oops", '"oops"'), ("[" * 100_000, None)],
)
def test_arguments_of_a_past_call_are_an_object_if_they_can_be(
    tmp_path: Path, arguments: str, shown: str | None
) -> None:
    template = (
        "{% for m in messages %}{{ m['content'] }}{% for c in m.tool_calls %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    tokenizer = make(tmp_path, Published("x", "qwen2", None, "</s>"), template)
    adapter = get_adapter({"model_type": "qwen2"}, "x", tokenizer)
    call = ToolCall("call_1", "now", arguments)
    ids = prompt_ids(
        adapter,
        Conversation((Message("user", "hi"), Message("assistant", tool_calls=(call,)))),
        tokenizer,
    )
    text = tokenizer.decode(ids)
    assert text == "hinow" + shown if shown else arguments in text


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (" to=self<|message|>So.<|eom|> to=user<|message|>Rain.<|eot|>", "So.", "Rain.", []),
        (
            ' <atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>',
            "",
            "",
            [("now", {})],
        ),
        (
            "<atem:function_calls>oops</atem:function_calls>",
            "",
            "<atem:function_calls>oops</atem:function_calls>",
            [],
        ),
    ],
)
def test_a_response_format_of_mlx_lm_is_followed(
    text: str, reasoning: str, content: str, calls: list[tuple[str, object]]
) -> None:
    tokenizer = SimpleNamespace(response_transitions=RESPONSE_FORMAT["transitions"])
    edges = answer_edges(tokenizer, None, (), ("<atem:function_calls>",))
    initial = region_of(RESPONSE_FORMAT["initial_state"])
    form = of_mlx("muse_spark").calls
    output = OutputFormat(edges, initial=initial, calls=form, offered=OFFERED)
    for pieces in ([text], text):
        answer = parse(pieces, output)
        assert (answer.reasoning, answer.content, answer.values) == (reasoning, content, calls)
