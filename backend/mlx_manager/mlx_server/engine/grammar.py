"""What an answer may be, compiled: constraints and forced tool calls to llguidance's matchers.

A grammar is compiled once and kept; each row gets a copy. Nothing here runs on the MLX thread but
the masks: a bit a token, for the rows that are constrained.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mlx_manager.mlx_server.core import (
    Choice,
    Constraint,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    Tool,
)
from mlx_manager.mlx_server.engine.call_grammar import (
    bare_calls,
    calls_grammar,
    free_calls_grammar,
    json_of,
    literal,
)
from mlx_manager.mlx_server.engine.schemas import (
    UnwritableError,
    parameters_schema,
    without_unknown_formats,
)
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.formats import CallShape
from mlx_manager.mlx_server.utils.bare import BareErrors

Mask = NDArray[np.int32]
"""(words,): bit i of word w allows token 32 * w + i."""

MOST_KEPT = 128
"""Compiled grammars kept per model."""

MOST_AT_ONCE = 500
"""Ways in which a text may be read so far, of a grammar that the request has written.

A token takes time with their cube, on the MLX thread: of 2 000, which llguidance would follow, two
seconds. Programming languages take 60. What we write ourselves is wide and not ambiguous: a token
takes time with its width.
"""


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
        special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        self._special = _spelled(special)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._texts: LLTokenizer | None = None
        # Why there is none: to find out takes as long as to make one.
        self._refusal: str | None = None
        self._kept: OrderedDict[tuple[str, int | None], LLMatcher] = OrderedDict()
        self._lock = Lock()

    def make_ahead(self) -> None:
        """What every grammar needs: of 128 000 tokens 0.6 s with Python's lock held.

        Raises:
            UnsupportedParameter: the model's tokenizer is of no use here.
        """
        self._tokens("response_format")

    def _tokens(self, param: str) -> LLTokenizer:
        """llguidance's form of the vocabulary, made when it is first needed."""
        with self._lock:
            if self._texts is None and self._refusal is None:
                try:
                    self._texts = vocabulary(self._tokenizer._tokenizer, self._end_ids)
                except ValueError as error:
                    self._refusal = str(error)
            if self._texts is None:
                raise UnsupportedParameter(
                    f"`{param}`: this model's answers can't be constrained, since llguidance can't "
                    f"use its tokenizer: {self._refusal}",
                    param=param,
                )
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

    def matcher(self, grammar: str, param: str, most: int | None = None) -> LLMatcher:
        """A matcher at the beginning of `grammar`, in any form that llguidance reads.

        most: ways in which a text may be read so far, if not as many as llguidance follows.

        Raises:
            InvalidParameter: the grammar can't be honoured; says why.
            UnsupportedParameter: the model's tokenizer is of no use here.
        """
        texts = self._tokens(param)
        with self._lock:
            known = self._kept.get((grammar, most))
            if known is not None:
                self._kept.move_to_end((grammar, most))
                return known.deep_copy()
        limits = LLParserLimits(max_items_in_row=most)
        # Each is looked for by itself: an expression of thousands takes seconds.
        spells = any(map(_unescaped(grammar).__contains__, self._special))
        form = unforced(grammar) if spells else grammar
        made = LLMatcher(texts, form, log_level=0, limits=limits)
        if made.is_error():
            raise _refused(param, reason(made))
        # What refers to itself without end compiles, and ends at once.
        fill_masks(None, [made], self.words)
        if made.is_error():
            raise _refused(param, f"nothing fits it ({reason(made)})")
        with self._lock:
            self._kept[grammar, most] = made
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return made.deep_copy()

    def answer(self, constraint: Constraint) -> LLMatcher:
        """A matcher for answers that fit `constraint`.

        Raises:
            InvalidParameter: the constraint can't be honoured; says why.
        """
        grammar = json.dumps({"grammars": [answer_grammar(constraint)]})
        return self.matcher(grammar, constraint.param, _most(constraint))

    def calls(
        self,
        shape: CallShape,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        param: str = "tool_choice",
    ) -> LLMatcher:
        """A matcher for one call of `tools` or, if `parallel`, for one or more.

        Raises:
            InvalidParameter: a tool can't be honoured; says which and why.
        """
        split = self._split

        def lark(some: Sequence[Tool]) -> str:
            return calls_grammar(shape, some, split, parallel=parallel)

        return self._of_tools(lark, tools, param)

    def free_calls(
        self, shape: CallShape, tools: Sequence[Tool], openers: Sequence[str], *, param: str
    ) -> LLMatcher:
        """A matcher for any text, in which only calls of `tools` can follow `openers`.

        Raises:
            InvalidParameter: a tool can't be honoured; says which and why.
        """
        split = self._split

        def lark(some: Sequence[Tool]) -> str:
            return free_calls_grammar(shape, some, split, openers)

        return self._of_tools(lark, tools, param)

    def _of_tools(
        self,
        lark: Callable[[Sequence[Tool]], str],
        tools: Sequence[Tool],
        param: str,
    ) -> LLMatcher:
        most = MOST_AT_ONCE if any(tool.text_grammar for tool in tools) else None
        try:
            return self.matcher(lark(tools), param, most)
        except InvalidParameter as error:
            if error.param == param:
                for tool in tools:
                    place = tool.schema_param
                    schema = json.dumps(json_of(parameters_schema(tool)))
                    self.matcher(LLMatcher.grammar_from_json_schema(schema), place)
                    self.matcher(lark([tool]), place)
            raise

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        parts = self._added.split(text) if self._ids else [text]
        return [(part, self._ids.get(part)) for part in parts if part]

    def answer_or_calls(
        self, constraint: Constraint, shape: CallShape, tools: Sequence[Tool], *, parallel: bool
    ) -> LLMatcher:
        """A matcher for answers that either fit `constraint` or call `tools`.

        Raises:
            InvalidParameter: the one or the other can't be honoured; says which and why.
        """
        try:
            return self._answer_or_calls(constraint, shape, tools, parallel=parallel)
        except (InvalidParameter, UnwritableError):
            self.answer(constraint)
            self.calls(shape, tools, parallel=parallel, param="tools")
            raise

    def _answer_or_calls(
        self, constraint: Constraint, shape: CallShape, tools: Sequence[Tool], *, parallel: bool
    ) -> LLMatcher:
        answer = answer_grammar(constraint)
        if not shape.bare:
            calls = calls_grammar(shape, tools, self._split, parallel=parallel)
        elif "json_schema" in answer:
            # Both begin with a brace: only as JSON can they be followed side by side.
            schema = json.dumps(answer["json_schema"])
            lark = f"start: calls | answer\nanswer: %json {schema}\n{bare_calls(shape, tools)}"
            return self.matcher(lark, constraint.param)
        else:
            calls = f"start: calls\n{bare_calls(shape, tools)}"
        grammars = [
            {"name": "either", "lark_grammar": "start: @calls | @answer"},
            {"name": "calls", "lark_grammar": calls},
            {"name": "answer", **answer},
        ]
        whole = json.dumps({"grammars": grammars})
        return self.matcher(whole, constraint.param, _most(constraint))


