from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark
from thorough import ALL

from mlx_manager.mlx_server.text.grammar.bounds import check_lark
from mlx_manager.mlx_server.text.grammar.gbnf import GbnfError, is_lark, lark_of


class Bytes:
    """A token for each byte, and one that ends."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"\xffend")
    special_token_ids = (256,)
    bos_token_id = None
    eos_token_id = 256

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@pytest.fixture(scope="module")
def texts() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def takes(texts: LLTokenizer, lark: str, text: str) -> bool:
    matcher = LLMatcher(texts, lark, log_level=0)
    assert not matcher.is_error(), (lark, matcher.get_error())
    given = list(text.encode())
    return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
# Blanks
ws ::= | " " | "\n" [ \t]{0,20}
"""


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        (JSON, '{"a": [1, -2.5e3, {"b\\u00e9\\n": null}], "é": true}', '{"a": [1,]}'),
        ('root ::= "a" | "b" # c\n', "b", "c"),
        ("root ::= [\\u0041-\\U00000043]+", "ABC", "D"),
        ("root ::= [^a-c]", "é", "b"),
        ("root ::= [a-]", "-", "b"),
        ("root ::= [a\\]&~]{2}", "]&", "]"),
        ('root ::= "\\x41\\"\\\\" .', 'A"\\\n', "A"),
        ('root ::= one-two Other\none-two ::= "1"\nOther ::= "x" root?', "1x1x", "1"),
        ('root ::= a-b a_b A-B\na-b ::= "1"\na_b ::= "2"\nA-B ::= "3"', "123", "111"),
        ('root ::= start\nstart ::= 1st\n1st ::= "x"{2,}', "xxx", "x"),
        ('root ::= ("a" | ) "b" (\n"c"\n)*', "bcc", "c"),
        (
            "root ::=\n  x |\n  y\nx ::= 'q'\n".replace("'q'", '"q"') + 'y ::= "/" "\x7f"',
            "/\x7f",
            "/",
        ),
    ],
)
def test_a_grammar_means_what_it_means_to_llama_cpp(
    texts: LLTokenizer, gbnf: str, good: str, bad: str
):
    assert not is_lark(gbnf)
    lark = lark_of(gbnf)
    assert takes(texts, lark, good)
    assert not takes(texts, lark, bad)


@pytest.mark.parametrize(
    ("gbnf", "reason"),
    [
        ("root ::= [", r"line 1: '\['"),
        ('\nroot ::= "a', "line 2"),
        ('a ::= "a"', "no rule `root`"),
        ("root ::= a\n", "line 1: there is no rule `a`"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "can't be there"),
        ('root ::= "a"**', "can't be there"),
        ('root ::= * "a"', "can't be there"),
        ('root "a"', "begins with its name"),
        ('root ::= "\\q"', "no escape"),
        ("root ::= [\\UFFFFFFFF]", "no character"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "nested parentheses"),
        ("", "no rule `root`"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(gbnf: str, reason: str):
    with pytest.raises(GbnfError, match=reason):
        lark_of(gbnf)


def test_twenty_thousand_rules_are_no_matter():
    rules = "".join(f'r{i} ::= "a" r{i // 2}\n' for i in range(1, 20_000))
    lark = lark_of(f'root ::= r19999\n{rules}r0 ::= "x"\n')
    assert lark.count("\n") == 20_003
    check_lark(lark)


def bodies(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    some = st.lists(items, min_size=1, max_size=3).map(" ".join)
    return st.lists(some, min_size=1, max_size=3).map(" | ".join)


BODIES = bodies(
    st.recursive(
        st.sampled_from(['"a"', '"b"?', '"ab"', "[a-b]*", "[^a]", "one", "two+"]),
        lambda items: bodies(items).map("({})".format),
        max_leaves=4,
    )
)


@settings(max_examples=200 if ALL else 25)
@given(BODIES, BODIES, BODIES, st.lists(st.text("abc", max_size=6), max_size=6))
def test_it_is_what_llguidance_s_own_converter_makes_of_it(
    texts: LLTokenizer, root: str, one: str, two: str, words: list[str]
):
    gbnf = f"root ::= {root}\none ::= {one}\ntwo ::= {two}\n"
    ours, theirs = (
        LLMatcher(texts, lark, log_level=0) for lark in (lark_of(gbnf), gbnf_to_lark(gbnf))
    )
    assert ours.is_error() == theirs.is_error()
    if not ours.is_error():
        for word in words:
            token_ids = list(word.encode())
            found = [m.deep_copy().try_consume_tokens(token_ids) for m in (ours, theirs)]
            assert found[0] == found[1], (gbnf, word)
