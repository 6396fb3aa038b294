"""Compilation of constraints and forced tool calls to llguidance's matchers.

A grammar is compiled once and kept; each row gets a copy. Only the masks are computed on the MLX
thread: a bit a token, for the rows that are constrained.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
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
from mlx_manager.mlx_server.errors import InvalidParameter, OutOfRange, UnsupportedParameter
from mlx_manager.mlx_server.formats import ToolFormat
from mlx_manager.mlx_server.limits import MOST_GRAMMAR, MOST_PATTERN, MOST_SCHEMA
from mlx_manager.mlx_server.text.grammar.bounds import (
    TooMuchError,
    check_lark,
    check_schema,
    check_size,
    resolver,
)
from mlx_manager.mlx_server.text.grammar.gbnf import GbnfError, is_lark, lark_of
from mlx_manager.mlx_server.text.grammar.sandbox import Sandbox, Verdict
from mlx_manager.mlx_server.text.grammar.sandbox import SandboxVocabulary as StandIn
from mlx_manager.mlx_server.text.tool_calls.grammar import (
    bare_calls,
    calls_grammar,
    free_calls_grammar,
    json_of,
    literal,
)
from mlx_manager.mlx_server.text.tool_calls.schemas import (
    LEFT_OUT,
    Easing,
    UnwritableError,
    parameters_schema,
)
from mlx_manager.mlx_server.utils.bare import BareErrors
from mlx_manager.mlx_server.utils.daemon_threads import Waiting

Mask = NDArray[np.int32]
"""(words,): bit i of word w allows token 32 * w + i."""

MOST_KEPT = 128
"""Compiled grammars kept per model."""

MOST_BYTES = 2**29
"""And what these may take, as far as is known."""

LONGEST_REASON = 400
"""Characters of why a grammar is refused."""

MOST_AT_ONCE = 500
"""Ways in which a text may be read so far, of a grammar that the request has written.

