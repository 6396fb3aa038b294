"""What an answer may be, compiled: constraints and forced tool calls to llguidance's matchers.

A grammar is compiled once and kept; each row gets a copy. Nothing here runs on the MLX thread but
the masks: a bit a token, for the rows that are constrained.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mlx_manager.mlx_server.core import (
    STRING_FORMATS,
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Tool,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.formats import Aside, CallShape, Digits, Piece

Mask = NDArray[np.int32]
"""(words,): bit i of word w allows token 32 * w + i."""

MOST_KEPT = 128
"""Compiled grammars kept per model."""

BLANKS = r"\x20|\n{1,2}[\x20\t]{0,20}"
"""Between JSON's tokens: a space or a line break with its indentation. With blanks without end,
which JSON allows, small models write nothing else."""

_TYPE_ALIASES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Names of types that tools written for Python carry; JSON Schema has none of them."""


class Grammars:
    """Compiles what a model's answers must be. Safe to use from several threads.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        end_ids: tokens that end an answer; allowed wherever the grammar may end.
    """

    def __init__(self, tokenizer: Any, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = sorted(end_ids)
        self._ids = {
            token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        self._texts: LLTokenizer | None = None
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def _tokens(self, param: str) -> LLTokenizer:
        """llguidance's form of the vocabulary, made when it is first needed."""
        with self._lock:
            if self._texts is None:
                own = self._tokenizer._tokenizer
                if not isinstance(own, PreTrainedTokenizerFast):
                    raise UnsupportedParameter(
                        f"`{param}`: this model's tokenizer is of a kind that answers can't be "
                        "constrained with.",
                        param=param,
                    )
                self._texts = from_tokenizer(own, eos_token=self._end_ids)
            return self._texts

    @property
    def texts(self) -> LLTokenizer:
        """The vocabulary, once something has been compiled."""
        assert self._texts is not None
        return self._texts

    @property
    def words(self) -> int:
        """The length of this model's masks."""
        return -(-self.texts.vocab_size // 32)

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """A matcher at the beginning of `grammar`, in any form that llguidance reads.

        Raises:
            InvalidParameter: the grammar can't be honoured; says why.
            UnsupportedParameter: the model's tokenizer is of no use here.
        """
        texts = self._tokens(param)
        with self._lock:
            known = self._kept.get(grammar)
            if known is not None:
                self._kept.move_to_end(grammar)
                return known.deep_copy()
        made = LLMatcher(texts, grammar, log_level=0)
        if made.is_error():
            raise _refused(param, made.get_error())
        with self._lock:
            self._kept[grammar] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def answer(self, constraint: Constraint) -> LLMatcher:
        """A matcher for answers that fit `constraint`.

        Raises:
            InvalidParameter: the constraint can't be honoured; says why.
        """
        grammar = json.dumps({"grammars": [answer_grammar(constraint)]})
        return self.matcher(grammar, constraint.param)

    def calls(
        self, shape: CallShape, tools: Sequence[Tool], *, parallel: bool, param: str = "tool_choice"
    ) -> LLMatcher:
        """A matcher for one call of `tools` or, if `parallel`, for several.

        Raises:
            InvalidParameter: a tool's parameters can't be honoured; says why.
        """
        try:
            return self.matcher(calls_grammar(shape, tools, self._ids.get, parallel), param)
        except InvalidParameter:
            self._check(tools)
            raise

    def _check(self, tools: Sequence[Tool]) -> None:
        """Name the tool whose parameters can't be honoured."""
        for i, tool in enumerate(tools):
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(_arguments(tool)))
            self.matcher(grammar, f"tools[{i}].function.parameters")

    def answer_or_calls(
        self, constraint: Constraint, shape: CallShape, tools: Sequence[Tool], *, parallel: bool
    ) -> LLMatcher:
        """A matcher for answers that either fit `constraint` or call `tools`.

        Raises:
            InvalidParameter: the one or the other can't be honoured; says why.
        """
        answer = answer_grammar(constraint)
        if not shape.bare:
            calls = calls_grammar(shape, tools, self._ids.get, parallel)
        elif "json_schema" in answer:
            # Both begin with a brace: only as JSON can they be followed side by side.
            schema = json.dumps(answer["json_schema"])
            lark = f"start: calls | answer\nanswer: %json {schema}\n{_bare_calls(shape, tools)}"
            return self.matcher(lark, constraint.param)
        else:
            calls = f"start: calls\n{_bare_calls(shape, tools)}"
        grammars = [
            {"name": "either", "lark_grammar": "start: @calls | @answer"},
            {"name": "calls", "lark_grammar": calls},
            {"name": "answer", **answer},
        ]
        return self.matcher(json.dumps({"grammars": grammars}), constraint.param)


def _refused(param: str, reason: str) -> InvalidParameter:
    return InvalidParameter(f"`{param}` can't be honoured: {reason.strip()}", param=param)


# ---------------------------------------------------------------------------------------------
# Constraints
# ---------------------------------------------------------------------------------------------


def answer_grammar(constraint: Constraint) -> dict[str, Any]:
    """A constraint as one of llguidance's grammars.

    Raises:
        InvalidParameter: it can't be one.
    """
    match constraint:
        case JsonObject():
            return {"json_schema": _json({"type": "object"})}
        case JsonSchema(text, strict):
            schema = json.loads(text)
            return {"json_schema": _json(schema if strict else _without_unknown_formats(schema))}
        case Regex(pattern):
            found = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        case Choice(options):
            return {"lark_grammar": "start: " + " | ".join(map(_literal, options))}
        case Grammar(text, param):
            try:
                return {"lark_grammar": grammar_from("grammar", text)}
            except ValueError as error:
                raise _refused(param, str(error)) from error


def _json(schema: Any) -> Any:
    """`schema` with our blanks, unless it brings its own."""
    if not isinstance(schema, dict):
        return _json({} if schema is True else {"enum": []})
    return {**schema, "x-guidance": {"whitespace_pattern": BLANKS} | schema.get("x-guidance", {})}


def _without_unknown_formats(schema: Any) -> Any:
    """JSON Schema 2020-12, 7.2.3: a format that is not known is an annotation."""
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    unknown = isinstance(schema.get("format"), str) and schema["format"] not in STRING_FORMATS
    return {
        key: value if key in {"enum", "const"} else _without_unknown_formats(value)
        for key, value in schema.items()
        if not (unknown and key == "format")
    }


# ---------------------------------------------------------------------------------------------
# Tool calls
# ---------------------------------------------------------------------------------------------


def calls_grammar(
    shape: CallShape,
    tools: Sequence[Tool],
    token_id: Callable[[str], int | None],
    parallel: bool,
) -> str:
    """Calls of `tools`, written as `shape` says, in Lark.

    Args:
        token_id: the id of an added token by its text, None for any other text.
    """

    def written(pieces: Sequence[Piece]) -> str:
        return " ".join(filter(None, (_piece(piece, token_id) for piece in pieces)))

    more = f"({written(shape.between)} call)*" if parallel else ""
    rules = [
        f"start: {written(shape.opening)} call {more} {written(shape.closing)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
    ]
    for i, tool in enumerate(tools):
        head, middle, tail = map(written, (shape.head, shape.middle, shape.tail))
        rules.append(f"call_{i}: {head} {_literal(tool.name)} {middle} arguments_{i} {tail}")
        rules.append(f"arguments_{i}: %json {json.dumps(_arguments(tool))}")
    return "\n".join(rules) + "\n"


def _bare_calls(shape: CallShape, tools: Sequence[Tool]) -> str:
    """One call as a JSON object of free layout."""
    objects = []
    for tool in tools:
        arguments = _arguments(tool)
        moved = {"$defs", "definitions", "x-guidance"} & arguments.keys()
        definitions = {key: arguments.pop(key) for key in moved}
        objects.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, shape.key: arguments},
                "required": ["name", shape.key],
                "additionalProperties": False,
                **definitions,
            }
        )
    rules = ["calls: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    rules += [f"call_{i}: %json {json.dumps(schema)}" for i, schema in enumerate(objects)]
    return "\n".join(rules) + "\n"


def _arguments(tool: Tool) -> dict[str, Any]:
    schema = _without_unknown_formats(_with_json_types(dict(tool.parameters)))
    schema = schema or {"type": "object", "properties": {}}
    if not {"type", "$ref", "anyOf", "oneOf", "allOf"} & schema.keys():
        schema = {"type": "object", **schema}
    return dict(_json(schema))


def _with_json_types(schema: Any) -> Any:
    """`schema` with Python's names of types in JSON Schema's."""
    if isinstance(schema, list):
        return [_with_json_types(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    fixed = {
        key: value if key in {"enum", "const", "default"} else _with_json_types(value)
        for key, value in schema.items()
    }
    named = fixed.get("type")
    if isinstance(named, str) and named in _TYPE_ALIASES:
        alias = _TYPE_ALIASES[named]
        fixed = {key: value for key, value in fixed.items() if key != "type"}
        if alias is not None:
            fixed = {"type": alias, **fixed}
    return fixed


def _piece(piece: Piece, token_id: Callable[[str], int | None]) -> str:
    """A piece of text in Lark; tokens in it that were added to the vocabulary stand by id."""
    match piece:
        case Digits():
            return "/[0-9]+/"
        case Aside(begin, end):
            anything = r"/(.|\n)*/"
            return f"({_piece(begin, token_id)} {anything} {_piece(end, token_id)})?"
    parts = re.split(r"(<[^<>\s]+>|\[[A-Z_]+\])", piece)
    found = [(part, token_id(part)) for part in parts if part]
    return " ".join(_literal(text) if number is None else f"<[{number}]>" for text, number in found)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------


def fill_masks(
    executor: LLExecutor | None, matchers: Sequence[LLMatcher], words: int
) -> list[Mask]:
    """The tokens that each matcher allows next; without an executor one after the other."""
    masks = np.zeros((len(matchers), words), np.int32)
    if executor is None:
        for i, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher, masks, i)
    else:
        fill_next_token_bitmask_par(executor, [(m, i) for i, m in enumerate(matchers)], masks)
    return list(masks)


def only(token_id: int, words: int) -> Mask:
    """A mask that allows one token."""
    return with_tokens(np.zeros(words, np.int32), (token_id,))


def with_tokens(mask: Mask, ids: Iterable[int]) -> Mask:
    """`mask`, changed to allow `ids` too."""
    bits = mask.view(np.uint32)
    for token_id in ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask
