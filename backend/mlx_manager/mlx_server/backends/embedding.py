"""A loaded encoder that answers: texts to tokens, tokens to the engine, vectors or scores back."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_manager.mlx_server.backends.tokenising import (
    TokenisedText,
    check_counted,
    most_counted,
    sliced,
    tokenised,
)
from mlx_manager.mlx_server.backends.vocabulary import Vocabulary
from mlx_manager.mlx_server.config import EngineLimits
from mlx_manager.mlx_server.core import (
    Conversation,
    EmbeddingRequest,
    Encoded,
    Prompt,
    RerankRequest,
    RowStatus,
    Text,
    TokenizerInfo,
    Tokens,
)
from mlx_manager.mlx_server.encoders.loading import LoadedEncoder
from mlx_manager.mlx_server.encoders.loop import EncoderEngine, EncoderStats, Request
from mlx_manager.mlx_server.encoders.wrapping import Ids, shortened
from mlx_manager.mlx_server.engine.thread import MLXThread
from mlx_manager.mlx_server.errors import (
    ContextLengthExceeded,
    GenerationFailed,
    InvalidParameter,
    InvalidRequest,
    UnsupportedParameter,
)
from mlx_manager.mlx_server.models.checkpoint.sentence import Activation
from mlx_manager.mlx_server.utils.daemon_threads import DaemonThreads
from mlx_manager.mlx_server.utils.memory import Ledger
from mlx_manager.mlx_server.utils.progress import Doing, unheard
from mlx_manager.mlx_server.utils.text import sized

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]
"""A row for each text."""
SMALLEST = 1e-12
"""Smallest length that a vector is divided by when it is normalised."""
TOKENISING = 2
"""Threads of a model that make tokens: a call of the tokenizer can't be ended."""


@dataclass(frozen=True, slots=True)
class EncoderTokens:
    """A text as tokens, and how many the model can take."""

    ids: list[int]
    context_length: int
    _tokenizer: Any

    def texts(self) -> list[str]:
        """Return each token's text, as the vocabulary has it."""
        found: list[str] = self._tokenizer.convert_ids_to_tokens(self.ids)
        return found


def prepare_encoder(
    loaded: LoadedEncoder,
    thread: MLXThread,
    limits: EngineLimits,
    ledger: Ledger,
    *,
    doing: Doing = unheard,
) -> EncoderBackend:
    """Make a backend, on the MLX thread. doing: told what is begun."""
    doing("what it reads with is compiled")
    backend = EncoderBackend(loaded, thread, limits, ledger)
    with ExitStack() as undo:
        undo.callback(backend.close)
        backend.warm()
        undo.pop_all()
    return backend