A token takes time with their cube, on the MLX thread: of 2 000, which llguidance would follow, two
seconds. Programming languages take 60. What we write ourselves is wide and not ambiguous: a token
takes time with its width.
"""


class TooLargeForm(OutOfRange):
    """A form that is too large or too deep, or that no process survives: nothing eases it."""


class Grammars:
    """Compiles what a model's answers must be. Safe to use from several threads.

    Args:
        tokenizer: mlx-lm's `TokenizerWrapper`.
        end_ids: tokens that end an answer; allowed wherever the grammar may end.
        sandbox: where they are tried first; one of its own unless it is shared.
    """

    def __init__(
        self, tokenizer: Any, end_ids: Iterable[int], sandbox: Sandbox | None = None
    ) -> None:
        self._sandbox = sandbox or Sandbox()
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
        self._stand_in: StandIn | None = None
        # With the bytes that each takes.
        self._kept: OrderedDict[tuple[str, int | None], tuple[LLMatcher, int]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = Lock()

    def make_ahead(self) -> None:
        """Make what every grammar needs: of 128 000 tokens 0.6 s with Python's lock held.

        Raises:
            UnsupportedParameter: the model's tokenizer is of no use here.
            GenerationFailed: no process to try grammars in starts.
        """
        self._tokens("response_format")
        self._sandbox.make_ahead()
        # It makes a vocabulary, too.
        self.answer(JsonObject())

    def _tokens(self, param: str) -> LLTokenizer:
        """Return llguidance's form of the vocabulary, made when it is first needed."""
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
            if self._stand_in is None:
                end = self._end_ids[0] if self._end_ids else 0
                self._stand_in = StandIn(self._texts.vocab_size, self._ids, end)
            return self._texts

    @property
    def texts(self) -> LLTokenizer:
        """Return the vocabulary, once something has been compiled."""
        assert self._texts is not None
        return self._texts

    @property
    def words(self) -> int:
        """Return the length of this model's masks."""
        return -(-self.texts.vocab_size // 32)

    def matcher(
        self,
        grammar: str,
        param: str,
        most: int | None = None,
        waiting: Waiting | None = None,
    ) -> LLMatcher:
        """Return a matcher at the beginning of `grammar`, in any form that llguidance reads.

        most: ways in which a text may be read so far, if not as many as llguidance follows.
        waiting: who waits for it.

        Raises:
            InvalidParameter: the grammar can't be honoured; says why.
            UnsupportedParameter: the model's tokenizer is of no use here.
            GenerationFailed: there is no process to try it in.
            AbandonedError: nobody waits for it any more.
        """
        texts = self._tokens(param)
        with self._lock:
            known = self._kept.get((grammar, most))
            if known is not None:
                self._kept.move_to_end((grammar, most))
                return known[0].deep_copy()
        # Each is looked for by itself: an expression of thousands takes seconds.
        spells = any(map(_unescaped(grammar).__contains__, self._special))
        form = unforced(grammar) if spells else grammar
        tried = self._tried(form, param, most, waiting or Waiting())
        limits = LLParserLimits(max_items_in_row=most)
        made = LLMatcher(texts, form, log_level=0, limits=limits)
        if made.is_error():
            raise _refused(param, reason(made.get_error()))
        # What refers to itself without end compiles, and ends at once.
        fill_masks(None, [made], self.words)
        if made.is_error():
            raise _refused(param, f"nothing fits it ({reason(made.get_error())})")
        with self._lock:
            if (grammar, most) not in self._kept:
                self._kept[grammar, most] = made, tried.size
                self._kept_bytes += tried.size
            while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_BYTES:
                _, (_, size) = self._kept.popitem(last=False)
                self._kept_bytes -= size
            return made.deep_copy()

    def _tried(self, form: str, param: str, most: int | None, waiting: Waiting) -> Verdict:
        """Return the sandbox's verdict on a grammar that can be compiled here without harm."""
        if waiting.late:
            too_long = "all that the request asks for takes too long to compile"
            raise _refused(param, too_long, TooLargeForm)
        assert self._stand_in is not None
        verdict = self._sandbox.verdict(self._stand_in, form, most, waiting)
        if verdict.error is not None:
            kind = TooLargeForm if verdict.fatal else InvalidParameter
            raise _refused(param, reason(verdict.error), kind)
        return verdict

    def answer(self, constraint: Constraint, waiting: Waiting | None = None) -> LLMatcher:
        """Return a matcher for answers that fit `constraint`.

        Raises:
            InvalidParameter: the constraint can't be honoured; says why.
        """
        try:
            grammar = json.dumps({"grammars": [answer_grammar(constraint)]})
            return self.matcher(grammar, constraint.param, _most(constraint), waiting)
        except TooLargeForm:
            raise
        except InvalidParameter:
            eased = self._eased(constraint, waiting)
            if eased is None:
                raise
        return self.answer(eased, waiting)

    def _eased(self, constraint: Constraint, waiting: Waiting | None) -> JsonSchema | None:
        """Return a schema that could not be compiled, less the patterns and the references that
        can't be; None if there are none of these."""
        if not isinstance(constraint, JsonSchema) or constraint.strict:
            return None
        schema = json.loads(constraint.schema)
        easing = self._easing(schema, constraint.param, waiting, named=True)
        eased = json.dumps(easing.of(schema))
        return replace(constraint, schema=eased) if easing.left_out else None

    def eased(self, tool: Tool, waiting: Waiting | None) -> tuple[Tool, Sequence[str]]:
        """Return a tool less the patterns and the references in its parameters that calls can't be
        held to, and the names of these keywords."""
        easing = self._easing(tool.parameters, tool.schema_param, waiting, named=False)
        parameters = easing.of(tool.parameters)
        return replace(tool, parameters=parameters), list(easing.left_out)

    def _easing(self, schema: Any, param: str, waiting: Waiting | None, *, named: bool) -> Easing:
        def holds(pattern: str) -> bool:
            alone = {"json_schema": {"type": "string", "pattern": pattern}}
            try:
                self.matcher(json.dumps({"grammars": [alone]}), param, waiting=waiting)
            except InvalidParameter:
                return False
            return True

        return Easing(holds, resolver(schema), named)

    def calls(
        self,
        form: ToolFormat,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        param: str = "tool_choice",
        waiting: Waiting | None = None,
    ) -> LLMatcher:
        """Return a matcher for one call of `tools` or, if `parallel`, for one or more.

        Raises:
            InvalidParameter: a tool can't be honoured; says which and why.
        """
        split = self._split

        def lark(some: Sequence[Tool]) -> str:
            return calls_grammar(form, some, split, parallel=parallel)

        return self._of_tools(lark, tools, param, waiting)

    def free_calls(
        self,
        form: ToolFormat,
        tools: Sequence[Tool],
        openers: Sequence[str],
        *,
        param: str,
        waiting: Waiting | None = None,
    ) -> LLMatcher:
        """Return a matcher for any text, in which only calls of `tools` can follow `openers`.

        Raises:
            InvalidParameter: a tool can't be honoured; says which and why.
        """
        split = self._split

        def lark(some: Sequence[Tool]) -> str:
            return free_calls_grammar(form, some, split, openers)

        return self._of_tools(lark, tools, param, waiting)

    def _of_tools(
        self,
        lark: Callable[[Sequence[Tool]], str],
        tools: Sequence[Tool],
        param: str,
        waiting: Waiting | None,
    ) -> LLMatcher:
        texts = [tool for tool in tools if tool.text_grammar is not None]
        most = MOST_AT_ONCE if texts else None
        for tool in texts:
            # Each is a grammar by itself before it becomes a part of another.
            self.answer(Grammar(tool.text_grammar or "", tool.schema_param), waiting)
        try:
            return self.matcher(lark(tools), param, most, waiting)
        except InvalidParameter as error:
            if error.param == param:
                for tool in tools:
                    place = tool.schema_param
                    schema = json_of(parameters_schema(tool), lenient=not tool.strict)
                    alone = json.dumps({"grammars": [{"json_schema": schema}]})
                    self.matcher(alone, place, waiting=waiting)
                    self.matcher(lark([tool]), place, waiting=waiting)
            raise

    def _split(self, text: str) -> list[tuple[str, int | None]]:
        parts = self._added.split(text) if self._ids else [text]
        return [(part, self._ids.get(part)) for part in parts if part]

    def answer_or_calls(
        self,
        constraint: Constraint,
        form: ToolFormat,
        tools: Sequence[Tool],
        *,
        parallel: bool,
        waiting: Waiting | None = None,
    ) -> LLMatcher:
        """Return a matcher for answers that either fit `constraint` or call `tools`.

        Raises:
            InvalidParameter: the one or the other can't be honoured; says which and why.
        """
        try:
            whole = self._answer_or_calls(constraint, form, tools, parallel=parallel)
            return self.matcher(whole, constraint.param, _most(constraint), waiting)
        except (InvalidParameter, UnwritableError) as error:
            simple = not isinstance(error, TooLargeForm)
            if simple and (eased := self._eased(constraint, waiting)) is not None:
                return self.answer_or_calls(eased, form, tools, parallel=parallel, waiting=waiting)
            self.answer(constraint, waiting)
            self.calls(form, tools, parallel=parallel, param="tools", waiting=waiting)
            raise

    def _answer_or_calls(
        self, constraint: Constraint, form: ToolFormat, tools: Sequence[Tool], *, parallel: bool
    ) -> str:
        answer = answer_grammar(constraint)
        if not form.bare:
            calls = calls_grammar(form, tools, self._split, parallel=parallel)
        elif "json_schema" in answer:
            # Both begin with a brace: only as JSON can they be followed side by side.
            schema = json.dumps(answer["json_schema"])
            return f"start: calls | answer\nanswer: %json {schema}\n{bare_calls(form, tools)}"
        else:
            calls = f"start: calls\n{bare_calls(form, tools)}"
        grammars = [
            {"name": "either", "lark_grammar": "start: @calls | @answer"},
            {"name": "calls", "lark_grammar": calls},
            {"name": "answer", **answer},
        ]
        return json.dumps({"grammars": grammars})


def vocabulary(tokenizer: PreTrainedTokenizerBase, end_ids: list[int]) -> LLTokenizer:
    """Return llguidance's form of a tokenizer.

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
    """Return `grammar`, changed so that a forced text may be spelled by any tokens.

    llguidance would otherwise allow only the tokens that the tokenizer makes of the text. The model
    knows those best, but a special token's name in the text would become that token.
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
    """Return the forms that the names may have in a grammar that is `_unescaped`."""
    return {_unescaped(form) for name in names if name for form in (name, json.dumps(name)[1:-1])}


def _unescaped(grammar: str) -> str:
    """Return `grammar` less the backslashes by which texts and patterns are escaped."""
    return grammar.replace("\\", "")


def _unforced(lark: str) -> str:
    # The author of the grammar may have set the options.
    return lark if "%llguidance" in lark else f'%llguidance {{"no_forcing": true}}\n{lark}'


def _most(constraint: Constraint) -> int | None:
    return MOST_AT_ONCE if isinstance(constraint, Grammar) else None


def reason(error: str) -> str:
    """Return why a matcher is of no use, without llguidance's account of its state."""
    return error.partition("\n<state>")[0].strip()


_UNHELD = (
    (re.compile(r"Unimplemented keys: \[(.*)\]"), "{}"),
    (re.compile(rf"Unknown format: {LEFT_OUT}(.*?)(?: \(\d+ times\))?"), "{}"),
    (re.compile(r"Unknown format: (.*?)(?: \(\d+ times\))?"), "format {}"),
    (re.compile(r"(oneOf) .*"), "{}"),
)
"""llguidance's warnings, and what they are about."""


def unheld(matcher: LLMatcher) -> tuple[str, ...]:
    """Return the parts of a grammar's schemas that answers are not held to, each once."""
    found: dict[str, None] = {}
    for warning in matcher.get_grammar_warnings():
        for pattern, form in _UNHELD:
            if match := pattern.fullmatch(warning):
                names = match[1].replace('"', "").split(", ")
                found |= dict.fromkeys(form.format(name) for name in names)
                break
        else:
            found[warning] = None
    return tuple(found)


def _refused(
    param: str, reason: str, kind: type[InvalidParameter] = InvalidParameter
) -> InvalidParameter:
    if param.startswith("tool"):
        # The excerpt is of a grammar that the caller has never seen.
        reason = re.split(r"\n *\d+ \| ", reason.strip())[0]
        reason = re.sub(r"^(at )?\d+\(\d+\): ", "", reason)
    # llguidance repeats a pattern as a whole.
    reason = reason.strip()
    said = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
    return kind(f"`{param}` can't be honoured: {said}", param=param)


# ---------------------------------------------------------------------------------------------
# Constraints
# ---------------------------------------------------------------------------------------------


def answer_grammar(constraint: Constraint) -> dict[str, Any]:
    """Return a constraint as one of llguidance's grammars.

    Raises:
        InvalidParameter: it can't be one, or is too large.
    """
    try:
        return _answer_grammar(constraint)
    except TooMuchError as error:
        raise _refused(constraint.param, str(error), TooLargeForm) from error
    except GbnfError as error:
        raise _refused(constraint.param, f"it is neither Lark nor GBNF: {error}") from error


def _answer_grammar(constraint: Constraint) -> dict[str, Any]:
    match constraint:
        case JsonObject():
            return {"json_schema": json_of({"type": "object"})}
        case JsonSchema(text, strict):
            check_size("the schema", len(text), MOST_SCHEMA)
            schema = json.loads(text)
            check_schema(schema)
            return {"json_schema": json_of(schema, lenient=not strict)}
        case Regex(pattern):
            check_size("the regular expression", len(pattern), MOST_PATTERN)
            found = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]
            return {"lark_grammar": found["lark_grammar"]}
        case Choice(options):
            check_size("all options together", sum(map(len, options)), MOST_GRAMMAR)
            return {"lark_grammar": "start: " + " | ".join(map(literal, options))}
        case Grammar(text):
            check_size("the grammar", len(text), MOST_GRAMMAR)
            lark = text if is_lark(text) else lark_of(text)
            check_lark(lark)
            return {"lark_grammar": lark}


