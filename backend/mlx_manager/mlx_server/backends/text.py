"""A loaded text model that answers: prompt to tokens, tokens to the engine, events back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlx_manager.mlx_server.backends.guidance import (
    GUIDE_SECONDS,
    Guidance,
    compiles,
    forced_tools,
)
from mlx_manager.mlx_server.backends.tokenising import (
    TokenisedText,
    check_counted,
    most_counted,
    tokenised,
)
from mlx_manager.mlx_server.backends.vocabulary import Vocabulary
from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import (
    Conversation,
    Event,
    Finished,
    GenerationRequest,
    Image,
    Message,
    Prompt,
    Push,
    RowStatus,
    Started,
    Text,
    TextDelta,
    TokenizerInfo,
    TokenLogprob,
    Tokens,
    Usage,
)
from mlx_manager.mlx_server.defaults import fill_sampling
from mlx_manager.mlx_server.engine.disk.folder import Folder
from mlx_manager.mlx_server.engine.disk.machine import machine_facts, vision_programs
from mlx_manager.mlx_server.engine.disk.threads import BlockDisk
from mlx_manager.mlx_server.engine.disk.tier import block_pages, stores_of
from mlx_manager.mlx_server.engine.prompt_images import PromptImages
from mlx_manager.mlx_server.engine.sampling import SamplerState
from mlx_manager.mlx_server.engine.scheduler.step_size import StepSize
from mlx_manager.mlx_server.engine.scores import Scoring
from mlx_manager.mlx_server.engine.sequence import Sequence
from mlx_manager.mlx_server.engine.speculation.draft_model import DraftForward
from mlx_manager.mlx_server.engine.speculation.proposers import Proposer
from mlx_manager.mlx_server.engine.speculation.speculation import objection
from mlx_manager.mlx_server.engine.statistics import EngineStats
from mlx_manager.mlx_server.engine.stream import LoopRow, Sink
from mlx_manager.mlx_server.engine.text_engine import TextEngine
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    InvalidParameter,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotSupported,
    OutOfMemory,
)
from mlx_manager.mlx_server.execution.forward import Forward
from mlx_manager.mlx_server.execution.select import ChooseForward, choose
from mlx_manager.mlx_server.formats import PLAIN, OutputFormat
from mlx_manager.mlx_server.models.adapters.vocabulary import token_ids
from mlx_manager.mlx_server.models.loading.draft import LoadedDraft, draft_line
from mlx_manager.mlx_server.models.loading.load import LoadedModel
from mlx_manager.mlx_server.models.loading.mtp import LoadedHead
from mlx_manager.mlx_server.text.detokenizer import TokenTexts
from mlx_manager.mlx_server.text.grammar.guide import Guide
from mlx_manager.mlx_server.text.grammar.sandbox import Sandbox
from mlx_manager.mlx_server.text.output_parser import OutputParser
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads, Waiting
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard

log = logging.getLogger(__name__)

PROMPTS_AT_ONCE = 4
"""Prompts that are rendered and tokenised at once, which can't be ended. Keys take turns."""
GRAMMARS_AT_ONCE = 2
"""Grammars that are compiled at once: up to seconds, and without Python's lock."""
SHORT = 4096
"""Characters or tokens of a prompt that takes less than a millisecond to render and to tokenise."""
MESSAGE = 64
"""Characters that a message counts for besides its text, in `SHORT`."""
PICTURE = 1024
"""Characters that a picture counts for, in `SHORT`."""

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's prompt as tokens and pictures, what its output will look like, and what it must
    be."""

    ids: list[int]
    output: OutputFormat
    images: PromptImages | None
    guide: Guide | None
    prediction: tuple[int, ...] = ()

    @property
    def unheld(self) -> tuple[str, ...]:
        """Return the names of requirements that the answer is not held to."""
        rules = None if self.guide is None else self.guide.rules
        return () if rules is None else rules.unheld


@dataclass(frozen=True, slots=True)
class Read:
    """A prompt's tokens, the form of its answer, and its pictures. prediction: tokens that the
    answer is expected to be much like."""

    tokens: TokenisedText
    output: OutputFormat = PLAIN
    images: PromptImages | None = None
    prediction: tuple[int, ...] = ()


@dataclass(slots=True)
class PromptReading:
    """A prompt that is being read, and the number of rows that wait for it."""

    task: asyncio.Task[Read]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class TextTokens:
    """A prompt as tokens, and how many the model can take."""

    ids: list[int]
    context_length: int
    _texts: TokenTexts

    def texts(self) -> list[str]:
        """Return each token's text, U+FFFD where it is a part of a character."""
        return [self._texts.piece(token).decode("utf-8", "replace") for token in self.ids]


