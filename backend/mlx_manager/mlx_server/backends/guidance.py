"""From what a request demands of its answer to what the row may draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llguidance import LLMatcher

from mlx_manager.mlx_server.core import Conversation, GenerationRequest, NamedTool, Tool
from mlx_manager.mlx_server.errors import InvalidParameter, UnsupportedParameter
from mlx_manager.mlx_server.formats import Aside, OutputFormat, ToolFormat
from mlx_manager.mlx_server.models.adapters.vocabulary import token_ids
from mlx_manager.mlx_server.text.grammar.guide import Guide, Masks, Rules, ThinkingBudget
from mlx_manager.mlx_server.text.grammar.matchers import Grammars, TooLargeForm, unheld
from mlx_manager.mlx_server.text.grammar.sandbox import Sandbox
from mlx_manager.mlx_server.text.tool_calls.schemas import unknown_formats
from mlx_manager.mlx_server.utils.daemon_threads import Waiting

_ANY_ARGUMENTS = {"type": "object"}
_TOOLS = "tools"
GUIDE_SECONDS = 10.0
"""For all grammars of a request: the tool that can't be held to is looked for one by one."""


class Guidance:
    """Makes the guides of one model's rows. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Any, end_ids: Iterable[int], sandbox: Sandbox | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self._grammars = Grammars(tokenizer, self._end_ids, sandbox)

    def make_ahead(self) -> None:
        """Make what all guides share.

        Raises:
            UnsupportedParameter: this model has none.
            GenerationFailed: there is no process to try grammars in.
        """
        self._grammars.make_ahead()

    def of(
        self,
        request: GenerationRequest,
        output: OutputFormat,
        waiting: Waiting | None = None,
    ) -> tuple[OutputFormat, Guide | None]:
        """Return the row's guide, None if anything goes, and what its output then looks like.

        waiting: who waits for it; it takes seconds.

        Raises:
            InvalidParameter: a constraint or a tool can't be honoured; says why.
            UnsupportedParameter: this model can't be made to do that.
            GenerationFailed: there is no process to try grammars in.
            AbandonedError: nobody waits for it any more.
        """
        rules = self._rules(request, output, waiting or Waiting(GUIDE_SECONDS))
        budget = self._budget(request, output, rules)
        if rules is None and budget is None:
            return output, None
        words = -(-len(self._tokenizer) // 32)
        if rules is not None:
            output = _as_ruled(output, rules)
            words = self._grammars.words
        guide = Guide(output.initial, rules, budget, words)
        # The first mask takes longest; it is none of the other rows' business.
        Masks().update([guide])
        return output, guide

    def _rules(
        self, request: GenerationRequest, output: OutputFormat, waiting: Waiting
    ) -> Rules | None:
        constraint = request.constraint
        conversation = request.prompt if isinstance(request.prompt, Conversation) else None
        forced = forced_tools(conversation) if conversation else ()
        whole = False
        if conversation and forced:
            form = _writable(output, "tool_choice")
            several = conversation.tool_choice == "required" and output.parallel
            calls = partial(self._grammars.calls, form, parallel=several, waiting=waiting)
            matcher, left_out = self._held(calls, forced, waiting, forced=True)
            whole = form.whole
        elif constraint is None:
            return self._called(conversation, output, waiting) if conversation else None
        elif conversation is None or output.calls is None or output.header is not None:
            # Where headers announce calls, the content is never one.
            matcher, left_out = self._grammars.answer(constraint, waiting), ()
        else:
            either = partial(
                self._grammars.answer_or_calls,
                constraint,
                _writable(output, constraint.param),
                parallel=output.parallel,
                waiting=waiting,
            )
            matcher, left_out = self._held(either, conversation.tools, waiting)
        thinks = not (conversation and conversation.template_args.get("enable_thinking") is False)
        openers = self._openers(output) if thinks and not whole else ()
        param = "tool_choice" if constraint is None or forced else constraint.param
        return Rules(
            matcher,
            self._grammars.texts,
            self._end_ids,
            param,
            openers,
            whole,
            unheld=(*unheld(matcher), *left_out),
        )

    def _called(
        self, conversation: Conversation, output: OutputFormat, waiting: Waiting
    ) -> Rules | None:
        """Return the rules of an answer that is free but for its calls, if these are held to
        anything."""
        param = _holding(conversation, output)
        if param is None:
            return None
        try:
            return self._free_calls(conversation, output, param, waiting)
        except (InvalidParameter, UnsupportedParameter):
            if param != _TOOLS:
                raise
            # Nobody asked for it.
            return None

    def _free_calls(
        self, conversation: Conversation, output: OutputFormat, param: str, waiting: Waiting
    ) -> Rules:
        form = _writable(output, param)
        if form.whole and not form.message:
            raise UnsupportedParameter(
                f"`{param}`: this model's answers are messages whose headers are its own choice; "
                "only `tool_choice` 'required' or a function's name holds its calls to a schema.",
                param=param,
            )
        markers = [m for m, region in output.edges.get("content", ()) if region == "calls"]
        calls = partial(
            self._grammars.free_calls, form, openers=markers, param=param, waiting=waiting
        )
        matcher, left_out = self._held(calls, conversation.tools, waiting)
        return Rules(
            matcher,
            self._grammars.texts,
            self._end_ids,
            param,
            () if form.whole else self._openers(output),
            form.whole,
            free=True,
            unheld=(*unheld(matcher), *left_out),
        )

    def _held(
        self,
        compiled: Callable[[Sequence[Tool]], LLMatcher],
        tools: Sequence[Tool],
        waiting: Waiting,
        *,
        forced: bool = False,
    ) -> tuple[LLMatcher, Sequence[str]]:
        """Return the matcher that holds answers to `tools`, and the parts of `tools` that it leaves
        out. Parameters of tools that are not strict are eased where answers can't be held to them.
        They are eased as far as need be: to any arguments, unless a call is `forced`."""
        held, left_out = list(tools), list(formats_left_out(tools))
        tried: set[int] = set()
        while True:
            try:
                return compiled(held), left_out
            except InvalidParameter as error:
                found = [at for at, tool in enumerate(held) if tool.schema_param == error.param]
                if not found or held[found[0]].strict:
                    raise
                at = found[0]
                if at not in tried and not isinstance(error, TooLargeForm):
                    tried.add(at)
                    held[at], names = self._grammars.eased(held[at], waiting)
                    left_out += names
                    if names:
                        continue
                if forced or held[at].parameters == _ANY_ARGUMENTS:
                    raise
            left_out.append(held[at].schema_param)
            held[at] = replace(held[at], parameters=_ANY_ARGUMENTS)

    def _openers(self, output: OutputFormat) -> tuple[int, ...]:
        """Return the tokens with which an answer may begin to think, where they are tokens."""
        added = self._tokenizer.added_tokens_decoder.items()
        markers = {m for m, region in output.edges.get("content", ()) if region == "reasoning"}
        return tuple(token_id for token_id, token in added if token.content in markers)

    def _budget(
        self, request: GenerationRequest, output: OutputFormat, rules: Rules | None
    ) -> ThinkingBudget | None:
        tokens = 0 if _thinks_all_the_same(request, output) else request.thinking_budget
        if tokens is None or not output.thinking_end:
            return None
        end = output.thinking_end
        if rules is not None and rules.whole and not rules.free:
            # What follows is a call, and not the content.
            end = _aside_end(output) or end
        return ThinkingBudget(tokens, tuple(token_ids(self._tokenizer, end)))


def _thinks_all_the_same(request: GenerationRequest, output: OutputFormat) -> bool:
    """Return whether thinking was switched off, but the template has begun it."""
    match request.prompt:
        case Conversation(continue_final_message=False, template_args={"enable_thinking": False}):
            return output.initial == "reasoning"
    return False


def forced_tools(conversation: Conversation) -> Sequence[Tool]:
    """Return the tools one of which must be called.

    Raises:
        InvalidParameter: there are none.
    """
    match conversation.tool_choice:
        case "auto" | "none":
            return ()
        case "required":
            found: Sequence[Tool] = conversation.tools
        case NamedTool(name):
            found = [tool for tool in conversation.tools if tool.name == name]
    if not found:
        raise InvalidParameter(
            "`tool_choice` asks for a call of none of `tools`.", param="tool_choice"
        )
    return found


def formats_left_out(tools: Sequence[Tool]) -> Sequence[str]:
    """Return the formats of texts in the parameters of `tools` that are not enforced."""
    names = dict.fromkeys(name for tool in tools for name in unknown_formats(tool.parameters))
    return [f"format {name}" for name in names]


def compiles(request: GenerationRequest, output: OutputFormat) -> bool:
    """Return whether answering `request` in a format needs a grammar, which takes up to seconds to
    compile."""
    if request.constraint is not None:
        return True
    match request.prompt:
        case Conversation(tool_choice="auto") as conversation:
            return _holding(conversation, output) is not None
        case Conversation(tool_choice=choice):
            return choice != "none"
    return False


def _holding(conversation: Conversation, output: OutputFormat) -> str | None:
    """Return the field by which the calls of a free answer are held to schemas: that of a strict
    tool, or `_TOOLS` where the format's calls are held in any case; None if they are not held."""
    if conversation.tool_choice != "auto" or not conversation.tools:
        return None
    strict = next((tool for tool in conversation.tools if tool.strict), None)
    if strict is not None:
        return f"{strict.param}.strict"
    return _TOOLS if output.calls is not None and output.calls.held else None


def _writable(output: OutputFormat, param: str) -> ToolFormat:
    if output.calls is None:
        raise UnsupportedParameter(
            f"`{param}`: this model writes tool calls in a format that it can't be held to; only "
            "`tool_choice` 'auto' and 'none' with tools that are not strict and no response format "
            "are possible.",
            param=param,
        )
    return output.calls


def _aside_end(output: OutputFormat) -> str | None:
    """Return the text that ends thinking before calls; None if their format has no room for any."""
    opening = output.calls.opening if output.calls else ()
    return next((piece.end for piece in opening if isinstance(piece, Aside)), None)


def _as_ruled(output: OutputFormat, rules: Rules) -> OutputFormat:
    """Return `output` less the markers that the rules leave no room for, so that what looks like
    one in the text is text."""
    edges = dict(output.edges)
    edges["reasoning"] = tuple(e for e in edges.get("reasoning", ()) if e[1] != "calls")
    if not rules.openers and not rules.free:
        edges["content"] = tuple(e for e in edges.get("content", ()) if e[1] != "reasoning")
    return replace(output, edges={region: found for region, found in edges.items() if found})
