"""The embedded model: what is shipped, how prompts are rendered, and what it answers.

The questions are among those kept out of its training; training/demo/evaluate.py asks all.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from corpus import conversation, texts
from dialogue import Dialogue
from evaluate import Case, Examiner, answers
from mlx_lm.tokenizer_utils import load as load_tokenizer
from words import held_out, person, summands

from mlx_manager.demo_model import demo_model_path

MODEL = demo_model_path()
BOS = "<|begin_of_text|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text


def openai_messages(dialogue: Dialogue) -> Iterator[dict[str, Any]]:
    """The conversation as a client sends it."""
    if dialogue.system:
        yield {"role": "system", "content": dialogue.system}
    following = [role for role, _ in dialogue.messages[1:]] + [""]
    for (role, text), after in zip(dialogue.messages, following, strict=True):
        if role == "assistant" and after == "tool":
            call = json.loads(text)
            function = {"name": call["name"], "arguments": call["parameters"]}
            tool_calls = [{"id": "call_1", "type": "function", "function": function}]
            yield {"role": role, "content": None, "tool_calls": tool_calls}
        else:
            yield {"role": role, "content": text}


def test_it_takes_less_than_ten_megabytes() -> None:
    files = [file for file in MODEL.iterdir() if file.is_file()]
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {file.name for file in files}
    assert sum(file.stat().st_size for file in files) < 10_000_000


def test_a_prompt_begins_with_one_bos(tokenizer: Any) -> None:
    message = {"role": "user", "content": "Hello!"}
    text = rendered(tokenizer, [message], add_generation_prompt=True)
    assert text.count(BOS) == 1
    assert text.startswith(BOS)
    assert text.endswith("<|start_header_id|>assistant<|end_header_id|>\n\n")
    bos = tokenizer.bos_token_id
    assert tokenizer.apply_chat_template([message])[:2].count(bos) == 1
    assert tokenizer.encode("Hello!").count(bos) == 1


def test_every_turn_end_is_an_end_of_generation(tokenizer: Any) -> None:
    ends = {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
    ids = {tokenizer.convert_tokens_to_ids(end) for end in ends}
    config = json.loads((MODEL / "config.json").read_text())
    assert ids == set(config["eos_token_id"])
    assert tokenizer.eos_token == "<|eot_id|>"


def test_the_template_renders_what_the_model_was_trained_on(tokenizer: Any) -> None:
    rng = random.Random(1)
    for dialogue in (conversation(rng, longest=4) for _ in range(60)):
        dialogue.messages = [(role, text.replace("\ue000", "")) for role, text in dialogue.messages]
        messages = list(openai_messages(dialogue))
        assert rendered(tokenizer, messages, tools=dialogue.tools or None) == dialogue.render()


def test_the_template_takes_any_shape_of_tool(tokenizer: Any) -> None:
    enum = {"type": "string", "enum": ["c", "f"]}
    either = {"type": ["string", "null"]}
    schema = {"type": "object", "properties": {"unit": enum, "place": either, "day": {}}}
    tools = [
        {"type": "function", "function": {"name": "nothing"}},
        {"type": "function", "function": {"name": "look", "parameters": schema}},
    ]
    text = rendered(tokenizer, [{"role": "user", "content": "Hi"}], tools=tools)
    assert "nothing()\nlook(unit?: c|f, place?: any, day?: any)<|eot_id|>" in text


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_template_shows_pictures_where_they_stand(tokenizer: Any, role: str) -> None:
    before, after = {"type": "text", "text": "Look: "}, {"type": "text", "text": " What is it?"}
    message = {"role": role, "content": [before, {"type": "image"}, after]}
    assert "\n\nLook: <image> What is it?<|eot_id|>" in rendered(tokenizer, [message])


def test_text_of_any_script_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "Zoë naïve 你好 🙂\n\n\tx  y 1234 <b> \u0000"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_seed_gives_the_same_training_text() -> None:
    assert list(texts(7, 40)) == list(texts(7, 40))
    assert list(texts(7, 40)) != list(texts(8, 40))


def test_what_is_held_out_is_never_trained_on() -> None:
    rng = random.Random(2)
    assert not any(held_out(person(rng).partition(" ")[0]) for _ in range(300))
    assert not any(held_out(*sorted(summands(rng))) for _ in range(300))
    assert all(held_out(*sorted(summands(rng, "held out"))) for _ in range(300))


def sampled(number: int) -> list[Case]:
    """Some cases of every category but the long ones."""
    rng = random.Random(3)
    cases = [case for case in Examiner(rng, 16).all() if len(case.prompt) < 1500]
    categories = sorted({case.category for case in cases})
    return [
        case
        for category in categories
        for case in rng.sample(list(within(cases, category)), k=number)
    ]


def within(cases: list[Case], category: str) -> Iterator[Case]:
    return (case for case in cases if case.category == category)


def test_it_answers_what_it_was_never_asked_in_training() -> None:
    cases = sampled(4)
    given = answers(Path(MODEL), cases)
    wrong = [
        (case.category, given_answer, case.expected)
        for case, given_answer in zip(cases, given, strict=True)
        if given_answer != case.expected + case.end
    ]
    assert len(wrong) <= len(cases) // 10, wrong
    assert all(answer.endswith(case.end) for case, answer in zip(cases, given, strict=True))
