"""Formats of tool calls, one declaration each: those that mlx-lm has a parser for, and others.

A new format is a declaration in `FORMATS` and its text in `tests/.../tool_calls/golden.py`.
"""

from __future__ import annotations

from dataclasses import replace

from mlx_manager.mlx_server.formats import (
    JSON,
    KEYWORDS,
    NAME,
    Aside,
    CallForm,
    CallId,
    Maybe,
    Pattern,
    Tagged,
    ToolFormat,
    Unquoted,
)

_NUMBER = Pattern("[0-9]{1,3}", "{number}")
_ID = CallId("[A-Za-z0-9]{9}")
_LINE = Maybe(("\n",))

# ---------------------------------------------------------------------------------------------
# Arguments in JSON
# ---------------------------------------------------------------------------------------------

_OBJECT = CallForm.of('{"name": "', NAME, '", "arguments": ', JSON, "}")


def _list(name: str, opening: str, closing: str, call: CallForm = _OBJECT) -> ToolFormat:
    """Return the format of calls in a JSON list."""
    return ToolFormat(name, call, opening=(opening,), between=(", ",), closing=(closing,))


HERMES = ToolFormat(
    "hermes",
    CallForm.of('<tool_call>\n{"name": "', NAME, '", "arguments": ', JSON, "}\n</tool_call>"),
    between=("\n",),
    parsers=("json_tools",),
)

GENERIC = replace(HERMES, name="generic", held=True, parsers=())
"""Hermes's format for models whose template has no place for tools; see `generic_tools`."""

GRANITE = replace(_list("granite", "<|tool_call|>[", "]"), closers=("<|/tool_call|>",))

PHI_4 = replace(GRANITE, name="phi-4", closing=("]<|/tool_call|>",), template=("<|/tool|>",))
"""Phi-4-mini, whose template has a place for tools and none for calls:
llama-cpp-microsoft-Phi-4-mini-instruct.jinja in llama.cpp's models/templates has. Both are read
either way, and what the model makes of OpenAI's form, with the call as a `function`, too."""

MISTRAL_ARGS = ToolFormat(
    "mistral-args",
    CallForm.of("[TOOL_CALLS]", NAME, Maybe(("[CALL_ID]", _ID)), "[ARGS]", JSON),
    openers=("[TOOL_CALLS]",),
    also=(_OBJECT,),
    skipped=("[TOOL_CALLS]",),
    parsers=("mistral",),
    template=("[TOOL_CALLS]", "[ARGS]"),
)
"""`name[ARGS]{...}`: since Small 3.2. Objects are read as well."""

MISTRAL = replace(
    MISTRAL_ARGS,
    name="mistral",
    call=CallForm.of(
        '{"name": "', NAME, '", "arguments": ', JSON, Maybe((', "id": "', _ID, '"')), "}"
    ),
    opening=("[TOOL_CALLS][",),
    between=(", ",),
    closing=("]",),
    also=(MISTRAL_ARGS.call,),
    template=("[TOOL_CALLS]",),
)
"""A list of objects: Mistral 7B to Nemo. The newer form is read as well."""

KIMI_K2 = ToolFormat(
    "kimi-k2",
    CallForm.of(
        *("<|tool_call_begin|>", "functions.", NAME, ":", _NUMBER, "<|tool_call_argument_begin|>"),
        *(JSON, "<|tool_call_end|>"),
    ),
    openers=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>", "<|tool_call_begin|>"),
    opening=("<|tool_calls_section_begin|>",),
    closing=("<|tool_calls_section_end|>",),
    closers=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    skipped=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    named_by_id=True,
    parsers=("kimi_k2",),
)
"""The name is in the id: docs/tool_call_guidance.md in MoonshotAI/Kimi-K2, which counts the calls
of a conversation from 0. The model repeats the ids that it finds in its history, other servers' as
well, and leaves the section's markers out or spells them without the s."""

DEEPSEEK = ToolFormat(
    "deepseek",
    CallForm.of(
        *("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", NAME, "\n```json\n", JSON),
        "\n```<｜tool▁call▁end｜>",
    ),
    opening=("<｜tool▁calls▁begin｜>",),
    between=("\n",),
    closing=("<｜tool▁calls▁end｜>",),
    also=(
        CallForm.of("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", JSON, "<｜tool▁call▁end｜>"),
    ),
    template=("<｜tool▁calls▁begin｜>", "```json"),
)
"""V3 and R1: `function`, then the name, then fenced JSON."""

