"""Syntaxes of models' tool calls: those that mlx-lm has a parser for, and a few others.

The engine streams arguments in JSON, in Gemma's notation, and one by one as they are written. Calls
as in Python are read when they are complete. A format that mlx-lm knows and this module does not is
read by mlx-lm's parser. mlx-lm infers from a model's template which of its formats the model has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_manager.mlx_server.formats import (
    Aside,
    AsObject,
    Braces,
    CallBlock,
    CallFormat,
    CallShape,
    Keywords,
    Maybe,
    OneByOne,
    Parameters,
    Pattern,
)
from mlx_manager.mlx_server.models.adapters.vocabulary import token_id

_WORD = r"[^\s\"'<>\[\]{}\\]{1,128}"
"""A name in formats without JSON. Characters that could end the name are excluded."""

NAME = rf"(?P<name>{_WORD})"
_PYTHON_QUOTES = (('"', '"'), ("'", "'"))

ToolDicts = Sequence[Mapping[str, Any]]
BlockParser = Callable[[str, ToolDicts], Any]

PARSE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Errors that mlx-lm's parsers raise on text that is no call; they differ by parser."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """Syntax of one kind of model's tool calls.

    openers: the markers that open calls. form: returns the format of calls, given the tools
    offered.
    """

    openers: tuple[str, ...]
    form: Callable[[ToolDicts], CallFormat]


def _json(
    openers: tuple[str, ...],
    item: str,
    shape: CallShape,
    *,
    name_key: str = "name",
    held: bool = False,
    end: str = "",
    close: str = "",
) -> ToolSyntax:
    """Return the syntax of calls whose arguments are JSON.

    held: see `CallFormat`. end: the text that ends a call. close: the text that ends all calls.
    """
    form = CallFormat(item, shape=shape, name_key=name_key, held=held, end=end, close=close)
    return ToolSyntax(openers, lambda _: form)


def _objects(key: str, opening: str = "", between: str = ", ", closing: str = "") -> CallShape:
    """Return the shape of calls as JSON objects with a name and, under `key`, the arguments."""
    return CallShape(
        head=('{"name": "',),
        middle=(f'", "{key}": ',),
        tail=("}",),
        opening=(opening,),
        between=(between,),
        closing=(closing,),
        arguments=AsObject(key),
        bare=not opening,
    )


# ---------------------------------------------------------------------------------------------
# Arguments in JSON
# ---------------------------------------------------------------------------------------------

_LIST_OF_OBJECTS = r"[\s,\[\]}]*(?:(?P<object>\{)"
"""Begin of a call in a list of JSON objects. Some models end a call with one brace too many."""

_HERMES_ITEM = _LIST_OF_OBJECTS + r"|(?P<close></tool_call>))"
_HERMES_SHAPE = CallShape(
    head=('<tool_call>\n{"name": "',),
    middle=('", "arguments": ',),
    tail=("}\n</tool_call>",),
    between=("\n",),
)
HERMES = _json(("<tool_call>",), _HERMES_ITEM, _HERMES_SHAPE, close="</tool_call>")


GENERIC = _json(("<tool_call>",), _HERMES_ITEM, _HERMES_SHAPE, held=True, close="</tool_call>")
"""Hermes's format for models whose template has no place for tools; see `generic_tools`."""


_GRANITE_ITEM = _LIST_OF_OBJECTS + r"|(?P<close><\|/tool_call\|>))"
GRANITE = _json(
    ("<|tool_call|>",),
    _GRANITE_ITEM,
    _objects("arguments", "<|tool_call|>[", ", ", "]"),
    close="<|/tool_call|>",
)