class EncoderBackend:
    """Serves one embedding model or reranker on the MLX thread. Made and closed there."""

    def __init__(
        self, loaded: LoadedEncoder, thread: MLXThread, limits: EngineLimits, ledger: Ledger
    ) -> None:
        self._loaded = loaded
        self._thread = thread
        self._tokenizer = loaded.tokenizer
        self._vocabulary = Vocabulary(loaded.tokenizer, loaded.model.vocabulary)
        self._single, self._pair = loaded.single, loaded.pair
        self._threads = DaemonThreads(TOKENISING)
        # With the memory that there is when nobody else has any.
        self._room = ledger.total - loaded.nbytes
        lengths = range(loaded.context_length + 1)
        self._readable = bisect_right(lengths, self._room, key=self._bytes_of) - 1
        self._engine = EncoderEngine(
            loaded.id,
            loaded.model,
            loaded.context_length,
            limits,
            ledger=ledger,
        )
        thread.attach(self._engine)

    def warm(self) -> None:
        """Have compiled what reading takes. On the MLX thread."""
        self._engine.warm()

    def close(self) -> None:
        """Fail what is being read. On the MLX thread."""
        self._thread.detach()
        self._engine.close()

    def stats(self) -> EncoderStats:
        return self._engine.stats()

    def drop_prefixes(self) -> None:
        """Do nothing: no prefixes are kept."""

    def rows(self) -> list[RowStatus]:
        """Return no rows: an encoder's requests are no sequences."""
        return []

    # -- what it answers -----------------------------------------------------------------------

    async def embed(self, request: EmbeddingRequest, begun: Callable[[], None]) -> Encoded:
        """Return a vector for each input; see `core.Encoder`.

        Raises:
            InvalidParameter: `dimensions`, `truncate_prompt_tokens`, a prompt's name or a token id
                that this model does not have.
            UnsupportedParameter: `dimensions` of a model whose vectors can't be cut.
            InvalidRequest: an input without a token.
            ContextLengthExceeded: an input that is too long, and was not to be cut.
            Overloaded: the queue is full.
            GenerationFailed: what the model computed is no finite number.
        """
        self._check_dimensions(request.dimensions)
        rows = await self._inputs(request)
        vectors = await self._read(request, rows, [None] * len(rows), begun)
        finished = await asyncio.to_thread(self._finished, vectors, request.dimensions)
        return Encoded(finished, sum(map(len, rows)))

    async def rank(self, request: RerankRequest, begun: Callable[[], None]) -> Encoded:
        """Return a score for each document; see `core.Encoder`.

        Raises:
            InvalidParameter: `truncate_prompt_tokens` is more than the model takes, or leaves
                nothing of a document.
            UnsupportedParameter: an instruction, which the model does not take.
            ContextLengthExceeded: a query and document that are too long, and were not to be cut.
            Overloaded: the queue is full.
            GenerationFailed: what the model computed is no finite number.
        """
        pairs = await self._pairs(request)
        texts, seconds = [ids for ids, _ in pairs], [second for _, second in pairs]
        logits = await self._read(request, texts, seconds, begun)
        activation = self._loaded.activation if request.activate else "identity"
        scores = await asyncio.to_thread(lambda: floats(activated(np.stack(logits), activation)))
        return Encoded(scores, sum(len(ids) for ids, _ in pairs))

    def tokenize(self, prompt: Prompt, special: bool = True) -> EncoderTokens:
        """Return a text's tokens. `special`: put the special tokens around them that the model
        wants.

        Raises:
            InvalidRequest: it is a conversation.
            ContextLengthExceeded: they are several times as many as the model takes.
        """
        match prompt:
            case Text(text):
                most = most_counted(self._loaded.context_length)
                [tokens] = tokenised(self._encode, [text], most)
                check_counted(len(tokens.ids), self._loaded.context_length, prompt.param)
                ids = self._single.of(tokens.ids) if special else tokens.ids
            case Tokens(ids):
                pass
            case Conversation():
                raise InvalidRequest(
                    f"{self._loaded.id} has no chat template; send a text.", param=prompt.param
                )
        return EncoderTokens(list(ids), self._loaded.context_length, self._tokenizer)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, special ones included.

        Raises:
            InvalidParameter: there is no such token.
            ContextLengthExceeded: there are more than `tokenize` would give.
        """
        given = list(ids)
        check_counted(len(given), self._loaded.context_length, "tokens")
        return self._vocabulary.text(given, "tokens")

    def tokenizer_info(self) -> TokenizerInfo:
        """Return the description of the tokenizer that clients need."""
        return self._vocabulary.info(self._loaded.context_length)

    # -- tokens --------------------------------------------------------------------------------

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._loaded.sentence.lower_case:
            texts = [text.lower() for text in texts]
        # What is too long is cut or refused here; the tokenizer would warn of "indexing errors".
        ids: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, verbose=False
        )["input_ids"]
        return ids

    async def _inputs(self, request: EmbeddingRequest) -> list[Ids]:
        """Tokenise the inputs a slice at a time. Between two slices other requests have their turn,
        and the work ends if the caller is gone."""
        most = self._most(request.truncate)
        prompt = self._prompt(request.prompt)
        cut = request.truncate is not None
        rows: list[Ids] = []
        for first, part in sliced(request.inputs, most):
            rows += await self._threads.run(partial(self._rows, part, first, prompt, most, cut))
        return rows

    def _rows(
        self, inputs: Sequence[str | Ids], first: int, prompt: str, most: int, cut: bool
    ) -> list[Ids]:
        texts = [prompt + given for given in inputs if type(given) is str]
        found = iter(tokenised(self._encode, texts, most))
        rows: list[Ids] = []
        for index, given in enumerate(inputs, first):
            unread = 0
            match given:
                case str():
                    tokens = next(found)
                    unread = 0 if cut else tokens.unread
                    self._check_embedded(tokens.ids, f"input[{index}]")
                    kept = tokens.ids[: most - self._single.length] if cut else tokens.ids
                    row = self._single.of(kept)
                case ids:
                    self._vocabulary.check(ids, f"input[{index}]")
                    row = ids[:most] if cut else ids
            if not row:
                raise InvalidRequest(f"Input {index} has no tokens.", param=f"input[{index}]")
            self._check_length(len(row) + unread, f"input {index}", f"input[{index}]")
            rows.append(row)
        return rows

    async def _pairs(self, request: RerankRequest) -> list[tuple[Ids, int | None]]:
        """Tokenise query and documents a slice at a time, as `_inputs` does."""
        cut = request.truncate is not None
        most = self._most(request.truncate)
        self._check_instruction(request.instruction)
        if (prompt := self._loaded.prompt) is not None:
            before = prompt.before(request.query, request.instruction)
            await self._threads.run(partial(self._check_query, before, most, cut))
            rows: list[tuple[Ids, int | None]] = []
            for first, part in sliced(request.documents, most):
                rows += await self._threads.run(
                    partial(self._prompted, before, part, first, most, cut)
                )
            return rows
        text = self._prompt(None) + request.query
        query = await self._threads.run(partial(self._query, text, most, cut))
        # Which of two texts is longer tells how both are cut.
        enough = max(most, len(query))
        pairs: list[tuple[Ids, int | None]] = []
        for first, part in sliced(request.documents, enough):
            made = partial(self._paired, query, part, first, enough, most if cut else None)
            pairs += await self._threads.run(made)
        return pairs

    def _query(self, text: str, most: int, cut: bool) -> list[int]:
        if cut:
            query = TokenisedText(self._encode([text])[0])
        else:
            [query] = tokenised(self._encode, [text], most)
            self._check_length(query.total + self._pair.length, "the query", "query")
        self._check_embedded(query.ids, "query")
        return query.ids

    def _check_query(self, before: str, most: int, cut: bool) -> None:
        """Check that the text up to a document leaves room for one.

        Raises:
            ContextLengthExceeded: it has too many tokens.
            InvalidParameter: nothing of a document would be left of a text that is cut.
        """
        [tokens] = tokenised(self._encode, [before], most)
        self._check_embedded(tokens.ids, "query")
        needed = tokens.total + self._pair.length
        if not cut:
            self._check_length(needed, "the query", "query")
        elif needed >= most:
            raise InvalidParameter(
                f"`truncate_prompt_tokens`: the query and the text that {self._loaded.id} puts "
                f"around it take {needed} tokens, which leaves nothing of {most} for a document.",
                param="truncate_prompt_tokens",
            )

    def _prompted(
        self, before: str, documents: Sequence[str], first: int, most: int, cut: bool
    ) -> list[tuple[Ids, int | None]]:
        """Return the rows of documents that are put to the model in a text with the query."""
        rows: list[tuple[Ids, int | None]] = []
        texts = [before + document for document in documents]
        for index, tokens in enumerate(tokenised(self._encode, texts, most), first):
            param = f"documents[{index}]"
            self._check_embedded(tokens.ids, param)
            ids = tokens.ids[: most - self._pair.length] if cut else tokens.ids
            row = self._pair.of(ids)
            unread = 0 if cut else tokens.unread
            self._check_length(len(row) + unread, f"the query and document {index}", param)
            rows.append((row, None))
        return rows

    def _check_instruction(self, instruction: str | None) -> None:
        """
        Raises:
            UnsupportedParameter: there is no place for one in the model's text.
        """
        prompt = self._loaded.prompt
        if instruction is None or (prompt is not None and prompt.instructed is not None):
            return
        raise UnsupportedParameter(
            f"`instruction`: {self._loaded.id} takes none. Leave it out, or put it into `query`.",
            param="instruction",
        )

    def _paired(
        self, query: list[int], documents: Sequence[str], first: int, enough: int, most: int | None
    ) -> list[tuple[Ids, int | None]]:
        pairs: list[tuple[Ids, int | None]] = []
        for index, document in enumerate(tokenised(self._encode, documents, enough), first):
            param = f"documents[{index}]"
            self._check_embedded(document.ids, param)
            lengths = len(query), len(document.ids)
            if most is not None:
                lengths = shortened(*lengths, most - self._pair.length)
            ids, start = self._pair.of_pair(query[: lengths[0]], document.ids[: lengths[1]])
            unread = 0 if most is not None else document.unread
            self._check_length(len(ids) + unread, f"the query and document {index}", param)
            pairs.append((ids, start))
        return pairs

    def _prompt(self, name: str | None) -> str:
        """
        Raises:
            InvalidParameter: the model has none of that name.
        """
        prompts = self._loaded.sentence.prompts
        chosen = name if name is not None else self._loaded.sentence.default_prompt
        if name is not None and name not in prompts:
            names = ", ".join(sorted(prompts)) or "none"
            raise InvalidParameter(
                f"`prompt_name`: {self._loaded.id} has no prompt {name!r}; it has: {names}.",
                param="prompt_name",
            )
        return prompts.get(chosen or "", "")

    def _most(self, truncate: int | None) -> int:
        """Return the most tokens of a row.

        Raises:
            InvalidParameter: it is to be more than the model takes, or leaves no text.
        """
        context = self._loaded.context_length
        if truncate is None or truncate == -1:
            return context
        least = max(self._single.length, self._pair.length) + 1
        if not least <= truncate <= context:
            raise InvalidParameter(
                f"`truncate_prompt_tokens` should be -1 or between {least} and {context} with this "
                f"model, not {truncate}.",
                param="truncate_prompt_tokens",
            )
        return truncate

    def _check_embedded(self, ids: Sequence[int], param: str) -> None:
        self._vocabulary.check_embedded(ids, self._loaded.model.vocabulary, param)

    def _check_length(self, length: int, what: str, param: str) -> None:
        """
        Raises:
            ContextLengthExceeded: more than the model takes, or than there will ever be memory for.
        """
        context = self._loaded.context_length
        if length > context:
            raise ContextLengthExceeded.counted(
                length,
                context,
                of=what,
                advice="Please reduce the length, or have it cut with `truncate_prompt_tokens`: "
                "-1.",
                param=param,
            )
        if length > self._readable:
            raise ContextLengthExceeded.counted(
                length,
                self._readable,
                of=what,
                advice=f"To read them takes {sized(self._bytes_of(length))}. Beside the model's "
                f"weights the memory limit leaves {sized(self._room)}, enough for {self._readable} "
                "tokens. Shorten it, or have it cut with `truncate_prompt_tokens`: "
                f"{self._readable}.",
                param=param,
            )

    def _bytes_of(self, length: int) -> int:
        """Return the bytes that it takes to read a text of `length` tokens."""
        return self._loaded.model.working_bytes(1, length)

    def _check_dimensions(self, wanted: int | None) -> None:
        own, sentence = self._loaded.model.dimensions, self._loaded.sentence
        if wanted is None or wanted == own:
            return
        if not sentence.matryoshka:
            raise UnsupportedParameter(
                f"`dimensions`: the vectors of {self._loaded.id} have {own} numbers and can't be "
                "cut. (Its config.json does not say `is_matryoshka`.)",
                param="dimensions",
            )
        if wanted > own or (sentence.dimensions and wanted not in sentence.dimensions):
            allowed = ", ".join(map(str, sentence.dimensions)) or f"at most {own}"
            raise InvalidParameter(
                f"`dimensions` should be {allowed} with this model, not {wanted}.",
                param="dimensions",
            )

    # -- vectors -------------------------------------------------------------------------------

    async def _read(
        self,
        request: EmbeddingRequest | RerankRequest,
        rows: Sequence[Ids],
        seconds: Sequence[int | None],
        begun: Callable[[], None],
    ) -> list[Vector]:
        future: asyncio.Future[list[Vector]] = asyncio.get_running_loop().create_future()
        reading = Request(rows, seconds, future, begun, request.caller.key, request.priority)
        self._thread.post(partial(self._engine.submit, reading))
        try:
            return await future
        finally:
            if not future.done() or future.cancelled():
                self._thread.post(partial(self._engine.cancel, reading))

    def _finished(self, vectors: list[Vector], dimensions: int | None) -> tuple[array[float], ...]:
        kept = np.stack(vectors)[:, :dimensions]
        if self._loaded.sentence.normalize:
            kept = kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), SMALLEST)
        return floats(kept)


def activated(logits: Matrix, activation: Activation) -> Matrix:
    scores: Matrix
    match activation:
        case "sigmoid":
            scores = np.reciprocal(1 + np.exp(-logits))
        case "tanh":
            scores = np.tanh(logits)
        case "identity":
            scores = logits
    return scores


def floats(rows: Matrix) -> tuple[array[float], ...]:
    """
    Raises:
        GenerationFailed: a number is not finite, which JSON can't say.
    """
    wrong = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(wrong):
        raise GenerationFailed(
            f"For text {wrong[0]} the model computed what is no finite number; its weights may be "
            "damaged."
        )
    return tuple(array("f", row.tobytes()) for row in rows)
