"""Outputs of models in every format of tool calls and thinking, and what they mean; those of calls
are derived from `golden.py`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from text.tool_calls.golden import GOLDEN

from mlx_manager.mlx_server.core import (
    Event,
    FinishReason,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from mlx_manager.mlx_server.formats import OutputFormat, Region, ToolFormat
from mlx_manager.mlx_server.models.adapters.answer import kept_tokens
from mlx_manager.mlx_server.models.families import gpt_oss
from mlx_manager.mlx_server.text.output_parser import OutputParser
from mlx_manager.mlx_server.text.tool_calls import formats


def _tool(name: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    _tool("get_weather", city="string", days="integer"),
    _tool("note", text="string"),
    _tool("now"),
]
OFFERED = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


# ---------------------------------------------------------------------------------------------
# What came out, joined
# ---------------------------------------------------------------------------------------------


@dataclass
class Call:
    name: str
    arguments: str
    id: str = ""

    @property
    def value(self) -> Any:
        return json.loads(self.arguments)


@dataclass
class Answer:
    """An answer's events, joined: pieces of text and thinking, and calls, in their order."""

    parts: list[tuple[str, str] | Call] = field(default_factory=list)
    stopped: str | None = None

    @property
    def content(self) -> str:
        return "".join(
            part[1] for part in self.parts if not isinstance(part, Call) and part[0] == "text"
        )

    @property
    def reasoning(self) -> str:
        return "".join(
            part[1] for part in self.parts if not isinstance(part, Call) and part[0] == "reasoning"
        )

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(call.name, call.value) for call in self.calls]

    def add(self, event: Event) -> None:
        match event:
            case TextDelta(text):
                self._add("text", text)
            case ReasoningDelta(text):
                self._add("reasoning", text)
            case ToolCallStarted(index, call_id, name):
                assert index == len(self.calls)
                self.parts.append(Call(name, "", call_id))
            case ToolCallDelta(index, arguments):
                assert index == len(self.calls) - 1, "arguments belong to the call begun last"
                assert arguments, "no empty events"
                self.calls[index].arguments += arguments

    def _add(self, kind: str, text: str) -> None:
        assert text, "no empty events"
        last = self.parts[-1] if self.parts else None
        if isinstance(last, tuple) and last[0] == kind:
            self.parts[-1] = (kind, last[1] + text)
        else:
            self.parts.append((kind, text))


class Pieces:
    """A detokenizer whose vocabulary is one output's pieces, in their order."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def add(self, token_id: int) -> str:
        return self._pieces[token_id]

    def finish(self) -> str:
        return ""


def parse(
    pieces: Iterable[str],
    output: OutputFormat,
    stop: Sequence[str] = (),
    reason: FinishReason = "stop",
) -> Answer:
    """What the engine does with an output that comes in these pieces."""
    numbers = count(1)
    output = replace(output, new_call_id=lambda: f"id-{next(numbers)}")
    pieces = list(pieces)
    parser = OutputParser(Pieces(pieces), output, stop)
    answer = Answer()
    for token in range(len(pieces)):
        for event in parser.push(token):
            answer.add(event)
        if parser.complete:
            break
    for event in parser.finish(reason):
        answer.add(event)
    answer.stopped = parser.stopped
    assert answer.calls or not parser.called
    return answer


# ---------------------------------------------------------------------------------------------
# Formats
# ---------------------------------------------------------------------------------------------


def output_of(
    form: ToolFormat, offered: Mapping[str, Mapping[str, Any]], tokenizer: Any = None
) -> OutputFormat:
    """Return how answers of a model with this format look. tokenizer: the one with its tokens."""
    edges: dict[Region, tuple[tuple[str, Region], ...]] = {
        "content": tuple((opener, "calls") for opener in form.openers)
    }
    header = gpt_oss.HARMONY.header if form is formats.HARMONY else None
    if form is formats.MUSE_SPARK:
        edges = {
            "header": (("<atem:function_calls>", "calls"), ("to=self<|message|>", "reasoning")),
            "reasoning": (("<|eom|>", "header"),),
        }
    if header:
        edges = gpt_oss.HARMONY.edges
    return OutputFormat(
        edges=edges,
        initial="header" if form.whole else "content",
        header=header,
        channels={"analysis": "reasoning"} if header else {},
        calls=form,
        offered=offered,
        keep=kept_tokens(tokenizer, edges, form, header or "") if tokenizer else frozenset(),
    )


def of_format(form: ToolFormat) -> OutputFormat:
    output = output_of(form, OFFERED)
    if form is formats.MUSE_SPARK:
        return replace(output, edges={"content": ((form.openers[0], "calls"),)}, initial="content")
    return output


def of_mlx(module: str) -> OutputFormat:
    """Return the output of models whose calls a module of mlx-lm reads."""
    return of_format(formats.told_format("", module))


HARMONY = of_format(formats.HARMONY)
THINKING = OutputFormat(
    {"content": (("<think>", "reasoning"),), "reasoning": (("</think>", "content"),)}
)
HUNYUAN_THINKING = OutputFormat(
    {
        "content": (
            ("<answer>", "content"),
            ("\n</answer>", "content"),
            ("</answer>", "content"),
            ("<think>", "reasoning"),
        ),
        "reasoning": (("</think>", "content"),),
    }
)
HERMES = of_format(formats.HERMES)
THINKING_HERMES = OutputFormat(
    {
        "content": (("<think>", "reasoning"), ("<tool_call>", "calls")),
        "reasoning": (("</think>", "content"), ("<tool_call>", "calls")),
    },
    calls=HERMES.calls,
    offered=OFFERED,
)
LLAMA = of_format(formats.LLAMA)

# ---------------------------------------------------------------------------------------------
# Outputs
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One well-formed output and its meaning."""

    title: str
    output: OutputFormat
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""