# ---------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------


def fill_masks(
    executor: LLExecutor | None, matchers: Sequence[LLMatcher], words: int
) -> list[Mask]:
    """Return the tokens that each matcher allows next; without an executor one after the other."""
    masks = np.zeros((len(matchers), words), np.int32)
    if executor is None:
        for i, matcher in enumerate(matchers):
            fill_next_token_bitmask(matcher, masks, i)
    else:
        fill_next_token_bitmask_par(executor, [(m, i) for i, m in enumerate(matchers)], masks)
    return list(masks)


def only(token_id: int, words: int) -> Mask:
    """Return a mask that allows one token."""
    return with_tokens(np.zeros(words, np.int32), (token_id,))


def with_tokens(mask: Mask, ids: Iterable[int]) -> Mask:
    """Change `mask` to allow `ids` too, and return it."""
    bits = mask.view(np.uint32)
    for token_id in ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    return mask


def allows_more_than(mask: Mask, ids: Iterable[int]) -> bool:
    """Return whether `mask` allows any token that is none of `ids`."""
    words = len(mask)
    known = (token_id for token_id in ids if 0 <= token_id < 32 * words)
    return bool((mask & ~with_tokens(np.zeros(words, np.int32), known)).any())


def allows(mask: Mask, token_id: int) -> bool:
    """Return whether `mask` allows a token."""
    word = token_id // 32
    return word < len(mask) and bool(int(mask[word]) >> token_id % 32 & 1)


def allows_one(mask: Mask) -> bool:
    """Return whether `mask` allows exactly one token."""
    words = mask[mask != 0].view(np.uint32)
    return len(words) == 1 and int(words[0]).bit_count() == 1
