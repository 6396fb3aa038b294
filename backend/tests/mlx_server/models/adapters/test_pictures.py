"""Pictures in conversations: each is shown once, in its place, and callers' texts stay texts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper, load
from tiny_vision import SEEING, write_tokenizer

from mlx_manager.mlx_server.core import Conversation, Image, Message, Tool, ToolCall
from mlx_manager.mlx_server.errors import InvalidRequest
from mlx_manager.mlx_server.models.adapters import Adapter, get_adapter
from mlx_manager.mlx_server.models.families import vision_facts

CAT, DOG = (Image(b"", name, 8, 8) for name in ("cat", "dog"))
CALL = ToolCall("call_Zx8yT0pQ2mLk", "look", '{"at": "Paris"}')
LOOK = Tool("look", "Looks", {"type": "object", "properties": {"at": {"type": "string"}}})
CALLED = Message("assistant", tool_calls=(CALL,))

STRICT = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] | trim }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
"""As Gemma 3's: turns alternate, and there is no system message."""
TEXTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] + '' }}<|im_end|>\n{% endfor %}"
)
"""Takes no lists of parts."""
ANYWHERE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ note or '' }}"
)
"""Takes parts in every role, as Qwen3-VL's, and lists tools."""
RESULTS_AS_TEXTS = ANYWHERE.replace(
    "{% if message['content'] is string %}",
    "{% if message['role'] == 'tool' %}{{ message['content'] + '' }}"
    "{% elif message['content'] is string %}",
)
"""The same, but with results as texts alone."""


@cache
def model(kind: str, template: str = "") -> tuple[Adapter, TokenizerWrapper]:
    made = SEEING[kind]
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), made.tokens, template or made.template)
        tokenizer = load(Path(folder))
    return get_adapter({"model_type": kind, **made.config}, kind, tokenizer), tokenizer


def placeholder(kind: str) -> str:
    facts = vision_facts({"model_type": kind, **SEEING[kind].config})
    assert facts is not None
    return facts.placeholder


def rendered(kind: str, *messages: Message, template: str = "", **more: Any) -> str:
    adapter, tokenizer = model(kind, template)
    return adapter.render_text(Conversation(messages, **more), tokenizer)


def words(text: str, kind: str) -> list[str]:
    """The words of a prompt that the tests write, a picture as PICTURE."""
    return re.findall(r"PICTURE|word\w+", text.replace(placeholder(kind), " PICTURE "))


@pytest.fixture(params=sorted(SEEING))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_texts_and_pictures_stand_in_their_order(kind: str) -> None:
    text = rendered(
        kind,
        Message("user", ("word1 ", CAT, " word2 ", DOG, CAT)),
        Message("assistant", "word3"),
        Message("user", (DOG, "word4")),
    )
    expected = "word1 PICTURE word2 PICTURE PICTURE word3 PICTURE word4"
    assert words(text, kind) == expected.split()


def test_conversations_without_pictures_are_shown_whole(kind: str) -> None:
    messages = [Message("system", "word1"), Message("user", "word2"), Message("assistant", "word3")]
    text = rendered(kind, *messages, Message("user", "word4"))
    assert words(text, kind) == ["word1", "word2", "word3", "word4"]


@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_pictures_of_other_roles_are_shown_where_the_template_can(kind: str, role: Any) -> None:
    """As here, in the user's next turn, and with the texts around in their order."""
    said = Message(role, ("word2 ", CAT), tool_call_id=CALL.id if role == "tool" else None)
    before = [Message("user", "word1"), *([CALLED] if role == "tool" else [])]
    text = rendered(kind, *before, said, Message("user", "word3"), tools=(LOOK,))
    assert [word for word in words(text, kind) if word != "PICTURE"] == ["word1", "word2", "word3"]
    found = words(text, kind)
    assert found.count("PICTURE") == 1
    assert found.index("word2") < found.index("PICTURE") < found.index("word3")


def test_a_result_keeps_its_picture_where_the_template_shows_it() -> None:
    result = Message("tool", ("word2 ", CAT, " word3"), tool_call_id=CALL.id)
    text = rendered(
        "qwen3_vl", Message("user", "word1"), CALLED, result, template=ANYWHERE, tools=(LOOK,)
    )
    shown = "<|im_start|>tool\nword2 <|vision_start|><|image_pad|><|vision_end|> word3<|im_end|>"
    assert shown in text


def test_pictures_of_results_come_after_all_of_them_where_it_does_not() -> None:
    calls = (CALL, ToolCall("call_0000000000aa", "look", '{"at": "Oslo"}'))
    results = [
        Message("tool", (f"word{number} ", CAT), tool_call_id=call.id)
        for number, call in enumerate(calls, 2)
    ]
    text = rendered(
        "qwen2_5_vl",
        Message("user", "word1"),
        Message("assistant", tool_calls=calls),
        *results,
        Message("assistant", "word4"),
        template=RESULTS_AS_TEXTS,
        tools=(LOOK,),
    )
    assert "<|im_start|>user\n<|vision_start|>" in text
    assert words(text, "qwen2_5_vl") == ["word1", "word2", "word3", "PICTURE", "PICTURE", "word4"]


