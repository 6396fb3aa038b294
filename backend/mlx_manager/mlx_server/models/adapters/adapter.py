"""The adapter between the vocabulary of `core` and a model's tokenizer, for any family of models.

Most differences between models are found in their tokenizers and templates; the rest is in the
declarations of their families (`models/families`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jinja2
import regex
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from mlx_manager.mlx_server.core import Conversation, Message, ToolCall
from mlx_manager.mlx_server.errors import (
    InvalidParameter,
    InvalidRequest,
    MLXManagerError,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.formats import (
    PLAIN,
    OutputFormat,
    Region,
    ToolFormat,
    openai_call_id,
    short_call_id,
)
from mlx_manager.mlx_server.models.adapters.answer import (
    answer_edges,
    kept_tokens,
    opens_thinking,
    prompt_tail,
    region_of,
)
from mlx_manager.mlx_server.models.adapters.fitting import ALL, LAST_RESORT, NOTHING, Fitting
from mlx_manager.mlx_server.models.adapters.generic_tools import tools_text
from mlx_manager.mlx_server.models.adapters.literals import Literals, Rendered, unused
from mlx_manager.mlx_server.models.adapters.messages import template_messages, template_tools
from mlx_manager.mlx_server.models.adapters.template import (
    RENDER_ERRORS,
    Messages,
    RenderTemplate,
    TemplateTraits,
    Tools,
    functions_of,
    functions_text,
    probe,
)
from mlx_manager.mlx_server.models.adapters.tool_schemas import (
    described_function,
    shown_function,
)
from mlx_manager.mlx_server.models.adapters.tool_syntax import syntax_of
from mlx_manager.mlx_server.models.adapters.turns import Changes, WriteCalls, turns, with_system
from mlx_manager.mlx_server.models.adapters.vocabulary import token_id, token_ids
from mlx_manager.mlx_server.models.families import (
    DEFAULT,
    FAMILIES,
    VISIONS,
    family_of,
    vision_facts,
)
from mlx_manager.mlx_server.models.family import Family, Marks, MessageFormat, Tags
from mlx_manager.mlx_server.text.tool_calls.formats import FORMATS, GENERIC, LLAMA
from mlx_manager.mlx_server.text.tool_calls.writer import write_calls
from mlx_manager.mlx_server.utils.text import encodable

Tokenizer = Any
"""mlx-lm's `TokenizerWrapper`, or anything that has the methods used."""

_RENDERER_OPTIONS = (
    inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() | {"messages"}
) - {"documents", "kwargs"}


THINKING = tuple(marks for family in FAMILIES.values() for marks in family.thinking)
CONTENT = tuple(marks for family in FAMILIES.values() for marks in family.content)
INFILL = tuple(tokens for family in FAMILIES.values() for tokens in family.infill)
PICTURES = frozenset(word for facts in VISIONS for word in facts.words)


