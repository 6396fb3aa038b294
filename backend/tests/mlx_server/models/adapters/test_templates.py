"""Chat templates through the adapters: prompts, turn ends, tools, thinking."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from models.adapters.published import (
    NAMES,
    REDUCED_NAMES,
    Published,
    loaded,
    prompt_ids,
    write_tokenizer,
)
from text.outputs import Answer

from mlx_manager.mlx_server.backends.guidance import Guidance
from mlx_manager.mlx_server.core import (
    Conversation,
    GenerationRequest,
    Message,
    NamedTool,
    Tool,
    ToolCall,
    ToolChoice,
)
from mlx_manager.mlx_server.models.adapters import Adapter, get_adapter
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.text.grammar.guide import Masks
from mlx_manager.mlx_server.text.grammar.matchers import Mask
from mlx_manager.mlx_server.text.output_parser import OutputParser

GLM, SMALL, HERMES, QWQ, QWEN25, QWEN3, R1, GEMMA, GRANITE, LLAMA31, LLAMA32, PHI, NEMO, OSS, *_ = (
    NAMES
)
SEED, COMMAND, NEMOTRON, PHI4, A13B, HUNYUAN, OLMO, APERTUS, INTERNLM, *_ = REDUCED_NAMES

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Which"},
            "days": {"type": "integer", "description": "How many"},
        },
        "required": ["city"],
    },
)
NOW = Tool("now")
USER = Message("user", "How is Paris?")
CALL = ToolCall("call_Zx8yT0pQ2mLk4nVb6cWd1eRf", "get_weather", '{"city": "Paris", "days": 2}')
OTHER = ToolCall("call_0000000000000000000000aa", "get_weather", '{"city": "Oslo"}')
RESULT = Message("tool", "It rains frogs.", tool_call_id=CALL.id)
OTHER_RESULT = Message("tool", "It snows owls.", tool_call_id=OTHER.id)


@pytest.fixture(params=[*NAMES, *REDUCED_NAMES])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def model(name: str) -> tuple[Adapter, TokenizerWrapper]:
    config, tokenizer = loaded(name)
    return get_adapter(config, name, tokenizer), tokenizer


def rendered(name: str, conversation: Conversation) -> str:
    adapter, tokenizer = model(name)
    text: str = tokenizer.decode(
        prompt_ids(adapter, conversation, tokenizer), skip_special_tokens=False
    )
    return text


def chat(*messages: Message, **more: object) -> Conversation:
    return Conversation(messages, **more)  # type: ignore[arg-type]


def said(name: str, conversation: Conversation, text: str) -> Answer:
    """The answer, when the model says `text` to this conversation."""
    adapter, tokenizer = model(name)
    prompt = prompt_ids(adapter, conversation, tokenizer)
    output = adapter.output_format(tokenizer, conversation, prompt)
    parser = OutputParser(TokenTexts(tokenizer).stream(output), output)
    answer = Answer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stops = adapter.get_stop_tokens(tokenizer)
    end = next((place for place, token in enumerate(ids) if token in stops), len(ids))
    for token in ids[:end]:
        for event in parser.push(token):
            answer.add(event)
    for event in parser.finish("stop"):
        answer.add(event)
    return answer


# ---------------------------------------------------------------------------------------------
# Prompts
# ---------------------------------------------------------------------------------------------


def test_a_prompt_holds_the_messages_and_at_most_one_bos(name: str) -> None:
    adapter, tokenizer = model(name)
    conversation = chat(USER, Message("assistant", "It rains."), Message("user", "And tomorrow?"))
    ids = prompt_ids(adapter, conversation, tokenizer)
    text = tokenizer.decode(ids)
    for message in conversation.messages:
        assert message.content in text
    if tokenizer.bos_token_id is not None and name not in (GRANITE, SEED):
        assert ids.count(tokenizer.bos_token_id) == (0 if name == OSS else 1)
    assert ids[:1] != ids[1:2]


def test_the_system_message_is_in_the_prompt_once(name: str) -> None:
    text = rendered(name, chat(Message("system", "Be brief, owl."), USER))
    assert text.count("Be brief, owl.") == 1


def test_two_system_messages_at_the_beginning_are_both_in_the_prompt(name: str) -> None:
    text = rendered(name, chat(Message("system", "Be brief."), Message("system", "Be kind."), USER))
    assert text.index("Be brief.") < text.index("Be kind.") < text.index("How is Paris?")


def test_system_messages_may_be_anywhere(name: str) -> None:
    fine, brief, kind = (
        Message("assistant", "Fine."),
        Message("system", "Be brief."),
        Message("system", "Be kind."),
    )
    owl, more = Message("system", "Be an owl."), Message("user", "And Oslo?")
    for asked in (
        (owl, USER, brief),
        (owl, USER, brief, fine, more, kind),
        (USER, fine, brief, kind, more),
        (USER, brief, more),
    ):
        text = rendered(name, chat(*asked))
        assert all(message.content in text for message in asked)
        # The first one may be in the last turn, as Mistral Nemo's template has it.
        places = [text.index(message.content) for message in asked if message is not owl]
        assert places == sorted(places)


@pytest.mark.parametrize("name", [R1, GEMMA, NEMO, OSS])
def test_a_system_message_that_has_no_place_is_part_of_what_the_user_says(name: str) -> None:
    fine, brief = Message("assistant", "Fine."), Message("system", "Be brief.")
    said = Message("user", f"Be brief.\n\n{USER.content}")
    assert rendered(name, chat(USER, fine, brief, USER)) == rendered(name, chat(USER, fine, said))


def test_the_end_of_a_turn_is_among_the_stop_tokens(name: str) -> None:
    adapter, tokenizer = model(name)
    text = rendered(name, chat(USER, Message("assistant", "It rains."), USER))
    after = text.split("It rains.")[1].lstrip()
    end = tokenizer.encode(after, add_special_tokens=False)[0]
    stops = adapter.get_stop_tokens(tokenizer)
    assert tokenizer.eos_token_id in stops
    if name == OSS:
        # There `<|end|>` ends the thinking as well; the model ends its turn with `<|return|>`.
        assert "<|end|>" not in tokenizer.convert_ids_to_tokens(stops)
        assert {"<|return|>", "<|call|>"} <= set(tokenizer.convert_ids_to_tokens(stops))
    else:
        assert end in stops


def test_the_last_message_can_be_continued(name: str) -> None:
    begun = Message("assistant", "It rains and")
    text = rendered(name, chat(USER, begun, continue_final_message=True))
    assert text.endswith("It rains and")


# ---------------------------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------------------------


def test_tools_are_in_the_prompt_unless_they_may_not_be_called(name: str) -> None:
    assert "get_weather" in rendered(name, chat(USER, tools=(WEATHER, NOW)))
    silent = rendered(name, chat(USER, tools=(WEATHER, NOW), tool_choice="none"))
    assert "get_weather" not in silent


@pytest.mark.parametrize("before", [(), (Message("system", "Be brief."),)])
def test_tools_that_a_template_reads_from_the_system_message_are_there(
    before: tuple[Message, ...],
) -> None:
    text = rendered(PHI4, chat(*before, USER, tools=(WEATHER, NOW)))
    system, _, rest = text.partition("<|tool|>")
    assert system == f"<|system|>{before[0].content if before else ''}"
    tools = json.loads(rest[: rest.index("<|/tool|>")])
    assert [tool["name"] for tool in tools] == ["get_weather", "now"]
    assert tools[0]["parameters"] == WEATHER.parameters
    assert "<|tool|>" not in rendered(PHI4, chat(*before, USER))


@pytest.mark.parametrize("offered", [(), (WEATHER,)], ids=["not offered", "offered"])
def test_calls_and_their_results_are_in_the_prompt_in_order(
    name: str, offered: tuple[Tool, ...]
) -> None:
    called = Message("assistant", "", tool_calls=(CALL,))
    text = rendered(name, chat(USER, called, RESULT, tools=offered))
    _, asked, after = text.rpartition("How is Paris?")
    assert asked
    assert after.index("get_weather") < after.index("Paris") < after.index("It rains frogs.")


def test_the_user_may_go_on_after_results(name: str) -> None:
    called = Message("assistant", "", tool_calls=(CALL,))
    more = Message("user", "And Oslo?")
    asked = (USER, called, RESULT, more, Message("assistant", "", tool_calls=(OTHER,)))
    text = rendered(name, chat(*asked, OTHER_RESULT, more, tools=(WEATHER,)))
    places = [text.index(said.content) for said in (USER, RESULT, more, OTHER_RESULT)]
    assert [*places, text.rindex(more.content)] == sorted([*places, text.rindex(more.content)])
    assert text.count(more.content) == 2


def test_several_calls_of_one_message_are_all_in_the_prompt(name: str) -> None:
    called = Message("assistant", "", tool_calls=(CALL, OTHER))
    text = rendered(name, chat(USER, called, RESULT, OTHER_RESULT, tools=(WEATHER,)))
    after = text.rpartition("How is Paris?")[2]
    for word in ("Paris", "Oslo", "It rains frogs.", "It snows owls."):
        assert after.count(word) == 1
    assert after.index("Paris") < after.index("It rains frogs.") < after.index("It snows owls.")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_past_calls_are_in_the_prompt_of_a_model_with_a_template_for_tools_alone(
    tmp_path: Path, choice: Literal["auto", "none"]
) -> None:
    """As Hermes 2 and 3 have one: their other template has no place for calls."""
    config, published = loaded(HERMES)
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    write_tokenizer(tmp_path, Published("x", "llama", None, "<|im_end|>"), plain)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    templates = {"default": plain, "tool_use": published.chat_template}
    settings["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(tmp_path)
    adapter = get_adapter(config, "x", tokenizer)
    tools = () if choice == "auto" else (WEATHER,)
    called = Message("assistant", "", tool_calls=(CALL,))
    past = chat(USER, called, RESULT, tools=tools, tool_choice=choice)
    text = adapter.render_text(past, tokenizer)
    after = text.rpartition(USER.content)[2]
    assert after.index('"get_weather"') < after.index("Paris") < after.index(RESULT.content)
    assert WEATHER.description is not None
    assert WEATHER.description not in text
    without = adapter.render_text(chat(USER), tokenizer)
    assert without == f"<|im_start|>user: {USER.content}<|im_end|>"


@pytest.mark.parametrize("name", [SMALL, NEMO])
def test_ids_that_mistral_refuses_are_shortened_alike_in_call_and_result(name: str) -> None:
    called = Message("assistant", "", tool_calls=(CALL, OTHER))
    text = rendered(name, chat(USER, called, RESULT, OTHER_RESULT, tools=(WEATHER,)))
    pattern = "[CALL_ID]" if name == SMALL else '"id": "'
    short = text.split(pattern)[1][:9]
    assert short.isalnum()
    assert text.count(short) == 2
    given = replace(CALL, id="abcdefgh9")
    called = Message("assistant", "", tool_calls=(given,))
    text = rendered(name, chat(USER, called, replace(RESULT, tool_call_id="abcdefgh9")))
    assert text.count("abcdefgh9") == 2


def test_half_a_character_in_a_call_or_a_tool_does_no_harm(name: str) -> None:
    called = Message(
        "assistant", "", tool_calls=(replace(CALL, arguments='{"city": "a\\ud83db"}'),)
    )
    tool = replace(WEATHER, parameters={"type": "object", "properties": {"x\ud83dy": {}}})
    assert "a\ufffdb" in rendered(name, chat(USER, called, RESULT, tools=(tool,)))


@pytest.mark.parametrize("id", ["", "get_weather"])
def test_results_of_calls_that_share_an_id_come_once_and_in_order(name: str, id: str) -> None:
    called = Message("assistant", "", tool_calls=(replace(CALL, id=id), replace(OTHER, id=id)))
    results = (replace(RESULT, tool_call_id=id), replace(OTHER_RESULT, tool_call_id=id))
    text = rendered(name, chat(USER, called, *results, tools=(WEATHER,)))
    assert text.count(RESULT.content) == text.count(OTHER_RESULT.content) == 1
    assert text.index(RESULT.content) < text.index(OTHER_RESULT.content)


def test_a_past_call_with_arguments_of_null_has_none(name: str) -> None:
    def history(arguments: str) -> str:
        called = Message("assistant", "", tool_calls=(replace(CALL, arguments=arguments),))
        return rendered(name, chat(USER, called, RESULT, tools=(WEATHER,)))

    assert history("null") == history("{}")


@pytest.mark.parametrize("calls", [(CALL,), (CALL, OTHER)], ids=["one", "two"])
def test_a_call_as_the_template_writes_it_is_read_as_that_call(
    name: str, calls: tuple[ToolCall, ...]
) -> None:
    if len(calls) == 2 and name in (LLAMA31, LLAMA32, OSS):
        pytest.skip("this template writes one call a message")
    asked = chat(USER, tools=(WEATHER, NOW), add_generation_prompt=False)
    called = replace(asked, messages=(USER, Message("assistant", "", tool_calls=calls)))
    prompt = replace(asked, add_generation_prompt=True)
    adapter, tokenizer = model(name)
    before, after = prompt_ids(adapter, prompt, tokenizer), prompt_ids(adapter, called, tokenizer)
    common = next(
        (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before)
    )
    answer = said(name, prompt, tokenizer.decode(after[common:]))
    assert [(call.name, call.value) for call in answer.calls] == [
        (call.name, json.loads(call.arguments)) for call in calls
    ]
    assert answer.content == ""
    lengths = {len(call.id) for call in answer.calls}
    assert lengths == ({9} if name in (SMALL, NEMO) else {29})


@pytest.mark.parametrize("strict", [False, True], ids=["demanded", "strict"])
def test_a_call_as_the_template_writes_it_is_what_a_demanded_call_looks_like(
    name: str, strict: bool
) -> None:
    adapter, tokenizer = model(name)
    tools = (replace(WEATHER, strict=strict), NOW)
    asked = chat(USER, tools=tools, tool_choice="auto" if strict else "required")
    prompt = prompt_ids(adapter, asked, tokenizer)
    called = Message("assistant", "", tool_calls=(CALL,))
    history = replace(asked, messages=(USER, called), add_generation_prompt=False)
    after = prompt_ids(adapter, history, tokenizer)
    pairs = enumerate(zip(prompt, after, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), len(prompt))
    output = adapter.output_format(tokenizer, asked, prompt)
    text = tokenizer.decode(after[common:]).rpartition(output.thinking_end or "</think>")[2].strip()
    if name == OSS:
        text = " " + text
    stops = adapter.get_stop_tokens(tokenizer)
    _, guide = Guidance(tokenizer, stops).of(GenerationRequest("m", asked), output)
    assert guide is not None
    rules = guide.rules
    assert rules is not None
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token in stops:
            break
        if not rules.matcher.validate_tokens([token]):
            raise AssertionError(f"{tokenizer.decode([token])!r} in {text!r}")
        rules.matcher.consume_token(token)
    assert rules.matcher.is_accepting()


@pytest.mark.parametrize("name", [R1, GEMMA, PHI])
def test_calls_in_a_form_that_a_model_was_not_made_for_are_held_to_their_tools(name: str) -> None:
    adapter, tokenizer = model(name)
    asked = chat(USER, tools=(WEATHER, NOW))
    output = adapter.output_format(tokenizer, asked, prompt_ids(adapter, asked, tokenizer))
    stops = adapter.get_stop_tokens(tokenizer)

    def allowed(text: str) -> bool:
        _, guide = Guidance(tokenizer, stops).of(GenerationRequest("m", asked), output)
        assert guide is not None
        assert guide.rules is not None
        ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(guide.rules.matcher.validate_tokens(ids) == len(ids))

    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    for text in ("It rains.", f"Let me see.\n{call}", call, f"{call}\n{call}"):
        assert allowed(text)
    for text in ('<tool_call>\n{"name": "fly', "<tool_call> Paris", call.replace('"Paris"', "5")):
        assert not allowed(text)


@pytest.mark.parametrize("choice", ["required", NamedTool("get_weather")])
@pytest.mark.parametrize("name", [OSS, QWEN3, GLM])
def test_a_call_is_demanded_once_the_budget_for_thinking_is_spent(
    name: str, choice: ToolChoice
) -> None:
    adapter, tokenizer = model(name)
    asked = chat(USER, tools=(WEATHER, NOW), tool_choice=choice, parallel_tool_calls=False)
    output = adapter.output_format(tokenizer, asked, prompt_ids(adapter, asked, tokenizer))
    request = GenerationRequest("m", asked, thinking_budget=5)
    output, guide = Guidance(tokenizer, adapter.get_stop_tokens(tokenizer)).of(request, output)
    assert guide is not None
    parser = OutputParser(TokenTexts(tokenizer).stream(output), output)
    begun = "<|channel|>analysis<|message|>" if name == OSS else "<think>"
    wanted = deque(tokenizer.encode(f"{begun}Let me think.", add_special_tokens=False))
    answer, masks = Answer(), Masks()
    for _ in range(200):
        masks.update([guide])
        assert guide.failure is None
        assert guide.mask is not None or wanted
        allowed = set(wanted) if guide.mask is None else tokens_in(guide.mask)
        if wanted and wanted[0] not in allowed:
            wanted.clear()
        token = wanted.popleft() if wanted else min(allowed)
        for event in parser.push(token):
            answer.add(event)
        if answer.calls:
            break
        guide.observe(token, parser.region, parser.reasoning_tokens, "")
    assert (answer.reasoning, len(answer.calls)) == ("Let m", 1)


def tokens_in(mask: Mask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def deepseek_32(folder: Path) -> tuple[Adapter, TokenizerWrapper]:
    published = Published(
        "x", "deepseek_v32", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("｜DSML｜",)
    )
    write_tokenizer(folder, published, None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template_type"] = "deepseek_v32"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(folder)
    return get_adapter({"model_type": "deepseek_v32"}, "x", tokenizer), tokenizer


def test_deepseek_32_passes_over_what_it_has_no_variable_for(tmp_path: Path) -> None:
    adapter, tokenizer = deepseek_32(tmp_path)

    def text(**arguments: object) -> str:
        return adapter.render_text(chat(USER, template_args=arguments), tokenizer)

    assert text(reasoning_effort="low", x=1) == text()
    assert text(reasoning_effort="low", enable_thinking=False).endswith("</think>")


def test_deepseek_32_writes_and_reads_its_own_markup(tmp_path: Path) -> None:
    adapter, tokenizer = deepseek_32(tmp_path)
    asked = chat(USER, tools=(WEATHER, NOW), tool_choice="required")
    prompt = prompt_ids(adapter, asked, tokenizer)
    called = Message("assistant", "", tool_calls=(CALL, OTHER))
    history = chat(USER, called, RESULT, OTHER_RESULT, tools=(WEATHER, NOW))
    text = tokenizer.decode(prompt_ids(adapter, history, tokenizer), skip_special_tokens=False)
    assert "It rains frogs." in text
    assert "It snows owls." in text
    begins = text.rindex("<｜DSML｜function_calls>")
    block = (
        text[begins : text.index("</｜DSML｜function_calls>", begins)] + "</｜DSML｜function_calls>"
    )
    output = adapter.output_format(tokenizer, asked, prompt)
    assert output.calls is not None
    parser = OutputParser(TokenTexts(tokenizer).stream(output), output)
    answer = Answer()
    for token in tokenizer.encode(block, add_special_tokens=False):
        for event in parser.push(token):
            answer.add(event)
    assert [(call.name, call.value) for call in answer.calls] == [
        (call.name, json.loads(call.arguments)) for call in (CALL, OTHER)
    ]


def test_what_looks_like_a_call_is_text_when_no_tools_are_offered(name: str) -> None:
    text = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    begun = "<|channel|>final<|message|>" if name == OSS else ""
    answer = said(name, chat(USER), begun + text)
    assert (answer.content or answer.reasoning) == text
    assert not answer.calls


# ---------------------------------------------------------------------------------------------
# Thinking
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        (QWEN3, {}, "<think>\nSo.\n</think>\n\nRain."),
        (QWEN3, {"enable_thinking": True}, "<think>\nSo.\n</think>\n\nRain."),
        (QWQ, {}, "So.\n</think>\n\nRain."),
        (R1, {}, "So.\n</think>\n\nRain."),
        (GLM, {}, "\n<think>So.\n</think>\nRain."),
        (GRANITE, {"thinking": True}, "<think>So.\n</think><response>Rain.</response>"),
        (GRANITE, {"enable_thinking": True}, "<think>So.\n</think><response>Rain.</response>"),
        (
            OSS,
            {"reasoning_effort": "high"},
            "<|channel|>analysis<|message|>So.\n<|end|><|start|>assistant<|channel|>final<|message|>Rain.",
        ),
        (SEED, {}, "<seed:think>So.\n</seed:think>\nRain."),
        (
            COMMAND,
            {},
            "<|START_THINKING|>So.\n<|END_THINKING|><|START_RESPONSE|>Rain.<|END_RESPONSE|>",
        ),
        (
            COMMAND,
            {"enable_thinking": True},
            "So.\n<|END_THINKING|><|START_RESPONSE|>Rain.<|END_RESPONSE|>",
        ),
        (COMMAND, {}, "<|START_THINKING|>So.\n<|END_THINKING|>Rain."),
        (A13B, {}, "<think>\nSo.\n</think>\n<answer>\nRain.\n</answer>"),
        (HUNYUAN, {}, "<think>\nSo.\n</think>\n<answer>\nRain.\n</answer>"),
        (APERTUS, {}, "<|inner_prefix|>So.\n<|inner_suffix|>Rain."),
        (NEMOTRON, {}, "<think>\nSo.\n</think>\n\nRain."),
        (SEED, {"thinking_budget": 0}, "So.\n</seed:cot_budget_reflect></seed:think>\nRain."),
    ],
)
def test_thinking_is_split_from_content(name: str, arguments: dict[str, object], text: str) -> None:
    answer = said(name, chat(USER, template_args=arguments), text)
    assert (answer.reasoning, answer.content) == ("So.\n", "Rain.")


@pytest.mark.parametrize(
    ("name", "end"),
    [(QWEN3, "</think>"), (GLM, "</think>"), (COMMAND, "<|START_THINKING|><|END_THINKING|>")],
)
def test_thinking_can_be_switched_off(name: str, end: str) -> None:
    conversation = chat(USER, template_args={"enable_thinking": False})
    assert end in rendered(name, conversation)
    answer = said(name, conversation, "Rain.")
    assert (answer.reasoning, answer.content) == ("", "Rain.")


def test_granite_is_told_to_think_by_either_name_of_the_switch() -> None:
    def told(**switches: bool) -> bool:
        return "<think></think>" in rendered(GRANITE, chat(USER, template_args=switches))

    assert told(thinking=True)
    assert told(enable_thinking=True)
    assert not told()
    assert not told(enable_thinking=False)
    assert not told(enable_thinking=True, thinking=False)


@pytest.mark.parametrize("thinks", [True, False])
def test_a_template_that_asks_for_thinking_by_another_name_is_heard(
    tmp_path: Path, thinks: bool
) -> None:
    """As DeepSeek V3.1's."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<think>' if thinking is defined and thinking else '<think></think>' }}{% endif %}"
    )
    write_tokenizer(tmp_path, Published("x", "deepseek_v3", None, "<|im_end|>"), template)
    tokenizer = load(tmp_path)
    adapter = get_adapter({"model_type": "deepseek_v3"}, "x", tokenizer)
    conversation = chat(USER, template_args={"enable_thinking": thinks})
    text = adapter.render_text(conversation, tokenizer)
    assert text.endswith("<think>" if thinks else "</think>")
    prompt = adapter.encode_text(text, tokenizer)
    output = adapter.output_format(tokenizer, conversation, prompt)
    assert output.initial == ("reasoning" if thinks else "content")