def test_turns_that_are_joined_keep_their_pictures() -> None:
    text = rendered(
        "gemma3",
        Message("system", ("word1 ", CAT)),
        Message("user", ("word2 ", DOG)),
        Message("user", (CAT, "word3")),
        template=STRICT,
    )
    assert words(text, "gemma3") == ["word1", "PICTURE", "word2", "PICTURE", "PICTURE", "word3"]
    assert text.count("<|im_start|>") == 1


def test_a_template_of_texts_alone_gets_the_familys_text_for_a_picture() -> None:
    text = rendered("qwen3_vl", Message("user", ("word1 ", CAT, " word2")), template=TEXTS)
    assert "word1 <|vision_start|><|image_pad|><|vision_end|> word2" in text


def test_a_template_of_parts_alone_gets_texts_as_parts() -> None:
    text = rendered("smolvlm", Message("user", "word1"))
    assert text == "<|im_start|>User: word1<end_of_utterance>\nAssistant:"


def test_pictures_of_a_model_that_sees_none_are_not_dropped_in_silence(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, (), TEXTS)
    tokenizer = load(tmp_path)
    adapter = get_adapter({"model_type": "llama"}, "llama", tokenizer)
    with pytest.raises(InvalidRequest):
        adapter.render(Conversation((Message("user", ("hi ", CAT)),)), tokenizer)


# ---------------------------------------------------------------------------------------------
# Texts of callers
# ---------------------------------------------------------------------------------------------


def ids_of(kind: str, conversation: Conversation, template: str = "") -> tuple[list[int], str]:
    adapter, tokenizer = model(kind, template)
    found = adapter.render(conversation, tokenizer)
    return adapter.encode_text(found.marked, tokenizer, found.cut), found.text


def test_a_literal_token_of_a_picture_is_text(kind: str) -> None:
    _, tokenizer = model(kind)
    for token in (placeholder(kind), *SEEING[kind].tokens[-3:]):
        facts = vision_facts({"model_type": kind, **SEEING[kind].config})
        if facts is None or token not in facts.words:
            continue
        number = tokenizer.convert_tokens_to_ids(token)
        said = Message("user", f"word1 {token}{token} word2")
        ids, text = ids_of(kind, Conversation((said,)))
        assert number not in ids
        assert f"word1 {token}{token} word2" in text
        assert tokenizer.decode(ids).endswith(text.removeprefix("<|begin_of_text|>"))
        ids, _ = ids_of(kind, Conversation((Message("user", (f"{token} ", CAT, token)),)))
        own = tokenizer.convert_tokens_to_ids(placeholder(kind))
        assert ids.count(own) == 1


PAD = "<|image_pad|>"


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation((Message("system", PAD), Message("user", "hi"))),
        Conversation((Message("user", "hi"), Message("assistant", PAD), Message("user", "so"))),
        Conversation((Message("user", "hi"),), (Tool(f"n{PAD}", f"d{PAD}"),)),
        Conversation((Message("user", "hi"),), (Tool("n", "d", {"properties": {PAD: {}}}),)),
        Conversation((Message("user", "hi"), Message("assistant", tool_calls=(
            ToolCall("call_0000000000aa", f"n{PAD}", f'{{"a{PAD}": "{PAD}"}}'),
        )), Message("tool", f"r{PAD}", tool_call_id="call_0000000000aa"))),
        Conversation((Message("user", "hi"), Message("assistant", tool_calls=(
            ToolCall("call_0000000000aa", "n", '{"a": "\\u003c|image_pad|>"}'),
        )), Message("tool", "r", tool_call_id="call_0000000000aa"))),
        Conversation((Message("user", "hi"),), template_args={"note": PAD}),
    ],
)  # fmt: skip
def test_a_literal_anywhere_in_a_request_is_text(conversation: Conversation) -> None:
    _, tokenizer = model("qwen3_vl", ANYWHERE)
    ids, text = ids_of("qwen3_vl", conversation, ANYWHERE)
    assert PAD in text
    assert tokenizer.convert_tokens_to_ids(PAD) not in ids


@given(st.lists(st.sampled_from([PAD, "<", "|image_pad|>", "<|vision_start|>", "qcut0q", "x"])))
def test_texts_of_tokens_pieces_come_back_as_they_were(pieces: list[str]) -> None:
    said = "".join(pieces)
    _, tokenizer = model("qwen3_vl", TEXTS)
    ids, text = ids_of("qwen3_vl", Conversation((Message("user", said),)), TEXTS)
    assert said in text
    assert not {tokenizer.convert_tokens_to_ids(each) for each in (PAD, "<|vision_start|>")} & {
        *ids
    }
    assert said in tokenizer.decode(ids)
