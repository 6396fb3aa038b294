"""Words with which rerankers answer, and the text in which a pair is put to them.

Source: Qwen3-Reranker's model card (its format and instruction); sentence-transformers 6.2,
`cross_encoder/modules/logit_score.py` and `base/modality.py` (the roles of a pair); vLLM's
`classifier_from_token`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_manager.mlx_server.errors import ModelLoadFailed, ModelNotSupported
from mlx_manager.mlx_server.models.adapters.template import RENDER_ERRORS
from mlx_manager.mlx_server.models.checkpoint.files import read_json
from mlx_manager.mlx_server.models.checkpoint.folder import ModelFolder
from mlx_manager.mlx_server.models.checkpoint.ranking import (
    ANSWERING,
    WORDS,
    is_generative,
    is_makers,
    logit_score,
)
from mlx_manager.mlx_server.models.checkpoint.sentence import BERT_LIMITS, optional

NO_AND_YES = ("no", "yes")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: "
)
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PROBES = ("zqinstructqz", "zqqueryqz", "zqdocumentqz")
"""Words by which is seen where a chat template puts instruction, query and document."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Tokens whose logits are a score: that of `yes`, less that of `no` if there is one."""

    yes: int
    no: int | None

    @property
    def ids(self) -> list[int]:
        return [self.yes] if self.no is None else [self.yes, self.no]


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """The text in which a query and a document are put to a model.

    plain: the texts before the query, before the document, and after it. instructed: the texts
    before an instruction, before the query, before the document, and after it; None if there is
    no place for one. instruction: the one that is used when a request has none; None: `plain`.
    """

    plain: tuple[str, str, str]
    instructed: tuple[str, str, str, str] | None
    instruction: str | None = None

    def before(self, query: str, instruction: str | None) -> str:
        """Return the text up to the document, with an instruction if there is a place for it."""
        asked = self.instruction if instruction is None else instruction
        if self.instructed is None or asked is None:
            return f"{self.plain[0]}{query}{self.plain[1]}"
        opening, to_query, to_document, _ = self.instructed
        return f"{opening}{asked}{to_query}{query}{to_document}"

    @property
    def after(self) -> str:
        """Return the text after the document."""
        return self.plain[2]


MAKERS = PairPrompt(
    (f"{JUDGE}{INSTRUCTION}\n<Query>: ", "\n<Document>: ", ANSWER),
    (JUDGE, "\n<Query>: ", "\n<Document>: ", ANSWER),
)
"""The format of Qwen3-Reranker's makers."""


def answers_of(folder: ModelFolder, tokenizer: Any, model_id: str) -> Answers | None:
    """Return the tokens of a reranker's answers; None if it has a head for its score.

    Raises:
        ModelNotSupported: its architecture is none whose tokens are known here.
        ModelLoadFailed: what names the tokens names none.
    """
    if not is_generative(folder):
        return None
    if folder.model_type not in ANSWERING:
        known = ", ".join(sorted(ANSWERING))
        raise ModelNotSupported(
            f"{model_id} is a {folder.model_type!r} reranker that answers with a word; of the "
            f"architectures {known} such rerankers can be served."
        )
    if (module := logit_score(folder)) is not None:
        own = read_json(module / "config.json")
        answers = Answers(own.get("true_token_id", -1), own.get("false_token_id"))
    else:
        words = folder.config.get(WORDS) or NO_AND_YES
        if isinstance(words, str) or not isinstance(words, Sequence) or len(words) != 2:
            raise ModelLoadFailed(
                f"{model_id} can't be loaded: its config.json has {WORDS} {words!r}; two tokens, "
                "for no and for yes, are expected."
            )
        no, yes = (token_of(word, tokenizer, model_id) for word in words)
        answers = Answers(yes, no)
    size = folder.config.get("vocab_size", 0)
    for token in answers.ids:
        if type(token) is not int or not 0 <= token < size:
            raise ModelLoadFailed(
                f"{model_id} can't be loaded: it is to answer with the token {token!r}, and by the "
                f"vocab_size of its config.json ids are below {size}."
            )
    return answers


def token_of(word: object, tokenizer: Any, model_id: str) -> int:
    """
    Raises:
        ModelLoadFailed: the tokenizer has no such token.
    """
    found = tokenizer.get_vocab().get(word)
    if found is None:
        raise ModelLoadFailed(
            f"{model_id} can't be loaded: its tokenizer has no token {word!r}, with which it is to "
            "answer."
        )
    return int(found)


def prompt_of(
    folder: ModelFolder, tokenizer: Any, default: str | None, model_id: str
) -> PairPrompt | None:
    """Return the text in which a pair is put to a reranker that is a decoder; None if its
    tokenizer puts a pair together.

    default: the instruction of requests that have none, if the model's authors name one.

    Raises:
        ModelNotSupported: it is a decoder, and nothing tells in which text.
    """
    if folder.model_type not in ANSWERING:
        return None
    if (own := of_template(folder, tokenizer)) is not None:
        return PairPrompt(own.plain, own.instructed, default)
    if is_generative(folder) or is_makers(folder):
        return PairPrompt(MAKERS.plain, MAKERS.instructed, default)
    raise ModelNotSupported(
        f"{model_id} is a {folder.model_type} reranker, and nothing tells in which text query and "
        "document are put to it: its chat template has no roles query and document, and neither "
        "its folder nor its config.json has the name Qwen3-Reranker."
    )


def of_template(folder: ModelFolder, tokenizer: Any) -> PairPrompt | None:
    """Return the text by the tokenizer's chat template; None if it has no place for a pair."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    limits = optional(folder.path / BERT_LIMITS)
    options = dict((limits.get("processing_kwargs") or {}).get("chat_template") or {})
    options.pop("restore_suffix", None)
    for content in (str, lambda text: [{"type": "text", "text": text}]):
        plain = rendered(tokenizer, options, content, PROBES[1:])
        if plain is None:
            continue
        instructed = rendered(tokenizer, options, content, PROBES)
        if instructed is not None and instructed[-1] != plain[-1]:
            instructed = None
        return PairPrompt(plain, instructed)  # type: ignore[arg-type]  # as many as there are gaps
    return None


def rendered(
    tokenizer: Any,
    options: Mapping[str, Any],
    content: Callable[[str], Any],
    probes: Sequence[str],
) -> tuple[str, ...] | None:
    """Return what a chat template puts around the probes; None unless each is there once, in
    order."""
    roles = ("system", "query", "document")[-len(probes) :]
    messages = [
        {"role": role, "content": content(probe)} for role, probe in zip(roles, probes, strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except RENDER_ERRORS:
        return None
    found = re.split("|".join(probes), text)
    in_order = re.findall("|".join(probes), text) == list(probes)
    return tuple(found) if in_order else None