def prepare(
    loaded: LoadedModel,
    thread: MLXThread,
    limits: EngineLimits,
    ledger: Ledger,
    choice: ChooseForward = choose,
    *,
    sandbox: Sandbox | None = None,
    draft: Callable[[], LoadedDraft] | None = None,
    head: Callable[[], LoadedHead] | None = None,
    named: str | None = None,
    doing: Doing = unheard,
) -> TextBackend:
    """Make a backend, on the MLX thread.

    sandbox: where grammars are tried first; one of its own unless models share it. draft: loads the
    draft model, if there is one, and head its MTP head, if that is to draft; called only where
    drafts may be tried. named: the id or folder of the head, if the owner names it: the model is
    not loaded without. doing: told what is begun.

    Raises:
        ModelNotSupported: what the draft model's layers keep is not all on pages.
        ModelLoadFailed, OutOfMemory: the draft model, or the head, can't be loaded.
    """
    forward = choice(
        loaded.model,
        limits.page_size,
        kv_bits=limits.kv_bits,
        doing=doing,
        vision=loaded.vision,
    )
    drafting, what = None, "draft model" if head is None else "MTP head"
    if draft is not None or head is not None:
        if why := objection(limits, forward):
            # Nobody need have asked for a head.
            level = logging.INFO if draft is None else logging.WARNING
            log.log(level, "the %s of %s is not loaded: %s", what, loaded.id, why)
        elif head is not None:
            drafting = headed(loaded, head, forward, limits, choice, ledger, named, doing)
        elif draft is not None:
            drafting = drafted(loaded, draft(), limits, choice, doing)
    doing("its pages are made")
    backend = TextBackend(loaded, thread, limits, ledger, forward, sandbox=sandbox, draft=drafting)
    with ExitStack() as undo:
        undo.callback(backend.close)
        backend.make_pages()
        undo.pop_all()
    return backend


def kept_on_disk(
    loaded: LoadedModel, forward: Forward, limits: EngineLimits, wake: Callable[[], None]
) -> BlockDisk | None:
    """Return the disk that keeps the model's prefixes, if one is to. wake: see `BlockDisk`."""
    if limits.prefix_disk is None:
        return None
    stores = stores_of(forward)
    if not stores or forward.prefixes == "copy":
        why = "lie on several devices" if forward.stores and not stores else "are not on pages"
        log.warning("%s: its prefixes %s, and none are kept on disk", loaded.id, why)
        return None
    facts = {
        **machine_facts(),
        "vision": [] if loaded.vision is None else vision_programs(),
        "weights": [loaded.weights.name, loaded.weights.dtype],
        "forward": [forward.kind, forward.prefixes],
        "pages": [limits.page_size, block_pages(limits.page_size)],
        "layers": [
            [store.format, of.kv_heads, of.key_dim, of.value_dim, of.dtype_name, of.window]
            for store, of in ((store, store.shape) for store in stores)
        ],
    }
    return BlockDisk(Folder(limits.prefix_disk), loaded.id, facts, loaded.files, wake)


@dataclass(frozen=True, slots=True)
class ChosenDraft:
    """A draft model or MTP head that is in memory, and how it is run."""

    model: LoadedDraft | LoadedHead
    run: DraftForward