PARIS = {"city": "Paris", "days": 2}
NASTY = 'He said "hi" </tool_call> {[ é🎉 <tool_call> \\ end'
WEATHER = ("get_weather", PARIS)
NOTE = ("note", {"text": NASTY})
_J = json.dumps
_CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
_NOTE = f'{{"name": "note", "arguments": {_J({"text": NASTY}, ensure_ascii=False)}}}'
_SEP, _BEGIN, _END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def _glm(name: str, **values: str) -> str:
    pairs = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in values.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def _coder(name: str, **values: str) -> str:
    pairs = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def _seed(name: str, **values: str) -> str:
    pairs = "".join(f"<parameter={k}>{v}</parameter>\n" for k, v in values.items())
    return f"<seed:tool_call>\n<function={name}>\n{pairs}</function>\n</seed:tool_call>"


_DSML = "｜DSML｜"


def _dsml(name: str, *values: str) -> str:
    pairs = "".join(f"<{_DSML}parameter name={v}</{_DSML}parameter>\n" for v in values)
    return f'<{_DSML}invoke name="{name}">\n{pairs}</{_DSML}invoke>\n'


SAMPLES = (
    *(
        Sample(name, output_of(formats.FORMATS[name], OFFERED), text, "", (WEATHER, ("now", {})))
        for name, text in GOLDEN.items()
    ),
    Sample(
        "hermes among text",
        HERMES,
        f"I'll look.\n<tool_call>\n{_CALL}\n</tool_call>\n<tool_call>\n{_NOTE}\n</tool_call>\nDone.",
        "I'll look.\n\nDone.",
        (WEATHER, NOTE),
    ),
    Sample(
        "hermes, two objects",
        HERMES,
        f"<tool_call>{_CALL}\n{_NOTE}</tool_call>",
        "",
        (WEATHER, NOTE),
    ),
    Sample(
        "hermes, a list", HERMES, f"<tool_call>[{_CALL}, {_NOTE}]</tool_call>", "", (WEATHER, NOTE)
    ),
    Sample(
        "hermes, arguments first",
        HERMES,
        '<tool_call>{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}</tool_call>',
        "",
        (WEATHER,),
    ),
    Sample(
        "hermes, arguments as text",
        HERMES,
        f'<tool_call>{{"name": "get_weather", "arguments": {_J(_J(PARIS))}}}</tool_call>',
        "",
        (WEATHER,),
    ),
    Sample(
        "hermes, no arguments", HERMES, '<tool_call>{"name": "now"}</tool_call>', "", (("now", {}),)
    ),
    Sample(
        "hermes, empty arguments",
        HERMES,
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
        "",
        (("now", {}),),
    ),
    Sample(
        "hermes, more keys",
        HERMES,
        '<tool_call>{"id": 3, "name": "now", "arguments": {}, "why": ["a", {"b": null}]}</tool_call>',
        "",
        (("now", {}),),
    ),
    Sample("hermes, no closing marker", HERMES, f"<tool_call>\n{_CALL}", "", (WEATHER,)),
    Sample(
        "hermes, no last brace", HERMES, f"<tool_call>\n{_CALL[:-1]}\n</tool_call>", "", (WEATHER,)
    ),
    Sample(
        "phi-4-mini, one by one",
        of_format(formats.PHI_4),
        f"<|tool_call|>{_CALL}<|/tool_call|><|tool_call|>{_NOTE}<|/tool_call|>",
        "",
        (WEATHER, NOTE),
    ),
    Sample(
        "phi-4-mini, in OpenAI's form",
        of_format(formats.PHI_4),
        f'<|tool_call|>[ {{"type": "function", "function": {_CALL}}}, '
        f'{{"type": "function", "function": {{"name": "now"}}, "id": "1"}} ]<|/tool_call|>',
        "",
        (WEATHER, ("now", {})),
    ),
    Sample(
        "mistral, headers",
        of_mlx("mistral"),
        f"[TOOL_CALLS]get_weather[ARGS]{_J(PARIS)}[TOOL_CALLS]note[CALL_ID]abcdefghi[ARGS]{_J({'text': NASTY})}",
        "",
        (WEATHER, NOTE),
    ),
    Sample(
        "deepseek v3.1",
        of_format(formats.DEEPSEEK),
        f"Hm.<｜tool▁calls▁begin｜>{_BEGIN}get_weather{_SEP}{_J(PARIS)}{_END}<｜tool▁calls▁end｜>",
        "Hm.",
        (WEATHER,),
    ),
    Sample(
        "llama, with a type, after blanks",
        LLAMA,
        '\n {"type": "function", "name": "now", "parameters": {}}',
        "",
        (("now", {}),),
    ),
    Sample(
        "llama, several",
        LLAMA,
        f"<|python_tag|>{_CALL.replace('arguments', 'parameters')}; {_NOTE}\n{_CALL}",
        "",
        (WEATHER, NOTE, WEATHER),
    ),
    Sample(
        "llama, pythonic",
        LLAMA,
        '[get_weather(city="Paris", days=2), note(text="it\'s ] \\"so\\" [é")]',
        "",
        (WEATHER, ("note", {"text": 'it\'s ] "so" [é'})),
    ),
    Sample(
        "llama, an answer in JSON",
        LLAMA,
        '{"city": "Paris", "days": 2}',
        '{"city": "Paris", "days": 2}',
    ),
    Sample(
        "llama, JSON that has a name",
        LLAMA,
        '{"name": "Alice", "parameters": {"a": 1}}',
        '{"name": "Alice", "parameters": {"a": 1}}',
    ),
    Sample("llama, a name alone", LLAMA, '{"name": "now"}', '{"name": "now"}'),
    Sample("llama, a list", LLAMA, ' ["a", [1, 2], {}]', ' ["a", [1, 2], {}]'),
    Sample("llama, a call later on", LLAMA, f"Like this: {_CALL}", f"Like this: {_CALL}"),
    Sample(
        "glm, several",
        of_mlx("glm47"),
        "Sure.\n" + _glm("note", text=NASTY) + "\n" + _glm("now"),
        "Sure.\n",
        (NOTE, ("now", {})),
    ),
    Sample(
        "seed-oss, a text's own line feeds",
        of_format(formats.SEED),
        _seed("note", text="\na\n"),
        "",
        (("note", {"text": "\na\n"}),),
    ),
    Sample(
        "command a",
        replace(
            of_format(formats.COMMAND),
            edges={
                "content": (
                    ("<|START_RESPONSE|>", "content"),
                    ("<|END_RESPONSE|>", "content"),
                    ("<|START_THINKING|>", "reasoning"),
                    ("<|START_ACTION|>", "calls"),
                ),
                "reasoning": (("<|END_THINKING|>", "content"), ("<|START_ACTION|>", "calls")),
            },
        ),
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {_J(PARIS)}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "note", "parameters": {_J({"text": NASTY})}}}\n'
        "]<|END_ACTION|>",
        "",
        (WEATHER, NOTE),
        "I will look.",
    ),
    Sample(
        "nemotron, arguments as text",
        of_format(formats.NEMOTRON),
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {_J(_J(PARIS))}}}]</TOOLCALL>',
        "",
        (WEATHER,),
    ),
    Sample(
        "jamba",
        of_format(formats.TOOL_CALLS),
        f" Sure!<tool_calls>[\n    {_CALL},\n    {_NOTE}\n]</tool_calls>",
        " Sure!",
        (WEATHER, NOTE),
    ),
    Sample(
        "hunyuan, on lines",
        of_format(formats.HUNYUAN),
        f"So.<tool_calls>\n<tool_call>get_weather\n```json\n{_J(PARIS)}\n```</tool_call>\n"
        "<tool_call>now\n```json\n{}\n```</tool_call>\n</tool_calls>\nDone.",
        "So.\nDone.",
        (WEATHER, ("now", {})),
    ),
    Sample(
        "hunyuan, thinking",
        HUNYUAN_THINKING,
        "<think>\nLet me see.\n</think>\n<answer>\nRain, <b>.\n</answer>",
        "Rain, <b>.",
        (),
        "Let me see.\n",
    ),
    Sample(
        "olmo 3",
        of_format(formats.OLMO_3),
        f'So.\n<function_calls>get_weather(city="Paris", days=2)\nnote(text={_J(NASTY)})\n'
        "now(a=true, b=null, c=[1.5])</function_calls>",
        "So.\n",
        (WEATHER, NOTE, ("now", {"a": True, "b": None, "c": [1.5]})),
    ),
    Sample(
        "lfm2",
        of_mlx("pythonic"),
        '<|tool_call_start|>[get_weather(city="Paris", days=2), note(text="<|tool_call_end|>")]'
        "<|tool_call_end|>Checking.",
        "Checking.",
        (WEATHER, ("note", {"text": "<|tool_call_end|>"})),
    ),
    Sample(
        "gemma 4",
        of_mlx("gemma4"),
        'OK<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        '<|tool_call>call:note{text:<|"|>a } <tool_call|> "b"<|"|>}<tool_call|>',
        "OK",
        (WEATHER, ("note", {"text": 'a } <tool_call|> "b"'})),
    ),
    Sample(
        "deepseek v4",
        of_format(formats.DEEPSEEK_32),
        f"<{_DSML}tool_calls>\n"
        + _dsml("note", '"text" string="true">5')
        + _dsml("now", '"x" string="false">{"a": "</b>"}')
        + f"</{_DSML}tool_calls>",
        "",
        (("note", {"text": "5"}), ("now", {"x": {"a": "</b>"}})),
    ),
    Sample(
        "glm, JSON",
        of_mlx("glm47"),
        f"<tool_call>{_CALL}</tool_call><tool_call>note {_J({'text': NASTY})}</tool_call>",
        "",
        (WEATHER, NOTE),
    ),
    Sample(
        "minicpm5, several",
        of_mlx("minicpm5"),
        '<function name="note"><param name="text"><![CDATA[a <b> & </param> c]]></param></function>'
        '<function name="now"></function>',
        "",
        (("note", {"text": "a <b> & </param> c"}), ("now", {})),
    ),
    Sample(
        "kimi k3, JSON",
        of_mlx("kimi_k3"),
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        f'<|open|>json type="object"<|sep|>{_J(PARIS)}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "",
        (WEATHER,),
    ),
    Sample(
        "function gemma, nested",
        of_mlx("function_gemma"),
        "<start_function_call>call:now{a:{b:<escape>}<escape>,c:[1,2]}}<end_function_call>",
        "",
        (("now", {"a": {"b": "}", "c": [1, 2]}}),),
    ),
    Sample(
        "harmony",
        HARMONY,
        "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{_J(PARIS)}<|call|>",
        "",
        (WEATHER,),
        "Let me see.",
    ),
    Sample(
        "harmony, the recipient first",
        HARMONY,
        f" to=functions.note<|channel|>commentary json<|message|>{_J({'text': NASTY})}",
        "",
        (NOTE,),
    ),
    Sample(
        "harmony, two calls",
        HARMONY,
        "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.now<|message|>{}<|call|><|start|>assistant to=functions.now<|channel|>"
        "commentary<|message|>{}<|call|>",
        "I check.",
        (("now", {}), ("now", {})),
    ),
    Sample(
        "harmony, an answer",
        HARMONY,
        "<|channel|>analysis<|message|>Easy <b>.<|end|><|start|>assistant<|channel|>final<|message|>"
        "It is {4}.\n<|return|>",
        "It is {4}.\n",
        (),
        "Easy <b>.",
    ),
    Sample("harmony, no channels", HARMONY, "It is four, really.", "It is four, really."),
    Sample(
        "thinking",
        THINKING,
        "<think>\nTwo and two.\n</think>\n\nFour.",
        "Four.",
        (),
        "Two and two.\n",
    ),
    Sample(
        "thinking that the prompt opened",
        replace(THINKING, initial="reasoning"),
        "Two <b>and</b> two.</think> Four </b>.",
        " Four </b>.",
        (),
        "Two <b>and</b> two.",
    ),
    Sample("empty thinking", THINKING, "\n<think>\n\n</think>\n\nFour.", "Four."),
    Sample("no thinking", THINKING, "\nFour < five.", "\nFour < five."),
    Sample(
        "thinking, text, calls",
        THINKING_HERMES,
        f"<think>\nhm\n</think>\n\nLet me.\n\n<tool_call>\n{_CALL}\n</tool_call>",
        "Let me.\n\n",
        (WEATHER,),
        "hm\n",
    ),
    Sample(
        "a call inside thinking ends it",
        THINKING_HERMES,
        f"<think>I call.\n<tool_call>\n{_CALL}\n</tool_call>\nthere",
        "\nthere",
        (WEATHER,),
        "I call.\n",
    ),
    Sample(
        "thinking about calls",
        THINKING_HERMES,
        "<think>A <tool_call>foo</tool_call> would do.</think>No.",
        "No.",
        (),
        "A <tool_call>foo</tool_call> would do.",
    ),
)