class Adapter:
    """The form of one loaded model's prompts and answers.

    config: the model's config.json, with generation_config.json's EOS merged in as mlx-lm does.
    tokenizer: the model's, whose template is probed here; without a tokenizer the template is
    assumed to support everything.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        tokenizer: Tokenizer = None,
        family: Family = DEFAULT,
    ) -> None:
        self._family = family
        self._config_eos = _as_ids((config or {}).get("eos_token_id"))
        self._syntax: ToolFormat | None = None
        self._write: WriteCalls = _write_generic
        self._traits = TemplateTraits()
        self._learned_turn_end: int | None = None
        self._sees = vision_facts(config or {})
        self._literals = Literals(PICTURES, tokenizer)
        if tokenizer is not None and tokenizer.has_chat_template:
            self._syntax = self._syntax_of(tokenizer)
            self._traits = probe(self._render_plainly(tokenizer), self._placeholder)
            self._learned_turn_end = self._turn_end_of(self._traits, tokenizer)
        form = self._syntax
        # Where answers are messages with headers, calls are no part of a message's text.
        known = form is not LLAMA or self._traits.tools != "nowhere"
        if form is not None and known and not form.whole:
            self._write = partial(write_calls, form)
        self._fitting = Fitting(self._outlined(tokenizer), self._placed, self._placeholder)

    @property
    def family(self) -> str:
        return self._family.name

    @property
    def _placeholder(self) -> str:
        """Return the text that stands for a picture; "" for a model that sees none."""
        return self._sees.placeholder if self._sees else ""

    def _outlined(self, tokenizer: Tokenizer) -> Callable[[Conversation, Changes], str]:
        return lambda outline, changes: self._rendered(tokenizer, outline, changes).marked

    def _syntax_of(self, tokenizer: Tokenizer) -> ToolFormat:
        found = syntax_of(tokenizer)
        return FORMATS.get(self._family.tool_format, found) if found is LLAMA else found

    # -- Ends ----------------------------------------------------------------------------------

    def get_stop_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Return the ids that end an answer, without duplicates."""
        openers = self._syntax.openers if self._syntax else ()
        opening = {token_id(tokenizer, opener) for opener in openers}
        named = [token_id(tokenizer, name) for name in self._family.turn_ends]
        ids = [*_tokenizer_eos(tokenizer), *self._config_eos, self._learned_turn_end, *named]
        wanted = dict.fromkeys(found for found in ids if found is not None)
        return [found for found in wanted if found not in opening]

    def _turn_end_of(self, traits: TemplateTraits, tokenizer: Tokenizer) -> int | None:
        """Return the token with which the template itself ends an answer; None if it is no special
        token, or ends one of several messages."""
        if self._family.messages is not None:
            return None
        ids = token_ids(tokenizer, traits.turn_end.lstrip())
        return ids[0] if ids and ids[0] in tokenizer.added_tokens_decoder else None

    # -- Prompts -------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        tokenizer: Tokenizer,
        messages: Messages,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Return the template's text for messages in its own form (dicts with `role` and
        `content`)."""
        render = _renderer(tokenizer)
        if self._family.shown is not None:
            messages = [self._family.shown(message) for message in messages]
        known = self._family.function_variables
        if known is not None and tokenizer.chat_template is None:
            kwargs = {name: value for name, value in kwargs.items() if name in known}
        text: str = render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        return text

    def render_text(self, conversation: Conversation, tokenizer: Tokenizer) -> str:
        """Return the prompt's text as the template renders it, pictures as their placeholder.

        Raises: the errors of `render`.
        """
        return self.render(conversation, tokenizer).text

    def render(self, conversation: Conversation, tokenizer: Tokenizer) -> Rendered:
        """Return the prompt as the template renders it. Callers' texts hold no placeholder in it.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses the
                conversation.
            MLXManagerError: the template is broken.
            InvalidParameter: an argument of the template has a reserved name, or the model sees no
                pictures.
        """
        if not tokenizer.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; use /v1/completions with a prompt.",
                param=conversation.param,
            )
        pictures = (image for message in conversation.messages for image in message.images)
        if not self._placeholder and (first := next(pictures, None)):
            raise InvalidParameter("This model takes no pictures, only text.", param=first.param)
        changes = self._fitting.changes(conversation)
        if changes is None:
            raise self._refusal(conversation, tokenizer)
        # The outline can't tell everything: a template may fail at the texts themselves.
        attempts = [(changes, False), (changes, True), (ALL, True), (LAST_RESORT, True)]
        refusals: list[Exception] = []
        for tried, described in dict.fromkeys(attempts):
            if tried != changes and not self._fitting.shows(conversation, tried):
                continue
            try:
                found = self._rendered(tokenizer, conversation, tried, described=described)
            except RENDER_ERRORS as error:
                refusals.append(error)
            else:
                # JSON can escape half a character; no tokenizer takes one.
                return found.changed(encodable)
        raise _refused(conversation, refusals[0]) from refusals[0]

    def _refusal(self, conversation: Conversation, tokenizer: Tokenizer) -> MLXManagerError:
        """Return the error that says why the template can't show all of the conversation."""
        try:
            self._rendered(tokenizer, conversation, NOTHING)
        except jinja2.TemplateSyntaxError as error:
            return MLXManagerError(
                f"The model's chat template is broken: {error.message}, in line {error.lineno}. "
                "Its owner has to mend it; /v1/completions takes prompts without it."
            )
        except RENDER_ERRORS as error:
            return _refused(conversation, error)
        return InvalidRequest(
            "The model's chat template leaves out a part of these messages or tools; "
            "/v1/completions takes prompts without it.",
            param=conversation.param,
        )

    def _rendered(
        self,
        tokenizer: Tokenizer,
        conversation: Conversation,
        changes: Changes,
        *,
        described: bool = False,
    ) -> Rendered:
        """Return the template's text. described: write the tools' parameters into their
        descriptions."""
        placed = self._placed(conversation, changes)
        written = self._sees.written if self._sees else ""
        picture = unused("seen", [message.text for message in placed]) if written else ""
        messages = template_messages(placed, self._traits, picture)
        options = self.variables(conversation) | self._tool_options(conversation, described)
        if self._traits.tools_as == "text" and conversation.offers_tools:
            messages[0]["tools"] = functions_text(template_tools(conversation.tools))
        if conversation.continue_final_message:
            options["continue_final_message"] = True
        prompted = conversation.add_generation_prompt and not conversation.continue_final_message
        cut, (messages, options) = self._literals.cut(messages, options)
        text = self.apply_chat_template(tokenizer, messages, prompted, **options)
        return Rendered(text.replace(picture, written) if picture else text, cut)

    def _placed(self, conversation: Conversation, changes: Changes) -> list[Message]:
        messages: Sequence[Message] = conversation.messages
        write = self._write
        if self._tells_in_text(conversation):
            write = _write_generic
            changes |= {"as text"}
            told = tools_text(template_tools(conversation.tools))
            messages = with_system(messages, told)
        elif self._traits.tools == "in system" and conversation.offers_tools:
            messages = with_system(messages, "")
        return turns(messages, self._traits, changes, write)

    def _tells_in_text(self, conversation: Conversation) -> bool:
        """True if the system message lists the tools, as the template has no place for them."""
        return self._traits.tools == "nowhere" and conversation.offers_tools

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """Return the template's variables. The switch of thinking is under the name that this
        template reads."""
        args = _template_args(conversation)
        if "enable_thinking" in args:
            thinks = args["enable_thinking"]
            if self._traits.thinking != "thinking_budget":
                args.setdefault(self._traits.thinking, thinks)
            elif not thinks:
                args.setdefault("thinking_budget", 0)
        return args

    def _tool_options(self, conversation: Conversation, described: bool) -> dict[str, Any]:
        if not conversation.offers_tools or self._tells_in_text(conversation):
            past = any(each.tool_calls or each.role == "tool" for each in conversation.messages)
            empty = self._traits.empty_tools or (past and self._traits.history_wants_tools)
            return {"tools": []} if empty else {}
        shown = described_function if described else partial(shown_function, self._traits.schemas)
        tools = [
            {**tool, "function": shown(tool["function"])}
            for tool in template_tools(conversation.tools)
        ]
        match self._traits.tools_as:
            case "tools":
                return {"tools": tools}
            case "functions":
                return {"tools": functions_of(tools)}
            case "text":
                return {}

    def encode_text(self, text: str, tokenizer: Tokenizer, cut: str = "") -> list[int]:
        """Return the tokens of a rendered or raw prompt, with one BOS if the model wants one.

        cut: see `Rendered`; no token spans it.
        """
        pieces = text.split(cut) if cut else [text]
        ids = [token for piece in pieces for token in token_ids(tokenizer, piece)]
        prefix = _prefix(tokenizer)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_infill(self, text: str, suffix: str, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens of a prompt for infilling: for the text between two others.

        Raises:
            UnsupportedParameter: the model's tokenizer has no tokens for infilling.
        """
        for tokens in INFILL:
            ids = {name: token_id(tokenizer, name) for name in tokens.names}
            if None not in ids.values():
                break
        else:
            raise UnsupportedParameter(
                "`suffix`: this model's tokenizer has no tokens for filling in the middle.",
                param="suffix",
            )

        def part(name: str, said: str) -> list[int | None]:
            return [ids[name], *token_ids(tokenizer, said)]

        parts = [part(tokens.prefix, text), part(tokens.suffix, suffix)]
        if tokens.suffix_first:
            parts.reverse()
        if tokens.middle:
            parts.append([ids[tokens.middle]])
        found = [number for ids_of_part in parts for number in ids_of_part if number is not None]
        return _prefix(tokenizer) + found

    def _render_plainly(self, tokenizer: Tokenizer) -> RenderTemplate:
        def render(messages: Messages, tools: Tools | None, **variables: Any) -> str:
            options = {"add_generation_prompt": False} | variables
            if tools is not None:
                options["tools"] = tools
            return self.apply_chat_template(tokenizer, messages, **options)

        return render

    # -- Answers -------------------------------------------------------------------------------

    def output_format(
        self, tokenizer: Tokenizer, conversation: Conversation | None, prompt_ids: Sequence[int]
    ) -> OutputFormat:
        """Return the format of the answer to a prompt. conversation: None for a raw prompt."""
        return PLAIN if conversation is None else self._answer(tokenizer, conversation, prompt_ids)

    def _answer(
        self, tokenizer: Tokenizer, conversation: Conversation, prompt_ids: Sequence[int]
    ) -> OutputFormat:
        syntax = self._syntax if conversation.offers_tools else None
        if self._tells_in_text(conversation):
            syntax = GENERIC
        openers = syntax.openers if syntax else ()
        marks = self.reasoning_marks(tokenizer, conversation)
        structural = self.structural_marks(tokenizer, conversation)
        edges = answer_edges(tokenizer, marks, structural, openers)
        initial = region_of(tokenizer.response_initial_state)
        if marks and opens_thinking(tokenizer, conversation, marks, prompt_ids):
            initial = "reasoning"
        output = OutputFormat(
            edges=edges,
            initial=initial,
            calls=syntax,
            offered={tool.name: tool.parameters for tool in conversation.tools if syntax},
            parallel=conversation.parallel_tool_calls,
            keep=kept_tokens(tokenizer, edges, syntax),
            thinking_end=marks[1] if marks else "",
            new_call_id=short_call_id if self._traits.call_ids == "short" else openai_call_id,
        )
        if self._family.messages is None:
            return output
        return _in_messages(output, self._family.messages, tokenizer, conversation, prompt_ids)

    def thinks(self, tokenizer: Tokenizer) -> bool:
        """Return True if answers may begin with thinking."""
        messages = self._family.messages
        if messages is not None and "reasoning" in messages.channels.values():
            return True
        # Some templates, such as Granite's and Hunyuan's, think only if asked to.
        asked = Conversation((), template_args={"enable_thinking": True, "thinking": True})
        return self.reasoning_marks(tokenizer, asked) is not None

    def reasoning_marks(self, tokenizer: Tokenizer, conversation: Conversation) -> Marks | None:
        """Return the texts around thinking; None for a model that does not think."""
        if tags := self._tags(conversation):
            return tags.thinking
        if tokenizer.has_thinking:
            return tokenizer.think_start, tokenizer.think_end
        known = (pair for pair in THINKING if token_id(tokenizer, pair[0]) is not None)
        # OLMo 3 and Llama-Nemotron think without special tokens for it.
        thinks = self._traits.opens_thinking or self._traits.drops_thinking
        return next(known, ("<think>", "</think>") if thinks else None)

    def structural_marks(self, tokenizer: Tokenizer, conversation: Conversation) -> Sequence[str]:
        """Return the texts in answers that are neither content nor begin another region."""
        if tags := self._tags(conversation):
            return tags.content
        around = (pair for pair in CONTENT if token_id(tokenizer, pair[0]) is not None)
        return (*tokenizer.structural_markers, *next(around, ()))

    def _tags(self, conversation: Conversation) -> Tags | None:
        tags = self._family.tags
        if tags is None or not tags.asked_by:
            return tags
        return tags if self.variables(conversation).get(tags.asked_by) else None


class LlamaAdapter(Adapter):
    """Adapter of Llama models, for scripts."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tokenizer: Tokenizer = None
    ) -> None:
        super().__init__(config, tokenizer, FAMILIES["llama"])


