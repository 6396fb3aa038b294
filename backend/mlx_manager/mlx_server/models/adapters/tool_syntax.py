"""How models write tool calls: those that mlx-lm has a parser for, and a few it has none for.

Where the arguments are JSON, the engine streams them as they are written; otherwise mlx-lm's
parser reads the whole block. mlx-lm decides which of its formats a model has, by its template.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tool_parsers import pythonic

from mlx_manager.mlx_server.core import ToolCall
from mlx_manager.mlx_server.formats import Aside, CallBlock, CallFormat, CallShape, Digits
from mlx_manager.mlx_server.models.adapters.messages import WriteCalls, call_object

_NAME = r"(?P<name>[\w.\-]{1,128})"
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
"""What mlx-lm's parsers raise on text that is no call; each has its own habits."""


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How one kind of model writes calls.

    openers: the markers that open them. form: how they are written, given the tools offered.
    write: calls as text, where it is known that templates leave them out of the history.
    """

    openers: tuple[str, ...]
    form: Callable[[ToolDicts], CallFormat]
    write: WriteCalls | None = None


def _json(
    openers: tuple[str, ...], item: str, shape: CallShape, write: WriteCalls | None = None
) -> ToolSyntax:
    form = CallFormat(item, shape=shape)
    return ToolSyntax(openers, lambda _: form, write)


def _objects(key: str, opening: str = "", between: str = ", ", closing: str = "") -> CallShape:
    """Calls as JSON objects of a name and, called `key`, its arguments."""
    return CallShape(
        head=('{"name": "',),
        middle=(f'", "{key}": ',),
        tail=("}",),
        opening=(opening,),
        between=(between,),
        closing=(closing,),
        key=key,
        bare=not opening,
    )


def _block(
    start: str, end: str, head: str, parser: BlockParser, quotes: tuple[tuple[str, str], ...]
) -> ToolSyntax:
    """Calls for one of mlx-lm's parsers. `head`: what the block's beginning looks like."""

    def form(tools: ToolDicts) -> CallFormat:
        block = CallBlock(lambda text: read_block(parser, text, tools), end, quotes)
        return CallFormat(rf"(?P<block>{head})", block)

    return ToolSyntax((start,), form)


def read_block(parser: BlockParser, text: str, tools: ToolDicts) -> list[tuple[str, str]]:
    """(name, JSON arguments) of the calls that a parser of mlx-lm's finds.

    Raises:
        ValueError: it finds none, or one whose arguments JSON can't hold.
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


# ---------------------------------------------------------------------------------------------
# Arguments in JSON
# ---------------------------------------------------------------------------------------------

_LIST_OF_OBJECTS = r"[\s,\[\]]*(?:(?P<object>\{)"

HERMES = _json(
    ("<tool_call>",),
    _LIST_OF_OBJECTS + r"|(?P<close></tool_call>))",
    CallShape(
        head=('<tool_call>\n{"name": "',),
        middle=('", "arguments": ',),
        tail=("}\n</tool_call>",),
        between=("\n",),
    ),
)


def _write_granite(calls: Sequence[ToolCall]) -> str:
    objects = [{"name": call.name, "arguments": call_object(call.arguments)} for call in calls]
    return "<|tool_call|>" + json.dumps(objects, ensure_ascii=False)


GRANITE = _json(
    ("<|tool_call|>",),
    _LIST_OF_OBJECTS + r"|(?P<close><\|/tool_call\|>))",
    _objects("arguments", "<|tool_call|>[", ", ", "]"),
    _write_granite,
)
"""Also Phi-4-mini, which closes the list with `<|/tool_call|>`."""

_MISTRAL_ITEM = (
    r"(?:[\s,\[\]]|\[TOOL_CALLS\])*(?:(?P<object>\{)"
    rf"|{_NAME}\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]\s*(?P<args>\{{))"
)
MISTRAL = _json(("[TOOL_CALLS]",), _MISTRAL_ITEM, _objects("arguments", "[TOOL_CALLS][", ", ", "]"))
"""A list of objects: Mistral 7B to Nemo."""

MISTRAL_ARGS = _json(
    ("[TOOL_CALLS]",), _MISTRAL_ITEM, CallShape(head=("[TOOL_CALLS]",), middle=("[ARGS]",))
)
"""`name[ARGS]{...}`: since Small 3.2. Both are read either way."""

KIMI_K2 = _json(
    ("<|tool_calls_section_begin|>",),
    r"(?:\s|<\|tool_call_end\|>)*(?:(?P<close><\|tool_calls_section_end\|>)"
    r"|<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]{1,128}?):\d+)\s*"
    r"<\|tool_call_argument_begin\|>\s*(?P<args>\{))",
    CallShape(
        head=("<|tool_call_begin|>functions.",),
        middle=(":", Digits(), "<|tool_call_argument_begin|>"),
        tail=("<|tool_call_end|>",),
        opening=("<|tool_calls_section_begin|>",),
        closing=("<|tool_calls_section_end|>",),
    ),
)


def _write_deepseek(calls: Sequence[ToolCall]) -> str:
    written = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n"
        f"```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