def test_seed_oss_is_told_not_to_think_by_a_budget_of_nothing() -> None:
    def told(**variables: object) -> bool:
        text = rendered(SEED, chat(USER, template_args=variables))
        return text.endswith("<seed:think><seed:cot_budget_reflect>")

    assert told(thinking_budget=0)
    assert told(enable_thinking=False)
    assert not told()
    assert not told(enable_thinking=True)
    assert not told(enable_thinking=False, thinking_budget=512)


@pytest.mark.parametrize("name", [QWQ, R1])
def test_thinking_that_a_template_begins_all_the_same_is_ended_at_once(name: str) -> None:
    adapter, tokenizer = model(name)
    guidance = Guidance(tokenizer, adapter.get_stop_tokens(tokenizer))

    def allowed(conversation: Conversation) -> set[int] | None:
        output = adapter.output_format(
            tokenizer, conversation, prompt_ids(adapter, conversation, tokenizer)
        )
        assert output.initial == "reasoning"
        _, guide = guidance.of(GenerationRequest("m", conversation), output)
        if guide is None or guide.mask is None:
            return None
        return tokens_in(guide.mask)

    (first, *_) = tokenizer.encode("</think>", add_special_tokens=False)
    assert allowed(chat(USER, template_args={"enable_thinking": False})) == {first}
    for others in ({}, {"enable_thinking": True}):
        assert allowed(chat(USER, template_args=others)) is None