DEEPSEEK_31 = replace(
    DEEPSEEK,
    name="deepseek-3.1",
    call=DEEPSEEK.also[0],
    between=(),
    also=(DEEPSEEK.call,),
    template=(),
)
"""V3.1: the name, then JSON. Both are read either way."""

COMMAND = replace(
    _list("command", "<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    call=CallForm.of(
        *('{"tool_call_id": "', _NUMBER, '", "tool_name": "', NAME, '", "parameters": ', JSON, "}")
    ),
    between=(",\n    ",),
)
"""Cohere's Command R7B and A: CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja in llama.cpp's
models/templates, and vLLM's cohere_command_reasoning_parser.py."""

NEMOTRON = _list("nemotron", "<TOOLCALL>[", "]</TOOLCALL>")
"""Llama-Nemotron and Nemotron Nano 2: NVIDIA-Nemotron-Nano-v2.jinja and
nvidia-Llama-3_3-Nemotron-Super-49B-v1_5.jinja in llama.cpp's models/templates, and vLLM's
nemotron_json_tool_parser.py. Nemotron 3 writes Qwen3-Coder's format."""

HUNYUAN = ToolFormat(
    "hunyuan",
    CallForm.of("<tool_call>", NAME, "\n```json\n", JSON, "\n```</tool_call>"),
    opening=("<tool_calls>", _LINE),
    between=(_LINE,),
    closing=(_LINE, "</tool_calls>"),
    also=(HERMES.call,),
    parsers=("json_tools",),
    template=("<tool_calls>", "```json"),
)
"""Hunyuan's dense models: HunyuanHermesAgentTemplate in ms-swift's agent_template/hermes.py."""

TOOL_CALLS = ToolFormat(
    "tool-calls",
    _OBJECT,
    opening=("<tool_calls>[", Maybe(("\n    ",))),
    between=(",", Pattern(r" |\n    ", " ")),
    closing=(_LINE, "]</tool_calls>"),
    also=(HUNYUAN.call, HERMES.call),
)
"""Jamba 1.5 and Hunyuan A13B: vLLM's jamba_tool_parser.py with its tests, and its
tool_chat_template_hunyuan_a13b.jinja. Both are read either way, and so are the dense models'."""

APERTUS = _list(
    "apertus", "<|tools_prefix|>[", "]<|tools_suffix|>", CallForm.of('{"', NAME, '": ', JSON, "}")
)
"""Each call is an object whose one key is the name: chat_template.jinja in swiss-ai/apertus_format,
and SGLang's apertus2509_detector.py."""

INTERNLM = ToolFormat(
    "internlm",
    CallForm.of(
        *('<|action_start|><|plugin|>\n{"name": "', NAME, '", "parameters": ', JSON),
        "}<|action_end|>",
    ),
)
"""InternLM 2 and 3: vLLM's internlm2_tool_parser.py and tool_chat_template_internlm2_tool.jinja,
and LMDeploy's tests of its prompts."""