PHI_4 = _json(
    ("<|tool_call|>",),
    _GRANITE_ITEM,
    _objects("arguments", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    close="<|/tool_call|>",
)
"""Phi-4-mini, whose template has a place for tools and none for calls:
llama-cpp-microsoft-Phi-4-mini-instruct.jinja in llama.cpp's models/templates has. Both are read
either way, and what the model makes of OpenAI's form, with the call as a `function`, too."""

_MISTRAL_ITEM = (
    r"(?:[\s,\[\]}]|\[TOOL_CALLS\])*(?:(?P<object>\{)"
    rf"|{NAME}\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*"
    r"(?:(?P<args>\{)|(?P<none>(?P<ahead>\[TOOL_CALLS\]))))"
)
_ID = Pattern("[A-Za-z0-9]{9}")
MISTRAL = _json(
    ("[TOOL_CALLS]",),
    _MISTRAL_ITEM,
    replace(
        _objects("arguments", "[TOOL_CALLS][", ", ", "]"),
        tail=(Maybe((', "id": "', _ID, '"')), "}"),
    ),
)
"""A list of objects: Mistral 7B to Nemo."""

MISTRAL_ARGS = _json(
    ("[TOOL_CALLS]",),
    _MISTRAL_ITEM,
    CallShape(head=("[TOOL_CALLS]",), middle=(Maybe(("[CALL_ID]", _ID)), "[ARGS]"), name=_WORD),
    end="[TOOL_CALLS]",
)
"""`name[ARGS]{...}`: since Small 3.2. Both are read either way."""

_KIMI_ARGUMENTS = r"<\|tool_call_argument_begin\|>"
_KIMI_FORM = CallFormat(
    r"(?:\s|<\|tool_call_end\|>|<\|tool_calls?_section_begin\|>)*"
    r"(?:(?P<close><\|tool_calls?_section_end\|>)"
    rf"|<\|tool_call_begin\|>\s*(?P<id>{_WORD}?)\s*"
    rf"(?:(?:{_KIMI_ARGUMENTS}\s*)?(?P<args>\{{)"
    rf"|(?:{_KIMI_ARGUMENTS}\s*)?(?P<none>(?P<ahead><\|tool_call_end\|>))))",
    end="<|tool_call_end|>",
    close="<|tool_calls_section_end|>",
    named_by_id=True,
    shape=CallShape(
        head=("<|tool_call_begin|>functions.",),
        middle=(":", Pattern("[0-9]{1,3}"), "<|tool_call_argument_begin|>"),
        tail=("<|tool_call_end|>",),
        opening=("<|tool_calls_section_begin|>",),
        closing=("<|tool_calls_section_end|>",),
        name=_WORD,
    ),
)
KIMI_K2 = ToolSyntax(
    ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    lambda _: _KIMI_FORM,
)
"""The name is in the id: docs/tool_call_guidance.md in MoonshotAI/Kimi-K2, which counts the calls
of a conversation from 0. The model repeats the ids that it finds in its history, other servers' as
well, and leaves the section's markers out or spells them without the s."""


_DEEPSEEK_ITEM = (
    r"(?:\s|```|<｜tool▁call▁end｜>)*(?:(?P<close><｜tool▁calls▁end｜>)"
    rf"|<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>{NAME}\s*```json\s*(?P<args>\{{)"
    rf"|function<｜tool▁sep｜>{NAME}\s*(?:```(?:json)?\s*)*(?P<none>(?P<ahead><｜tool▁call▁end｜>))"
    rf"|{NAME}<｜tool▁sep｜>\s*(?:(?P<args>\{{)|(?P<none>(?P<ahead><｜tool▁call▁end｜>)))))"
)
DEEPSEEK = _json(
    ("<｜tool▁calls▁begin｜>",),
    _DEEPSEEK_ITEM,
    CallShape(
        head=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
        middle=("\n```json\n",),
        tail=("\n```<｜tool▁call▁end｜>",),
        opening=("<｜tool▁calls▁begin｜>",),
        between=("\n",),
        closing=("<｜tool▁calls▁end｜>",),
        name=_WORD,
    ),
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)
"""V3 and R1: `function`, then the name, then fenced JSON."""

DEEPSEEK_31 = _json(
    ("<｜tool▁calls▁begin｜>",),
    _DEEPSEEK_ITEM,
    CallShape(
        head=("<｜tool▁call▁begin｜>",),
        middle=("<｜tool▁sep｜>",),
        tail=("<｜tool▁call▁end｜>",),
        opening=("<｜tool▁calls▁begin｜>",),
        closing=("<｜tool▁calls▁end｜>",),
        name=_WORD,
    ),
    end="<｜tool▁call▁end｜>",
    close="<｜tool▁calls▁end｜>",
)
"""V3.1: the name, then JSON. Both are read either way."""

COMMAND = _json(
    ("<|START_ACTION|>",),
    _LIST_OF_OBJECTS + r"|(?P<close><\|END_ACTION\|>))",
    CallShape(
        head=('{"tool_call_id": "', Pattern("[0-9]{1,3}"), '", "tool_name": "'),
        middle=('", "parameters": ',),
        tail=("}",),
        opening=("<|START_ACTION|>[\n    ",),
        between=(",\n    ",),
        closing=("\n]<|END_ACTION|>",),
    ),
    name_key="tool_name",
    close="<|END_ACTION|>",
)
"""Cohere's Command R7B and A: CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja in llama.cpp's
models/templates, and vLLM's cohere_command_reasoning_parser.py."""

NEMOTRON = _json(
    ("<TOOLCALL>",),
    _LIST_OF_OBJECTS + r"|(?P<close></TOOLCALL>))",
    _objects("arguments", "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    close="</TOOLCALL>",
)
"""Llama-Nemotron and Nemotron Nano 2: NVIDIA-Nemotron-Nano-v2.jinja and
nvidia-Llama-3_3-Nemotron-Super-49B-v1_5.jinja in llama.cpp's models/templates, and vLLM's
nemotron_json_tool_parser.py. Nemotron 3 writes Qwen3-Coder's format."""

_TOOL_CALLS_ITEM = (
    r"(?:[\s,\[\]}]|```|</tool_call>)*(?:(?P<close></tool_calls>)|(?P<object>\{)"
    rf"|<tool_call>\s*(?:(?P<object>\{{)|{NAME}\s*```json\s*(?P<args>\{{)))"
)
HUNYUAN = _json(
    ("<tool_calls>",),
    _TOOL_CALLS_ITEM,
    CallShape(
        head=("<tool_call>",),
        middle=("\n```json\n",),
        tail=("\n```</tool_call>",),
        opening=("<tool_calls>", Maybe(("\n",))),
        between=(Maybe(("\n",)),),
        closing=(Maybe(("\n",)), "</tool_calls>"),
        name=_WORD,
    ),
    end="</tool_call>",
    close="</tool_calls>",
)
"""Hunyuan's dense models: HunyuanHermesAgentTemplate in ms-swift's agent_template/hermes.py."""

TOOL_CALLS = _json(
    ("<tool_calls>",),
    _TOOL_CALLS_ITEM,
    replace(
        _objects("arguments", "<tool_calls>["),
        opening=("<tool_calls>[", Maybe(("\n    ",))),
        between=(",", Pattern(r" |\n    ")),
        closing=(Maybe(("\n",)), "]</tool_calls>"),
    ),
    close="</tool_calls>",
)
"""Jamba 1.5 and Hunyuan A13B: vLLM's jamba_tool_parser.py with its tests, and its
tool_chat_template_hunyuan_a13b.jinja. Both are read either way, and so are the dense models'."""

APERTUS = _json(
    ("<|tools_prefix|>",),
    r"[\s,\[\]}]*(?:\{\s*\"(?P<name>[^\"\\]{1,128})\"\s*:\s*(?P<args>\{)"
    r"|(?P<close><\|tools_suffix\|>))",
    CallShape(
        head=('{"',),
        middle=('": ',),
        tail=("}",),
        opening=("<|tools_prefix|>[",),
        between=(", ",),
        closing=("]<|tools_suffix|>",),
        name=_WORD,
    ),
    close="<|tools_suffix|>",
)
"""Each call is an object whose one key is the name: chat_template.jinja in swiss-ai/apertus_format,
and SGLang's apertus2509_detector.py."""

INTERNLM = _json(
    ("<|action_start|>",),
    r"(?:[\s\]}]|<\|plugin\|>)*(?:(?P<object>\{)|(?P<close><\|action_end\|>))",
    CallShape(
        head=('<|action_start|><|plugin|>\n{"name": "',),
        middle=('", "parameters": ',),
        tail=("}<|action_end|>",),
    ),
    close="<|action_end|>",
)
"""InternLM 2 and 3: vLLM's internlm2_tool_parser.py and tool_chat_template_internlm2_tool.jinja,
and LMDeploy's tests of its prompts."""

HARMONY = _json(
    (),
    r"\s*(?:(?P<args>\{)|(?P<close><\|(?:call|end|return)\|>))",
    CallShape(
        head=(" to=functions.",),
        middle=("<|channel|>commentary ", Maybe(("<|constrain|>",)), "json<|message|>"),
        opening=(Aside("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),),
        between=("<|call|><|start|>assistant",),
        whole=True,
        other=(
            ("<|channel|>commentary to=functions.",),
            (" ", Maybe(("<|constrain|>",)), "json<|message|>"),
        ),
        message=("<|channel|>", Pattern("analysis|commentary|final"), "<|message|>"),
        joint=("<|end|><|start|>assistant",),
        name=_WORD,
    ),
    close="<|call|>",
)
"""The body of a message to a function in gpt-oss's harmony format; the header names it."""


PYTHON_NAME = r"[A-Za-z_][^\s()\[\]{}<>\"'\\,=]{0,127}"
"""A function's name in a call as in Python; tools' names need not be valid in Python."""

_LLAMA_FORM = CallFormat(
    r"(?:[\s,;\[\]}]|<\|python_tag\|>|<\|python_end\|>)*"
    rf"(?:(?P<object>\{{)|(?P<block>\[\s*{PYTHON_NAME}\())",
    block=CallBlock(None, None, _PYTHON_QUOTES),
    bare=True,
    shape=_objects("parameters", between="\n"),
)
LLAMA = ToolSyntax(("<|python_tag|>", "<|python_start|>"), lambda _: _LLAMA_FORM)
"""JSON objects at the beginning of the answer or after `<|python_tag|>`, several of them separated
by `;` or line feeds, or a Python list of calls. The default for a model without a known format.
"""

# ---------------------------------------------------------------------------------------------
# Arguments one by one
# ---------------------------------------------------------------------------------------------


_TAG_END = r"(?:[\"']?\s*(?:>|(?P<ahead>\n))|[\"'](?P<ahead>[^\s<>\"']))"
"""The end of a tag that ends in a name, also where its quote or its `>` is missing."""


def _parameters(
    openers: tuple[str, ...],
    parameters: Parameters,
    shape: CallShape,
    item: str | None = None,
) -> ToolSyntax:
    """Return the syntax of calls whose arguments stand one by one.

    item: as in `CallFormat`; None if calls stand between the text that opens them and the text that
    closes them.
    """
    item = item or rf"\s*(?:(?P<close>{parameters.close})|{parameters.call}(?P<params>))"
    form = CallFormat(
        item,
        parameters=parameters,
        shape=replace(shape, name=_WORD),
        close=str(shape.closing[-1] if shape.closing else shape.tail[-1]).rpartition("\n")[2],
    )
    return ToolSyntax(openers, lambda _: form)


def _coder(prefix: str, *, lines: bool) -> ToolSyntax:
    """Return Qwen3-Coder's format, of which Seed-OSS's has a prefix in the outer marker.

    lines: values stand on lines of their own.
    """
    call, line = f"{prefix}tool_call", "\n" if lines else ""
    return _parameters(
        (f"<{call}>", "<function="),
        Parameters(
            call=rf"(?:<{call}>\s*)?<function=\s*{NAME}\s*(?:>|(?P<ahead>\n))",
            head=r"<parameter=\s*(?P<key>[^<>\n]+?)\s*(?:>|(?P<ahead>\n))",
            end="</parameter>",
            call_end="</function>",
            close=f"</{call}>",
            line=lines,
        ),
        CallShape(
            head=(f"<{call}>\n<function=",),
            middle=(">\n",),
            tail=(f"</function>\n</{call}>",),
            between=("\n",),
            arguments=OneByOne("<parameter=", f">{line}", f"{line}</parameter>", "\n"),
        ),
    )


QWEN_CODER = _coder("", lines=True)
"""Qwen3-Coder and its relatives, which sometimes leave out the marker before a call."""

SEED = _coder("seed:", lines=False)
"""Seed-OSS: ByteDance-Seed-OSS.jinja in llama.cpp's models/templates, and vLLM's
seed_oss_tool_parser.py, which reads calls without the marker before them, too."""


def _glm(prefix: str, *, lines: bool) -> ToolSyntax:
    """Return GLM's format, of which LongCat's has a prefix in the markers."""
    call, key, value = (f"{prefix}{name}" for name in ("tool_call", "arg_key", "arg_value"))
    line = "\n" if lines else ""
    return _parameters(
        (f"<{call}>",),
        Parameters(
            call=rf"<{call}>\s*{NAME}\s*(?P<ahead><)",
            head=rf"(?:<{key}>|<{key}\s)\s*(?P<key>[^<]+?)\s*"
            rf"(?:(?:</{key}>|</?(?:{key}|{value})>?)\s*)?(?:<{value}>|<{value}(?P<ahead>\n))",
            end=f"</{value}>",
            also=(key, "arg_key", "arg_value", "arg", "value"),
            call_end="",
            close=f"</{call}>",
        ),
        CallShape(
            head=(f"<{call}>",),
            middle=(line,),
            tail=(f"</{call}>",),
            between=("\n",),
            arguments=OneByOne(f"<{key}>", f"</{key}>{line}<{value}>", f"</{value}>", line),
        ),
        rf"\s*(?:(?P<close></{call}>)|(?P<object>\{{)"
        rf"|{NAME}\s*(?:(?P<params>(?P<ahead><))|(?P<args>\{{)))",
    )


GLM = _glm("", lines=True)
"""GLM 4.5 and 4.6, and Laguna."""

GLM_47 = _glm("", lines=False)
"""Without line feeds: since GLM 4.7. All are read either way."""

LONGCAT = _glm("longcat_", lines=True)

MINIMAX = _parameters(
    ("<minimax:tool_call>",),
    Parameters(
        call=rf"(?:<minimax:tool_call>\s*)?<invoke name=[\"']?{NAME}{_TAG_END}",
        head=rf"<parameter name=[\"']?(?P<key>[^<>\"'\n]+){_TAG_END}",
        end="</parameter>",
        call_end="</invoke>",
        close="</minimax:tool_call>",
    ),
    CallShape(
        head=('<invoke name="',),
        middle=('">\n',),
        tail=("</invoke>\n",),
        opening=("<minimax:tool_call>\n",),
        closing=("</minimax:tool_call>",),
        arguments=OneByOne('<parameter name="', '">', "</parameter>", "\n"),
    ),
)

_DSML = "｜DSML｜"
_DSML_BLOCK = "(?:function_calls|tool_calls)"


def _dsml(block: str) -> ToolSyntax:
    return _parameters(
        (f"<{_DSML}function_calls>", f"<{_DSML}tool_calls>"),
        Parameters(
            call=rf'(?:<{_DSML}{_DSML_BLOCK}>\s*)?<{_DSML}invoke name="{NAME}{_TAG_END}',
            head=rf'<{_DSML}parameter name="(?P<key>[^<>"\n]+)'
            r'(?:"\s+string="(?:(?P<text>true)|(?P<json>false)))?' + _TAG_END,
            end=f"</{_DSML}parameter>",
            also=("parameter",),
            call_end=f"</{_DSML}invoke>",
            close=f"</{_DSML}{_DSML_BLOCK}>",
        ),
        CallShape(
            head=(f'<{_DSML}invoke name="',),
            middle=('">\n',),
            tail=(f"</{_DSML}invoke>\n",),
            opening=(f"<{_DSML}{block}>\n",),
            closing=(f"</{_DSML}{block}>",),
            arguments=OneByOne(
                f'<{_DSML}parameter name="',
                '" string="',
                f"</{_DSML}parameter>",
                "\n",
                text='true">',
                other='false">',
            ),
        ),
    )


DEEPSEEK_32 = _dsml("function_calls")
"""DeepSeek V3.2's DSML."""

DEEPSEEK_4 = _dsml("tool_calls")
"""The same with another name for the block. Both are read either way."""

MINICPM = _parameters(
    ("<function name=",),
    Parameters(
        call=rf"<function name=[\"']?{NAME}{_TAG_END}",
        head=rf"<param name\s*=\s*[\"']?(?P<key>[^<>\"'\n]+){_TAG_END}",
        end="</param>",
        also=("parameter",),
        call_end="",
        close="</function>",
        wrap=("<![CDATA[", "]]>"),
    ),
    CallShape(
        head=('<function name="',),
        middle=('">',),
        tail=("</function>",),
        arguments=OneByOne('<param name="', '">', "</param>", wrap=("<![CDATA[", "]]>")),
    ),
    rf"[\"']?{NAME}{_TAG_END}(?P<params>)",
)

MUSE_SPARK = _parameters(
    ("<atem:function_calls>",),
    Parameters(
        call=r"(?:<atem:function_calls>\s*)?"
        rf'<atem:invoke\s(?:[^<>]*\s)?name="{NAME}"[^<>\n]*(?:>|(?P<ahead>\n))',
        head=r'<atem:parameter\s(?:[^<>]*\s)?name="(?P<key>[^<>"\n]+)"[^<>\n]*(?:>|(?P<ahead>\n))',
        end="</atem:parameter>",
        also=("parameter",),
        call_end="</atem:invoke>",
        close="</atem:function_calls>",
    ),
    CallShape(
        head=('<atem:invoke name="',),
        middle=('">\n',),
        tail=("</atem:invoke>\n",),
        opening=(
            Pattern(r"to=[\w.\-]+"),
            Aside("<|message|>", "<|eom|><|start|>assistant to=functions"),
            "<|message|><atem:function_calls>\n",
        ),
        closing=("</atem:function_calls>",),
        arguments=OneByOne('<atem:parameter name="', '">', "</atem:parameter>", "\n"),
        whole=True,
    ),
)

KIMI_K3 = _parameters(
    ("<|open|>tools<|sep|>",),
    Parameters(
        call=r"(?:<\|open\|>tools<\|sep\|>\s*)?"
        rf'<\|open\|>call\s(?:[^<]*\s)?tool="{NAME}"[^<]*<\|sep\|>',
        head=r'<\|open\|>argument\s(?:[^<]*\s)?key="(?P<key>[^<"\n]+)"'
        r'(?:\s+type="(?:(?P<text>string)|(?P<json>\w+))")?[^<]*<\|sep\|>',
        whole=r"<\|open\|>json[^<]*<\|sep\|>",
        whole_end="<|close|>json<|sep|>",
        end="<|close|>argument<|sep|>",
        wrong=r"<\|close\|>[^<\n]{0,40}(?:<\|sep\|>|(?P<ahead>\n|<\|(?:open|close)\|>))",
        call_end="<|close|>call<|sep|>",
        close=r"<\|close\|>tools<\|sep\|>",
    ),
    CallShape(
        head=('<|open|>call tool="',),
        middle=('" index="', Pattern("[0-9]{1,3}"), '"<|sep|>'),
        tail=("<|close|>call<|sep|>",),
        opening=("<|open|>tools<|sep|>",),
        closing=("<|close|>tools<|sep|>",),
        arguments=OneByOne(
            '<|open|>argument key="',
            '" type="',
            "<|close|>argument<|sep|>",
            text='string"<|sep|>',
            other='{type}"<|sep|>',
        ),
    ),
)

# ---------------------------------------------------------------------------------------------
# Arguments as objects without quotes, and as in Python
# ---------------------------------------------------------------------------------------------


def _gemma(start: str, end: str, *quotes: str) -> ToolSyntax:
    """Return the syntax of Gemma's calls: names have no quotes, and texts have special ones."""
    begin, close = re.escape(start), re.escape(end)
    form = CallFormat(
        rf"\s*(?:(?P<close>{close})|(?:{begin}\s*)?call\s*:\s*{NAME}\s*"
        rf"(?:(?P<braces>(?P<ahead>\{{))|(?P<none>(?P<ahead>{close}))))",
        quotes=quotes,
        close=end,
        shape=CallShape(
            head=(f"{start}call:",),
            middle=(),
            tail=(end,),
            arguments=Braces(quotes[0]),
            name=_WORD,
        ),
    )
    return ToolSyntax((start,), lambda _: form)


GEMMA_4 = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')

FUNCTION_GEMMA = _gemma("<start_function_call>", "<end_function_call>", "<escape>")

_LFM_2_FORM = CallFormat(
    r"(?P<block>\s*\[)",
    block=CallBlock(None, "<|tool_call_end|>", _PYTHON_QUOTES),
    shape=CallShape(
        head=(),
        middle=("(",),
        tail=(")",),
        opening=("<|tool_call_start|>[",),
        between=(", ",),
        closing=("]<|tool_call_end|>",),
        arguments=Keywords(),
        name=PYTHON_NAME,
    ),
)
LFM_2 = ToolSyntax(("<|tool_call_start|>",), lambda _: _LFM_2_FORM)
"""A list of calls as in Python."""

_OLMO_3_FORM = CallFormat(
    rf"\s*(?:(?P<block>{PYTHON_NAME}\()|(?P<close></function_calls>))",
    block=CallBlock(None, None, _PYTHON_QUOTES, several=True),
    close="</function_calls>",
    shape=CallShape(
        head=(),
        middle=("(",),
        tail=(")",),
        opening=("<function_calls>",),
        between=("\n",),
        closing=("</function_calls>",),
        arguments=Keywords(),
        name=PYTHON_NAME,
    ),
)
OLMO_3 = ToolSyntax(("<function_calls>",), lambda _: _OLMO_3_FORM)
"""Calls as in Python, a line each: vLLM's olmo3_tool_parser.py, and the template of
lmstudio-community's Olmo-3.1-32B-Instruct-MLX-8bit as its users quote it."""

# ---------------------------------------------------------------------------------------------
# Calls for a parser of mlx-lm's
# ---------------------------------------------------------------------------------------------


def read_block(parser: BlockParser, text: str, tools: ToolDicts) -> list[tuple[str, str]]:
    """Return (name, JSON arguments) of the calls that a parser of mlx-lm's finds.

    Raises:
        ValueError: the parser finds no call, or one whose arguments JSON can't hold.
    """
    try:
        found = parser(text.strip(), tools)
        calls = found if isinstance(found, list) else [found]
        return [(str(call["name"]), _dump(call["arguments"])) for call in calls]
    except PARSE_ERRORS as error:
        raise ValueError(f"not a tool call: {error}") from error


def _dump(arguments: Any) -> str:
    if not isinstance(arguments, Mapping):
        raise ValueError("arguments are not an object")
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _block(start: str, end: str, parser: BlockParser) -> ToolSyntax:
    def form(tools: ToolDicts) -> CallFormat:
        block = CallBlock(lambda text: read_block(parser, text, tools), end)
        return CallFormat(r"(?P<block>\s*\S)", block=block)

    return ToolSyntax((start,), form)


_KNOWN: Mapping[str, ToolSyntax] = {
    "json_tools": HERMES,
    "mistral": MISTRAL,
    "kimi_k2": KIMI_K2,
    "kimi_k3": KIMI_K3,
    "qwen3_coder": QWEN_CODER,
    "glm47": GLM,
    "laguna": GLM,
    "longcat": LONGCAT,
    "minimax_m2": MINIMAX,
    "minicpm5": MINICPM,
    "muse_spark": MUSE_SPARK,
    "gemma4": GEMMA_4,
    "function_gemma": FUNCTION_GEMMA,
    "pythonic": LFM_2,
}


def of_mlx_parser(module: str, start: str, end: str, parser: BlockParser) -> ToolSyntax:
    """Return the syntax that the parser in `mlx_lm.tool_parsers.<module>` reads."""
    return _KNOWN.get(module) or _block(start, end, parser)


# ---------------------------------------------------------------------------------------------
# Which one a model has
# ---------------------------------------------------------------------------------------------

_BY_TEMPLATE = (
    (f"<{_DSML}tool_calls>", DEEPSEEK_4),
    (_DSML, DEEPSEEK_32),
    ("<｜tool▁calls▁begin｜>", DEEPSEEK),
    ("<|/tool|>", PHI_4),
    ("<|tool_call|>", GRANITE),
    ("<seed:tool_call>", SEED),
    ("<|START_ACTION|>", COMMAND),
    ("<tool_calls>", TOOL_CALLS),
    ("<function_calls>", OLMO_3),
    ("<|tools_prefix|>", APERTUS),
    ("<|action_start|>", INTERNLM),
    ("<TOOLCALL>", NEMOTRON),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|channel|>commentary", HARMONY),
)


def syntax_of(tokenizer: Any) -> ToolSyntax:
    """Return the syntax of the tokenizer's model: as mlx-lm infers it, else by its template.

    mlx-lm infers nothing for a model with several templates.
    """
    templates = str(tokenizer.chat_template)
    if tokenizer.has_tool_calling:
        parser = tokenizer.tool_parser
        module = parser.__module__.rpartition(".")[2]
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        found = of_mlx_parser(module, start, end, parser)
    else:
        said = templates + _DSML * (token_id(tokenizer, _DSML) is not None)
        found = next((syntax for marker, syntax in _BY_TEMPLATE if marker in said), LLAMA)
    if found is MISTRAL and "[ARGS]" in templates:
        return MISTRAL_ARGS
    if found in (TOOL_CALLS, HERMES) and "<tool_calls>" in templates and "```json" in templates:
        return HUNYUAN
    if found is GLM and "{function-name}<arg_key>" in templates:
        return GLM_47
    if found is DEEPSEEK and "```json" not in templates:
        return DEEPSEEK_31
    return found
