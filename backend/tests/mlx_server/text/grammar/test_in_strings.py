from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlx_manager.mlx_server.text.grammar.in_strings import in_json
from mlx_manager.mlx_server.text.tool_calls.schemas import UnwritableError

PATCH = r"""start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""Codex's grammar for apply_patch."""
CODE = r"""
start: pragma_source | plain_source
pragma_source: PRAGMA_LINE NEWLINE SOURCE
plain_source: SOURCE

PRAGMA_LINE: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
"""Codex's grammar for code that calls its tools."""
SUM = """start: expr
expr: term (SP "+" SP term)*
term: INT | "(" expr ")"
SP: " "
%import common.INT
"""
BYTES = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return bool(matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (
            PATCH,
            [
                '*** Begin Patch\n*** Add File: a "b".py\n+\tx = "\\n"\n+\n*** End Patch',
                "*** Begin Patch\n*** Update File: é\n@@ def\n-a\n+b\n*** End Patch\n",
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch", "x"],
        ),
        (CODE, ['// @exec: {"a": 1}\nawait f("b\\n");\n', "x: 1\n", "/"], [""]),
        ("start: /[:;]:[^:]/", ["::a", ";:\n"], ["a:b", ":::"]),
        (SUM, ["1 + (2 + 33)", "7"], ["1+2", "(1"]),
        ('start: /[^"]+/', ["a\\b\n\x01"], ['a"', ""]),
        ('start: " ".."~"', ['"', "\\", "a"], ["\n"]),
        ("start: /a\\.b\\/c[\\]\\n]/", ["a.b/c]", "a.b/c\n"], ["axb/c]"]),
        ('start: /\\s\\w+/ // a "comment"\n', ["\tab", " x"], ["ab"]),
        ('start: "a" "b"\n%ignore /[ \\n]+/', ["ab", "a \n b"], ["ba"]),
    ],
)
def test_a_grammar_derives_the_same_texts_in_json(
    grammar: str, texts: list[str], others: list[str]
):
    escaped = in_json(grammar)
    for text in texts:
        assert accepts(grammar, text)
        assert accepts(escaped, json.dumps(text, ensure_ascii=False)[1:-1])
    for text in others:
        assert not accepts(escaped, json.dumps(text, ensure_ascii=False)[1:-1])


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a\\n"i',
        "start: /a/i",
        "start: /(?=a)b/",
        "start: /\\pL/",
        "start: /[[:alpha:]]/",
        "start: /[^a[:digit:]]/",
        "start: /[a-z&&[^b]]/",
        'start: %json {"type": "object"}',
        "start: <|end|>",
        "%import common.C_COMMENT\nstart: C_COMMENT",
        'start: A\nA: ~"a"',
    ],
)
def test_what_can_not_be_told_in_json_is_named(grammar: str):
    with pytest.raises(UnwritableError):
        in_json(grammar)