def test_gpt_oss_is_told_how_hard_to_think() -> None:
    conversation = chat(USER, template_args={"reasoning_effort": "high"})
    assert "Reasoning: high" in rendered(OSS, conversation)


@pytest.mark.parametrize("told", [{}, {"enable_thinking": True}], ids=["always", "told to"])
@pytest.mark.parametrize("begun", ["", "<think>Let me"])
def test_thinking_that_a_template_opens_is_split_from_content_without_tokens_for_it(
    tmp_path: Path, begun: str, told: dict[str, bool]
) -> None:
    """As OLMo 3's, whose vocabulary has no `<think>`."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: "
        f"{{{{ '<' ~ 'think>' if {'enable_thinking' if told else 'true'} }}}}{{% endif %}}"
    )
    write_tokenizer(tmp_path, Published("x", "olmo3", None, "<|im_end|>"), template)
    tokenizer = load(tmp_path)
    assert not tokenizer.has_thinking
    adapter = get_adapter({"model_type": "olmo3"}, "x", tokenizer)
    messages = (USER, Message("assistant", begun)) if begun else (USER,)
    conversation = chat(*messages, continue_final_message=bool(begun), template_args=told)
    prompt = prompt_ids(adapter, conversation, tokenizer)
    output = adapter.output_format(tokenizer, conversation, prompt)
    parser = OutputParser(TokenTexts(tokenizer).stream(output), output)
    answer = Answer()
    for token in tokenizer.encode("So.\n</think>\n\nRain.", add_special_tokens=False):
        for event in parser.push(token):
            answer.add(event)
    for event in parser.finish("stop"):
        answer.add(event)
    assert (answer.reasoning, answer.content) == ("So.\n", "Rain.")


def test_ernie_answers_between_tokens_that_nobody_sees(tmp_path: Path) -> None:
    """As vLLM's ernie45_tool_parser.py has it; its calls are Hermes's."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>\n' }}"
    tokens = ("<response>", "</response>", "<think>", "</think>")
    write_tokenizer(tmp_path, Published("x", "ernie4_5_moe", None, "</s>", tokens), template)
    tokenizer = load(tmp_path)
    adapter = get_adapter({"model_type": "ernie4_5_moe"}, "x", tokenizer)
    prompt = prompt_ids(adapter, chat(USER), tokenizer)
    output = adapter.output_format(tokenizer, chat(USER), prompt)
    parser = OutputParser(TokenTexts(tokenizer).stream(output), output)
    answer = Answer()
    text = "So.\n</think>\n\n<response>\nRain.\n</response>\n"
    for token in tokenizer.encode(text, add_special_tokens=False):
        for event in parser.push(token):
            answer.add(event)
    for event in parser.finish("stop"):
        answer.add(event)
    assert (answer.reasoning, answer.content) == ("So.\n", "Rain.\n")


def test_a_question_about_markers_does_not_begin_the_thinking() -> None:
    answer = said(QWEN3, chat(Message("user", "What is <think>")), "A marker.")
    assert (answer.reasoning, answer.content) == ("", "A marker.")


def test_thinking_that_is_continued_goes_on() -> None:
    begun = Message("assistant", "<think>Let me")
    conversation = chat(USER, begun, continue_final_message=True)
    answer = said(R1, conversation, " see.</think>Rain.")
    assert (answer.reasoning, answer.content) == (" see.", "Rain.")


@pytest.mark.parametrize("name", [QWEN3, GLM, OSS, SEED, COMMAND])
def test_thinking_before_a_call_is_in_the_history(name: str) -> None:
    called = Message("assistant", "", reasoning="Better ask.", tool_calls=(CALL,))
    text = rendered(name, chat(USER, called, RESULT, tools=(WEATHER,)))
    assert "Better ask." in text


def test_gpt_oss_keeps_both_thinking_and_text_beside_a_call() -> None:
    called = Message("assistant", "One moment.", reasoning="Better ask.", tool_calls=(CALL,))
    text = rendered(OSS, chat(USER, called, RESULT, tools=(WEATHER,)))
    assert "Better ask." in text
    assert "One moment." in text