_DEEPSEEK_ITEM = (
    r"(?:\s|```|<｜tool▁call▁end｜>)*(?:(?P<close><｜tool▁calls▁end｜>)"
    rf"|<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>{_NAME}\s*```json\s*(?P<args>\{{)"
    rf"|{_NAME}<｜tool▁sep｜>\s*(?P<args>\{{)))"
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
    ),
    _write_deepseek,
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
    ),
    _write_deepseek,
)
"""V3.1: the name, then JSON. Both are read either way."""

HARMONY = _json(
    (),
    r"\s*(?:(?P<args>\{)|(?P<close><\|(?:call|end|return)\|>))",
    CallShape(
        head=(" to=functions.",),
        middle=("<|channel|>commentary <|constrain|>json<|message|>",),
        opening=(Aside("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),),
        between=("<|call|><|start|>assistant",),
        whole=True,
    ),
)
"""The body of a message to a function in gpt-oss's harmony format; the header names it."""


def _python_calls(text: str, tools: ToolDicts) -> Any:
    """What mlx-lm finds in a list of calls, if it is Python and no argument lacks its name."""
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Call) and node.args:
            raise ValueError("an argument without a name")
    return pythonic.parse_tool_call(text, tools)


def _llama_form(tools: ToolDicts) -> CallFormat:
    block = CallBlock(lambda text: read_block(_python_calls, text, tools), None, _PYTHON_QUOTES)
    return CallFormat(
        r"(?:[\s,;\[\]]|<\|python_tag\|>|<\|python_end\|>)*"
        r"(?:(?P<object>\{)|(?P<block>\[\s*[A-Za-z_][\w.]*\())",
        block,
        bare=True,
        shape=_objects("parameters", between="\n"),
    )


LLAMA = ToolSyntax(("<|python_tag|>", "<|python_start|>"), _llama_form)
"""JSON objects at the beginning of the answer or after `<|python_tag|>`, several of them separated
by `;` or line feeds, or a Python list of calls. Also what a model without any known format gets.
"""

# ---------------------------------------------------------------------------------------------
# mlx-lm's parsers
# ---------------------------------------------------------------------------------------------

_STREAMED = {"json_tools": HERMES, "mistral": MISTRAL, "kimi_k2": KIMI_K2}

_BLOCKS: Mapping[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "function_gemma": (r"\s*call:", (("<escape>", "<escape>"),)),
    "gemma4": (r"\s*call:", (('<|"|>', '<|"|>'),)),
    "glm47": (
        r"\s*(?:\{|[\w.\-]{1,128}\s*[<{])",
        (("<arg_value>", "</arg_value>"),),
    ),
    "kimi_k3": (
        r"\s*<\|open\|>call",
        (
            ("<|open|>argument", "<|close|>argument<|sep|>"),
            ("<|open|>json", "<|close|>json<|sep|>"),
        ),
    ),
    "longcat": (
        r"\s*(?:\{|[\w.\-]{1,128}\s*<)",
        (("<longcat_arg_value>", "</longcat_arg_value>"),),
    ),
    "minicpm5": (r"\s*[\"'\w]", (("<param ", "</param>"),)),
    "minimax_m2": (r"\s*<invoke name=", (("<parameter name=", "</parameter>"),)),
    "muse_spark": (r"\s*<atem:invoke", (("<atem:parameter", "</atem:parameter>"),)),
    "pythonic": (r"\s*\[", _PYTHON_QUOTES),
    "qwen3_coder": (r"\s*<function=", (("<parameter=", "</parameter>"),)),
}
"""What a block begins with, short of its end, and what surrounds values in it, by the parser."""


def of_mlx_parser(module: str, start: str, end: str, parser: BlockParser) -> ToolSyntax:
    """The syntax that the parser in `mlx_lm.tool_parsers.<module>` reads."""
    if module in _STREAMED:
        return _STREAMED[module]
    head, quotes = _BLOCKS.get(module, (r"\s*\S", ()))
    return _block(start, end, head, parser, quotes)


# ---------------------------------------------------------------------------------------------
# Which one a model has
# ---------------------------------------------------------------------------------------------

_BY_TEMPLATE = (
    ("<｜tool▁calls▁begin｜>", DEEPSEEK),
    ("<|tool_call|>", GRANITE),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|channel|>commentary", HARMONY),
)


def syntax_of(tokenizer: Any) -> ToolSyntax:
    """How the tokenizer's model writes calls: what mlx-lm infers, else by what its template says.

    A model with several templates is one that mlx-lm infers nothing for.
    """
    templates = str(tokenizer.chat_template)
    if tokenizer.has_tool_calling:
        parser = tokenizer.tool_parser
        module = parser.__module__.rpartition(".")[2]
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        found = of_mlx_parser(module, start, end, parser)
    else:
        found = next((syntax for marker, syntax in _BY_TEMPLATE if marker in templates), LLAMA)
    if found is MISTRAL and "[ARGS]" in templates:
        return MISTRAL_ARGS
    if found is DEEPSEEK and "```json" not in templates:
        return DEEPSEEK_31
    return found