_CONSTRAINED = Maybe(("<|constrain|>",))
HARMONY = ToolFormat(
    "harmony",
    CallForm.of(
        *(" to=functions.", NAME, "<|channel|>commentary ", _CONSTRAINED, "json<|message|>", JSON)
    ),
    opening=(Aside("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),),
    between=("<|call|><|start|>assistant",),
    closers=("<|call|>", "<|end|>", "<|return|>"),
    template=("<|channel|>commentary",),
    whole=True,
    message=("<|channel|>", Pattern("analysis|commentary|final"), "<|message|>"),
    joint=("<|end|><|start|>assistant",),
    other=CallForm.of(
        *("<|channel|>commentary to=functions.", NAME, " ", _CONSTRAINED, "json<|message|>", JSON)
    ),
)
"""Messages to functions in gpt-oss's harmony format; their headers name the functions."""

LLAMA = ToolFormat(
    "llama",
    CallForm.of('{"name": "', NAME, '", "parameters": ', JSON, "}"),
    openers=("<|python_tag|>", "<|python_start|>"),
    between=("\n",),
    also=(CallForm.of(NAME, "(", KEYWORDS, ")"),),
    skipped=("<|python_tag|>", "<|python_end|>"),
    bare=True,
)
"""JSON objects at the beginning of the answer or after `<|python_tag|>`, several of them separated
by `;` or line feeds, or a Python list of calls. The default for a model without a known format.
"""

# ---------------------------------------------------------------------------------------------
# Arguments between tags
# ---------------------------------------------------------------------------------------------

QWEN_CODER = ToolFormat(
    "qwen3-coder",
    CallForm.of(
        *("<tool_call>\n<function=", NAME, ">\n"),
        *(Tagged("<parameter=", ">\n", "\n</parameter>", "\n"), "</function>\n</tool_call>"),
    ),
    openers=("<tool_call>", "<function="),
    between=("\n",),
    parsers=("qwen3_coder",),
)
"""Qwen3-Coder and its relatives, which sometimes leave out the marker before a call."""

SEED = ToolFormat(
    "seed-oss",
    CallForm.of(
        *("<seed:tool_call>\n<function=", NAME, ">\n"),
        *(Tagged("<parameter=", ">", "</parameter>", "\n"), "</function>\n</seed:tool_call>"),
    ),
    openers=("<seed:tool_call>", "<function="),
    between=("\n",),
)
"""Seed-OSS: ByteDance-Seed-OSS.jinja in llama.cpp's models/templates, and vLLM's
seed_oss_tool_parser.py, which reads calls without the marker before them, too."""


def _glm(name: str, prefix: str = "", line: str = "\n") -> ToolFormat:
    """Return GLM's format, of which LongCat's has a prefix in the markers."""
    call, key, value = (f"{prefix}{word}" for word in ("tool_call", "arg_key", "arg_value"))
    begin, end = f"<{call}>", f"</{call}>"
    arguments = Tagged(
        *(f"<{key}>", f"</{key}>{line}<{value}>", f"</{value}>", line),
        also=(key, "arg_key", "arg_value", "arg", "value"),
    )
    return ToolFormat(
        name,
        CallForm.of(begin, NAME, line, arguments, end),
        between=("\n",),
        also=(
            CallForm.of(begin, *('{"name": "', NAME, '", "arguments": ', JSON), "}", end),
            CallForm.of(begin, NAME, JSON, end),
        ),
    )


GLM = replace(_glm("glm"), parsers=("glm47", "laguna"))
"""GLM 4.5 and 4.6, and Laguna."""

GLM_47 = replace(
    _glm("glm-4.7", line=""), parsers=GLM.parsers, template=("{function-name}<arg_key>",)
)
"""Without line feeds: since GLM 4.7. All are read either way."""

LONGCAT = replace(_glm("longcat", "longcat_"), parsers=("longcat",))

MINIMAX = ToolFormat(
    "minimax",
    CallForm.of(
        *('<invoke name="', NAME, '">\n'),
        *(Tagged('<parameter name="', '">', "</parameter>", "\n"), "</invoke>\n"),
    ),
    opening=("<minimax:tool_call>\n",),
    closing=("</minimax:tool_call>",),
    parsers=("minimax_m2",),
)

DSML = "｜DSML｜"


def _dsml(name: str, *blocks: str) -> ToolFormat:
    """Return DeepSeek's DSML, of which all `blocks` are read, and the first is written."""
    openers = tuple(f"<{DSML}{block}>" for block in blocks)
    closers = tuple(f"</{DSML}{block}>" for block in blocks)
    arguments = Tagged(
        *(f'<{DSML}parameter name="', '">', f"</{DSML}parameter>", "\n"),
        kind=("string", "true", "false"),
        also=("parameter",),
    )
    return ToolFormat(
        name,
        CallForm.of(f'<{DSML}invoke name="', NAME, '">\n', arguments, f"</{DSML}invoke>\n"),
        openers=openers,
        opening=(f"{openers[0]}\n",),
        closing=closers[:1],
        closers=closers,
    )


DEEPSEEK_32 = replace(_dsml("deepseek-3.2", "function_calls", "tool_calls"), template=(DSML,))

DEEPSEEK_4 = replace(
    _dsml("deepseek-4", "tool_calls", "function_calls"), template=(f"<{DSML}tool_calls>",)
)
"""The same with another name for the block. Both are read either way."""

MINICPM = ToolFormat(
    "minicpm",
    CallForm.of(
        *('<function name="', NAME, '">'),
        Tagged('<param name="', '">', "</param>", wrap=("<![CDATA[", "]]>"), also=("parameter",)),
        "</function>",
    ),
    openers=("<function name=",),
    parsers=("minicpm5",),
)

MUSE_SPARK = ToolFormat(
    "muse-spark",
    CallForm.of(
        *('<atem:invoke name="', NAME, '">\n'),
        Tagged('<atem:parameter name="', '">', "</atem:parameter>", "\n", also=("parameter",)),
        "</atem:invoke>\n",
    ),
    openers=("<atem:function_calls>",),
    opening=(
        Pattern(r"to=[\w.\-]+", "to=functions"),
        Aside("<|message|>", "<|eom|><|start|>assistant to=functions"),
        "<|message|><atem:function_calls>\n",
    ),
    closing=("</atem:function_calls>",),
    parsers=("muse_spark",),
    whole=True,
)

KIMI_K3 = ToolFormat(
    "kimi-k3",
    CallForm.of(
        *('<|open|>call tool="', NAME, '" index="', _NUMBER, '"<|sep|>'),
        Tagged(
            *('<|open|>argument key="', '"<|sep|>', "<|close|>argument<|sep|>"),
            kind=("type", "string", "{type}"),
            whole=("<|open|>json", "<|close|>json<|sep|>"),
        ),
        "<|close|>call<|sep|>",
    ),
    openers=("<|open|>tools<|sep|>",),
    opening=("<|open|>tools<|sep|>",),
    closing=("<|close|>tools<|sep|>",),
    parsers=("kimi_k3",),
)

# ---------------------------------------------------------------------------------------------
# Arguments as objects without quotes, and as in Python
# ---------------------------------------------------------------------------------------------

GEMMA_4 = ToolFormat(
    "gemma-4",
    CallForm.of("<|tool_call>call:", NAME, Unquoted('<|"|>'), "<tool_call|>"),
    parsers=("gemma4",),
)

FUNCTION_GEMMA = ToolFormat(
    "function-gemma",
    CallForm.of("<start_function_call>call:", NAME, Unquoted("<escape>"), "<end_function_call>"),
    parsers=("function_gemma",),
)

LFM_2 = ToolFormat(
    "lfm-2",
    CallForm.of(NAME, "(", KEYWORDS, ")"),
    opening=("<|tool_call_start|>[",),
    between=(", ",),
    closing=("]<|tool_call_end|>",),
    parsers=("pythonic",),
)
"""A list of calls as in Python."""

OLMO_3 = ToolFormat(
    "olmo-3",
    CallForm.of(NAME, "(", KEYWORDS, ")"),
    opening=("<function_calls>",),
    between=("\n",),
    closing=("</function_calls>",),
)
"""Calls as in Python, a line each: vLLM's olmo3_tool_parser.py, and the template of
lmstudio-community's Olmo-3.1-32B-Instruct-MLX-8bit as its users quote it."""

# ---------------------------------------------------------------------------------------------
# All of them
# ---------------------------------------------------------------------------------------------

FORMATS = {
    each.name: each
    for each in (
        *(DEEPSEEK_4, DEEPSEEK_32, DEEPSEEK, DEEPSEEK_31, PHI_4, GRANITE, SEED, COMMAND, HUNYUAN),
        *(TOOL_CALLS, OLMO_3, APERTUS, INTERNLM, NEMOTRON, HERMES, MISTRAL_ARGS, MISTRAL, HARMONY),
        *(GLM_47, GLM, LONGCAT, QWEN_CODER, MINIMAX, MINICPM, MUSE_SPARK, KIMI_K2, KIMI_K3),
        *(GEMMA_4, FUNCTION_GEMMA, LFM_2, LLAMA, GENERIC),
    )
}
"""Formats by name. A model's is the first whose texts its template has; see `told_format`."""


def told_format(template: str, parser: str = "") -> ToolFormat:
    """Return the format that a chat template tells, Llama's if it tells none.

    parser: the module of the parser that mlx-lm infers. Of its formats the template tells one; it
    need not tell the last.
    """
    known = [each for each in FORMATS.values() if parser in each.parsers]
    told = (f for f in known or FORMATS.values() if all(text in template for text in f.template))
    return next(told, known[-1] if known else LLAMA)