def vocabulary(tokenizer: PreTrainedTokenizerBase, end_ids: list[int]) -> LLTokenizer:
    """llguidance's form of a tokenizer.

    `from_tokenizer` copies it first, so that the copy neither cuts nor pads texts. That takes a
    quarter of the time, and few tokenizers do either.

    Raises:
        ValueError: llguidance can't use it; says why.
    """
    with BareErrors("tokenizers can't write it"):
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            own = tokenizer.backend_tokenizer
            if own.padding is None and own.truncation is None:
                return LLTokenizer(own.to_str(), eos_token=end_ids)
        return from_tokenizer(tokenizer, eos_token=end_ids)


def unforced(grammar: str) -> str:
    """`grammar`, in which what must come next may be spelled by any tokens.

    llguidance would else allow only those that the tokenizer makes of it. The model knows them
    best, but where a special token's name stands in a text, they are that token.
    """
    if not grammar.startswith("{"):
        return _unforced(grammar)
    whole = json.loads(grammar)
    for each in whole["grammars"]:
        if "json_schema" in each:
            each["lark_grammar"] = f"start: %json {json.dumps(each.pop('json_schema'))}"
        each["lark_grammar"] = _unforced(each["lark_grammar"])
    return json.dumps(whole)


def _spelled(names: Iterable[str]) -> set[str]:
    """How the names may stand in a grammar that is `_unescaped`."""
    return {_unescaped(form) for name in names if name for form in (name, json.dumps(name)[1:-1])}


def _unescaped(grammar: str) -> str:
    """Less what texts, patterns and texts within texts escape by."""
    return grammar.replace("\\", "")


def _unforced(lark: str) -> str:
    # Who writes grammars may have set the options.
    return lark if "%llguidance" in lark else f'%llguidance {{"no_forcing": true}}\n{lark}'


def _most(constraint: Constraint) -> int | None:
    return MOST_AT_ONCE if isinstance(constraint, Grammar) else None


def reason(matcher: LLMatcher) -> str:
    """Why `matcher` is of no use, without llguidance's account of its state."""
    return matcher.get_error().partition("\n<state>")[0].strip()


def _refused(param: str, reason: str) -> InvalidParameter:
    if param.startswith("tool"):
        # The excerpt is of a grammar that the caller has never seen.
        reason = re.split(r"\n *\d+ \| ", reason.strip())[0]
        reason = re.sub(r"^(at )?\d+\(\d+\): ", "", reason)
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
            return {"json_schema": json_of({"type": "object"})}
        case JsonSchema(text, strict):
            schema = json.loads(text)
            return {"json_schema": json_of(schema if strict else without_unknown_formats(schema))}
        case Regex(pattern):
            found = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        case Choice(options):
            return {"lark_grammar": "start: " + " | ".join(map(literal, options))}
        case Grammar(text, param):
            try:
                return {"lark_grammar": grammar_from("grammar", text)}
            except ValueError as error:
                raise _refused(param, str(error)) from error


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


def allows_more_than(mask: Mask, ids: Iterable[int]) -> bool:
    """Whether `mask` allows any token that is none of `ids`."""
    words = len(mask)
    known = (token_id for token_id in ids if 0 <= token_id < 32 * words)
    return bool((mask & ~with_tokens(np.zeros(words, np.int32), known)).any())