def drafted(
    loaded: LoadedModel,
    draft: LoadedDraft,
    limits: EngineLimits,
    choice: ChooseForward,
    doing: Doing,
) -> ChosenDraft:
    """Choose how a draft model is run.

    Raises:
        ModelNotSupported: what its layers keep is not all on pages.
    """
    forward = choice(draft.model, limits.page_size, doing=doing)
    if forward.prefixes != "pages":
        raise ModelNotSupported(
            f"{draft.id} can't draft for {loaded.id}: what its layers keep of a text is not all on "
            "KV pages, and can't go back."
        )
    part = draft.nbytes / max(loaded.nbytes, 1)
    run = DraftForward(forward, loaded.vocabulary, draft.embedded, draft.context_length, part)
    return ChosenDraft(draft, run)


def headed(  # noqa: PLR0917
    loaded: LoadedModel,
    head: Callable[[], LoadedHead],
    forward: Forward,
    limits: EngineLimits,
    choice: ChooseForward,
    ledger: Ledger,
    named: str | None,
    doing: Doing,
) -> ChosenDraft | None:
    """Load a model's MTP head, and choose how it is run. Return None, with nothing kept, if it
    can't draft and the owner does not name it. forward: the way in which the model is run.

    Raises:
        ModelLoadFailed: the head that the owner names can't draft.
        OutOfMemory: there is no room for it.
    """
    try:
        return _chosen_head(loaded, head(), forward, limits, choice, doing)
    except (ModelLoadFailed, OutOfMemory) as error:
        ledger.record(draft_line(loaded.id), 0)
        if named is None:
            log.warning("%s is loaded without its MTP head: %s", loaded.id, error.message)
            return None
        if isinstance(error, OutOfMemory):
            raise
        raise ModelLoadFailed(
            f"{named} has no MTP head that drafts for {loaded.id} (`mtp`): {error.message}"
        ) from error


def _chosen_head(  # noqa: PLR0917
    loaded: LoadedModel,
    own: LoadedHead,
    forward: Forward,
    limits: EngineLimits,
    choice: ChooseForward,
    doing: Doing,
) -> ChosenDraft:
    """Choose how a head is run, and have the model give it hidden states.

    Raises:
        ModelNotSupported: what its layer keeps is not all on pages, or there are no such states.
    """
    run = choice(own.model, limits.page_size, doing=doing)
    if run.prefixes != "pages" or not run.keep_hidden(fed=True):
        raise ModelNotSupported(
            f"what its layer keeps of a text is not all on KV pages, or it gives no hidden states "
            f"({run.kind})."
        )
    if not forward.keep_hidden():
        raise ModelNotSupported(
            f"the model, as it is run ({forward.kind}), gives no hidden states."
        )
    part = (own.nbytes + own.shared_bytes) / max(loaded.nbytes, 1)
    draft = DraftForward(
        run,
        loaded.vocabulary,
        own.embedded,
        own.context_length,
        part,
        own.give,
        own.state_bytes,
    )
    return ChosenDraft(own, draft)