def get_adapter(
    source: str | Mapping[str, Any] | None, name: str = "", tokenizer: Tokenizer = None
) -> Adapter:
    """Return the adapter of a model.

    source: its config.json or, where there is none, its name (which `name` may have, too).
    """
    config = source if isinstance(source, Mapping) else None
    said = str(config.get("model_type", "")) if config else name or str(source or "")
    return Adapter(config, tokenizer, family_of(said))


def _in_messages(
    output: OutputFormat,
    form: MessageFormat,
    tokenizer: Tokenizer,
    conversation: Conversation,
    prompt_ids: Sequence[int],
) -> OutputFormat:
    """Return the format of an answer that consists of messages with headers."""
    initial: Region = "content"
    if not conversation.continue_final_message:
        begun = regex.search(form.begun, prompt_tail(tokenizer, prompt_ids).rstrip())
        initial = "header" if begun is None else form.channels.get(begun[1], "content")
    return replace(
        output,
        edges=form.edges,
        initial=initial,
        header=form.header,
        channels=form.channels,
        keep=kept_tokens(tokenizer, form.edges, output.calls, form.header),
        thinking_end=form.thinking_end,
    )


def _template_args(conversation: Conversation) -> dict[str, Any]:
    """Return the variables for the template. A name that the renderer itself knows is refused: it
    would do something else, such as render a template that the server's owner has not chosen.
    """
    taken = sorted(_RENDERER_OPTIONS & conversation.template_args.keys())
    if taken:
        raise InvalidParameter(
            f"chat_template_kwargs can't hold {', '.join(taken)}: no template's variable.",
            param="chat_template_kwargs",
        )
    return dict(conversation.template_args)