class TextBackend:
    """Serves one model on the MLX thread. Made and closed there; asked in asyncio.

    A worker calls `begin`, whose events go to the server from the MLX thread. `generate` answers in
    this process.

    forward: how the model is run.

    Attributes:
        draft_model: the id of its draft model; None: there is none. mtp: the id of the model or
            folder whose MTP head drafts; None: none does.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        thread: MLXThread,
        limits: EngineLimits,
        ledger: Ledger,
        forward: Forward,
        *,
        sandbox: Sandbox | None = None,
        draft: ChosenDraft | None = None,
    ) -> None:
        drafting = None if draft is None else draft.model
        self.draft_model = drafting.id if isinstance(drafting, LoadedDraft) else None
        self.mtp = drafting.id if isinstance(drafting, LoadedHead) else None
        self._loaded = loaded
        self._thread = thread
        self._texts = TokenTexts(loaded.tokenizer)
        named = loaded.adapter.get_stop_tokens(loaded.tokenizer)
        # A config.json may name an end that the model can't write, such as -1.
        self._stop_ids = frozenset(token for token in named if 0 <= token < loaded.vocabulary)
        self._vocabulary = Vocabulary(
            loaded.tokenizer, min(len(loaded.tokenizer), loaded.vocabulary)
        )
        self._guidance = Guidance(loaded.tokenizer, self._stop_ids, sandbox)
        # Their own: what a request asks for here may take seconds, and others need threads, too.
        self._prompts = DaemonThreads(PROMPTS_AT_ONCE)
        self._readings: dict[tuple[object, ...], PromptReading] = {}
        self._compiling = DaemonThreads(GRAMMARS_AT_ONCE)
        size = StepSize.of(limits, loaded.model, forward, ledger)
        if draft is not None:
            size = size.with_draft(
                limits, draft.model.model, draft.run.forward, draft.run.state_bytes
            )
        self._engine = TextEngine(
            loaded.id,
            forward,
            limits,
            ledger,
            looks_ahead=forward.looks_ahead,
            size=size,
            tower=None if loaded.vision is None else loaded.vision.tower,
            draft=None if draft is None else draft.run,
            wake=partial(thread.post, _nothing),
            disk=kept_on_disk(loaded, forward, limits, partial(thread.post, _nothing)),
        )
        thread.attach(self._engine)

    def close(self) -> None:
        """End every stream and free the pages. On the MLX thread."""
        self._thread.detach()
        self._engine.close()

    def make_pages(self) -> None:
        """Make pages before the first request; on the MLX thread."""
        self._engine.make_pages()

    def make_ahead(self) -> None:
        """Prepare what the first request for JSON needs: up to a second with Python's lock held.

        Raises:
            UnsupportedParameter: this model's answers can't be constrained.
        """
        self._guidance.make_ahead()

    def drop_prefixes(self) -> None:
        """Forget the prompts that are kept for reuse. On the MLX thread."""
        self._engine.drop_prefixes()

    def rows(self) -> list[RowStatus]:
        return self._engine.rows()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    async def generate(self, request: GenerationRequest, push: Push) -> None:
        """Answer `request` in this process; see `core.Backend`.

        Raises:
            InvalidRequest: the prompt can't be rendered, is empty, or has unknown token ids.
            InvalidParameter: a constraint or a tool that can't be honoured; says why.
            UnsupportedParameter: this model can't be made to do that.
            ContextLengthExceeded: the prompt leaves no room for an answer.
            Overloaded: the queue is full.
        """
        row = LoopRow(push)
        await row.over(await self.begin(request, row))

    async def begin(self, request: GenerationRequest, sink: Sink) -> Callable[[], None]:
        """Have `request` answered into `sink`, from the MLX thread. Return what cancels it.

        Raises:
            MLXManagerError: as `generate`.
        """
        # The owner's word, if there is one, has been taken before the model was loaded.
        request = replace(request, sampling=fill_sampling(request.sampling, self._loaded.sampling))
        prepared = await self._prepared(request)
        if request.max_tokens == 0 and request.logprobs is None:
            sink.home.deliver([(sink, self._nothing(request, prepared), 0)])
            return lambda: None
        sequence = self._sequence(request, prepared, sink)
        sink.drawn = sequence.known
        if request.return_ids or request.echo or prepared.unheld:
            sequence.shape = partial(self._shaped, request, prepared, sequence)
        self._thread.post(partial(self._engine.submit, sequence))
        return partial(self._thread.post, partial(self._engine.cancel, sequence))

    def _shaped(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        sequence: Sequence,
        events: list[Event],
    ) -> list[Event]:
        """Add what the request asks for that the engine does not know of."""
        if request.return_ids:
            events = _with_ids(sequence, events)
        if prepared.unheld and isinstance(begun := events[0], Started):
            events = [replace(begun, unheld=prepared.unheld), *events[1:]]
        return self._echoed(request, prepared, sequence, events) if request.echo else events

    def tokenize(self, prompt: Prompt, special: bool = True) -> TextTokens:
        """Return a prompt's tokens, even if they are too many for the model.

        special: a text's begin with the model's BOS.

        Raises:
            InvalidRequest: the prompt can't be rendered, has unknown token ids, or asks for a call
                of a tool that is not there.
            ContextLengthExceeded: they are several times as many.
        """
        most = most_counted(self._loaded.context_length)
        if isinstance(prompt, Text) and not special:
            encode = partial(token_ids, self._loaded.tokenizer)
            [tokens] = tokenised(lambda texts: list(map(encode, texts)), [prompt.text], most)
        else:
            tokens = self._tokenise(prompt, most).tokens
        check_counted(len(tokens.ids), self._loaded.context_length, prompt.param)
        return TextTokens(tokens.ids, self._loaded.context_length, self._texts)

    def leaves_room(self, request: GenerationRequest) -> bool:
        """Return whether an answer can follow that is as long as asked for, or half the context
        long, whichever is shorter.

        Raises:
            InvalidRequest: as `tokenize`.
        """
        context = self._context(request)
        most = context - min(request.max_tokens or 1, context // 2)
        return len(self._tokenise(request.prompt, most).tokens.ids) <= most

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InvalidParameter: there is no such token.
            ContextLengthExceeded: there are more than `tokenize` would give.
        """
        given = list(ids)
        check_counted(len(given), self._loaded.context_length, "tokens")
        return self._vocabulary.text(given, "tokens")

    def render(self, conversation: Conversation) -> str:
        """Return the text that the model gets to see.

        Raises:
            InvalidRequest: the conversation can't be rendered.
        """
        self._check_seen(conversation)
        return self._loaded.adapter.render_text(conversation, self._loaded.tokenizer)

    def tokenizer_info(self) -> TokenizerInfo:
        """Return the description of the tokenizer that clients need."""
        templates = self._loaded.tokenizer.chat_template
        template = templates.get("default") if isinstance(templates, dict) else templates
        return self._vocabulary.info(self._loaded.context_length, template)

    def _tokenise(self, prompt: Prompt, enough: int) -> Read:
        """Return the prompt's tokens, output format and pictures. Of a text with more than `enough`
        tokens, only the first tokens, more than `enough`, need be returned."""
        adapter, tokenizer = self._loaded.adapter, self._loaded.tokenizer

        def read(encode: Encode, text: str) -> TokenisedText:
            [tokens] = tokenised(lambda texts: list(map(encode, texts)), [text], enough)
            return tokens

        match prompt:
            case Conversation():
                forced_tools(prompt)
                # Only the template knows what of thinking, calls and tools it writes.
                tokens, images = self._seen(prompt, read)
                return Read(tokens, adapter.output_format(tokenizer, prompt, tokens.ids), images)
            case Text(text, ""):
                return Read(read(lambda part: adapter.encode_text(part, tokenizer), text))
            case Text(text, suffix):

                def infill(cut: str) -> list[int]:
                    size = len(cut)
                    return adapter.encode_infill(text[:size], suffix[:size], tokenizer)

                return Read(read(infill, max(text, suffix, key=len)))
            case Tokens(ids=given):
                self._vocabulary.check(given, "prompt")
                return Read(TokenisedText(list(given)))

    def _seen(
        self, conversation: Conversation, read: Callable[[Encode, str], TokenisedText]
    ) -> tuple[TokenisedText, PromptImages | None]:
        """Return a conversation's tokens, and its pictures at their places."""
        self._check_seen(conversation)
        adapter, tokenizer = self._loaded.adapter, self._loaded.tokenizer
        rendered = adapter.render(conversation, tokenizer)

        def encode(text: str) -> list[int]:
            return adapter.encode_text(text, tokenizer, rendered.cut)

        images = images_of(conversation)
        vision = self._loaded.vision
        if vision is None or not images:
            return read(encode, rendered.marked), None
        layouts, param = vision.layouts(images), conversation.param
        tokens = read(encode, vision.expanded(rendered.marked, layouts, param))
        if tokens.unread:
            # It is too long already, and will be refused.
            return tokens, None
        ids, seen = vision.placed(tokens.ids, images, layouts, param)
        return TokenisedText(ids), seen

    def _check_seen(self, conversation: Conversation) -> None:
        """Check that the model takes the conversation's pictures.

        Raises:
            InvalidParameter: it takes none; names the first picture's field.
        """
        images = images_of(conversation)
        if images and self._loaded.vision is None:
            raise InvalidParameter(
                f"{self._loaded.id} takes no pictures, only text.", param=images[0].param
            )

    async def _prepared(self, request: GenerationRequest) -> Prepared:
        """Return the checked prompt and the guide. Work that is long enough to hold others up is
        done on other threads.

        A request that waits for those threads goes on when the event loop has been through all that
        had arrived by then: of a burst, no prompt would be begun before the last has been parsed.
        """
        key = request.caller.key
        self._vocabulary.check([token for token, _ in request.sampling.logit_bias], "logit_bias")
        self._vocabulary.check(request.stop.token_ids, "stop_token_ids")
        read = self._prompt(request) if _is_short(request) else await self._shared(request)
        self._check_prompt(request, read)
        ids, images = read.tokens.ids, read.images
        if not compiles(request, read.output):
            output, guide = self._guidance.of(request, read.output)
            return Prepared(ids, output, images, guide, read.prediction)
        waiting = Waiting(GUIDE_SECONDS)
        guiding = partial(self._guidance.of, request, read.output, waiting)
        output, guide = await self._compiling.run(guiding, key, waiting)
        return Prepared(ids, output, images, guide, read.prediction)

    async def _shared(self, request: GenerationRequest) -> Read:
        """Return what `_prompt` does, on another thread; once for all answers to a prompt that come
        together."""
        prediction = request.prediction, request.speculation
        key = id(request.prompt), self._context(request), *prediction
        reading = self._readings.get(key)
        if reading is None:
            # It has the prompt, so that no other one gets its id meanwhile.
            work = self._prompts.run(partial(self._prompt, request), request.caller.key)
            reading = self._readings[key] = PromptReading(asyncio.create_task(work))
        reading.waiting += 1
        try:
            return await asyncio.shield(reading.task)
        finally:
            reading.waiting -= 1
            if not reading.waiting:
                del self._readings[key]
                reading.task.cancel()

    def _prompt(self, request: GenerationRequest) -> Read:
        read = self._tokenise(request.prompt, self._context(request))
        return replace(read, prediction=self._predicted(request))

    def _check_prompt(self, request: GenerationRequest, read: Read) -> None:
        ids, param = read.tokens.ids, request.prompt.param
        if not ids:
            raise InvalidRequest(
                "The prompt is empty: it has no tokens to go on from.", param=param
            )
        self._check_length(request, read.tokens)
        self._vocabulary.check_embedded(ids, self._loaded.vocabulary, param)

    def _predicted(self, request: GenerationRequest) -> tuple[int, ...]:
        """Return the first tokens of the request's prediction, as many as an answer may have."""
        if not request.prediction or not self._speculates(request):
            return ()
        encode = partial(token_ids, self._loaded.tokenizer)
        most = self._context(request)
        [content] = tokenised(lambda texts: list(map(encode, texts)), [request.prediction], most)
        known = self._loaded.vocabulary
        return tuple(token for token in content.ids[:most] if token < known)

    def _speculates(self, request: GenerationRequest) -> bool:
        """Return whether several tokens of the answer may be tried in one step."""
        return self._engine.speculates and request.speculation != "off"

    def _context(self, request: GenerationRequest) -> int:
        """Return the most tokens of prompt and answer: the model's, or the owner's."""
        context = self._loaded.context_length
        return min(context, request.context_length or context)

    def _check_length(self, request: GenerationRequest, tokens: TokenisedText) -> None:
        context = self._context(request)
        asked, length = request.max_tokens, len(tokens.ids)
        if length + (1 if asked is None else min(asked, 1)) > context:
            # A prompt that fills the context to the last token lacks room for the answer's first.
            total = max(tokens.total, context + 1)
            raise ContextLengthExceeded.counted(
                total,
                context,
                read=length - 1 if tokens.unread else None,
                param=request.prompt.param,
            )

    def _sequence(self, request: GenerationRequest, prepared: Prepared, stream: Sink) -> Sequence:
        room = self._context(request) - len(prepared.ids)
        rules = request.stop
        own = frozenset() if rules.ignore_eos else self._stop_ids
        return Sequence(
            prepared.ids,
            # With nothing to draw, one token is drawn all the same, to score the prompt.
            limit=max(1, room if request.max_tokens is None else min(request.max_tokens, room)),
            stop_ids=own | frozenset(rules.token_ids),
            cutting_ids=frozenset(rules.token_ids) - own,
            min_tokens=rules.min_tokens,
            sampler=SamplerState.of(request.sampling, prepared.ids),
            parser=OutputParser(
                self._texts.stream(prepared.output),
                prepared.output,
                rules.strings,
                rules.min_tokens,
            ),
            stream=stream,
            guide=prepared.guide,
            scoring=None
            if request.logprobs is None
            else Scoring(request.logprobs, request.echo, self._texts.piece),
            priority=request.priority,
            owner=request.caller.key,
            request_id=request.request_id,
            turn=self._texts.last_turn(prepared.ids),
            images=prepared.images,
            proposer=Proposer(prepared.prediction) if self._speculates(request) else None,
            salt=request.cache_salt,
        )

    def _echoed(
        self,
        request: GenerationRequest,
        prepared: Prepared,
        sequence: Sequence,
        events: list[Event],
    ) -> list[Event]:
        """Put the prompt's text, and its tokens' scores if they are asked for, after `Started`."""
        if not isinstance(events[0], Started):
            return events
        scores: tuple[TokenLogprob, ...] = ()
        if sequence.scores_prompt:
            first = prepared.ids[0]
            alone = TokenLogprob(first, self._texts.piece(first), None)
            scores = (alone, *sequence.prompt_scores)
        prompt = TextDelta(self._prompt_text(request, prepared), scores)
        if request.max_tokens == 0:
            usage = Usage(len(prepared.ids), 0)
            return [events[0], prompt, Finished("length", usage)]
        return [events[0], prompt, *events[1:]]

    def _nothing(self, request: GenerationRequest, prepared: Prepared) -> list[Event]:
        """Return the answer to `max_tokens` 0: the prompt, if it is to be echoed."""
        length = len(prepared.ids)
        echo = [TextDelta(self._prompt_text(request, prepared))] if request.echo else []
        ids = tuple(prepared.ids) if request.return_ids else ()
        begun = Started(length, ids=ids, unheld=prepared.unheld)
        return [begun, *echo, Finished("length", Usage(length, 0))]

    def _prompt_text(self, request: GenerationRequest, prepared: Prepared) -> str:
        if isinstance(request.prompt, Text):
            return request.prompt.text
        text: str = self._loaded.tokenizer.decode(prepared.ids, skip_special_tokens=True)
        return text


def _is_short(request: GenerationRequest) -> bool:
    """Return whether reading the prompt takes less time than waking another thread and being woken
    by it."""
    if len(request.prediction) > SHORT:
        return False
    match request.prompt:
        case Conversation(messages=messages, tools=()) as conversation:
            small = all(map(_is_small, conversation.template_args.values()))
            return small and sum(MESSAGE + _size(message) for message in messages) <= SHORT
        case Text(text, suffix):
            return len(text) + len(suffix) <= SHORT
        case Tokens(ids):
            return len(ids) <= SHORT
    return False


def _size(message: Message) -> int:
    """Return the characters of a message, its calls included."""
    calls = [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    others = [text or "" for text in (message.name, message.reasoning, message.tool_call_id)]
    texts = sum(map(len, [message.text, *others, *calls]))
    return texts + PICTURE * len(message.images)


def images_of(conversation: Conversation) -> list[Image]:
    """Return the pictures of a conversation, in their order."""
    return [image for message in conversation.messages for image in message.images]


def _is_small(variable: Any) -> bool:
    """Return whether a template's variable adds next to nothing to a text, unlike documents,
    say."""
    match variable:
        case str():
            return len(variable) <= MESSAGE
        case bool() | int() | float() | None:
            return True
    return False


def _with_ids(sequence: Sequence, events: list[Event]) -> list[Event]:
    prompt, drawn = (
        sequence.tokens[: sequence.prompt_length],
        sequence.tokens[sequence.prompt_length :],
    )
    found: list[Event] = []
    for event in events:
        match event:
            case Started():
                found.append(replace(event, ids=tuple(prompt)))
            case Finished():
                found.append(replace(event, ids=tuple(drawn)))
            case _:
                found.append(event)
    return found


def _nothing() -> None:
    """Do nothing: a message wakes the MLX thread."""