def _renderer(tokenizer: Tokenizer) -> Callable[..., Any]:
    """Return the function that renders the tokenizer's template.

    mlx-lm's wrapper is bypassed: it sets `enable_thinking` where the request leaves it open.
    """
    if isinstance(tokenizer, TokenizerWrapper):
        if tokenizer._chat_template is not None:
            function: Callable[..., Any] = tokenizer._chat_template
            return function
        tokenizer = tokenizer._tokenizer
    return partial(tokenizer.apply_chat_template, tokenize=False)


def _write_generic(calls: Sequence[ToolCall]) -> str:
    return f"\n{write_calls(GENERIC, calls)}"


def _refused(conversation: Conversation, error: Exception) -> InvalidRequest:
    return InvalidRequest(
        f"The model's chat template refuses these messages: {error}", param=conversation.param
    )


def _tokenizer_eos(tokenizer: Tokenizer) -> list[int]:
    several = getattr(tokenizer, "eos_token_ids", None)
    return [*_as_ids(tokenizer.eos_token_id), *sorted(_as_ids(several))]


def _as_ids(value: Any) -> list[int]:
    """Return the ids of a configuration's EOS, which may be absent, one id or several."""
    if isinstance(value, int):
        return [value]
    return [int(found) for found in value] if isinstance(value, Iterable) else []


def _prefix(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer itself puts before any text: its BOS, mostly."""
    bare = token_ids(tokenizer, "a")
    full: list[int] = tokenizer.encode("a", add_special_tokens=True)
    starts = range(len(full) - len(bare) + 1)
    return full[: next((i for i in starts if full[i : i + len(bare)] == bare), 0)]
