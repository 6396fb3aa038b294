"""Tokenizers of BPE vocabularies, made in pieces between which other threads have their turn.

Python's lock is held to the end while `tokenizers` reads a tokenizer.json (0.2 s for 128,000
tokens), while `json` does, and while a dictionary of all tokens is made. So the file is taken apart
here; transformers makes the tokenizer of a folder whose tokenizer.json has its special tokens
alone; and the vocabulary is put under it then, by the one call that has to hold the lock, for a
fifth of the time.

Where what comes of that folder shows that more than these tokens would have been needed, or that
its class makes something of its own of what stands in the file, all is left to transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mlx_manager.mlx_server.utils.bare import BareErrors
from mlx_manager.mlx_server.utils.steps import BROKEN

FILE = "tokenizer.json"
TURN = 500
"""Tokens, or merges, that are handed over between two turns of others."""
OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
"""What a BPE is besides its vocabulary and merges."""
NAMING = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that name tokens."""
LARGE = 100_000
MENDED = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
"""Kinds of models whose tokenizers of more tokens transformers looks at once more, and may mend."""

_STRING = r'"(?:[^"\\]|\\.)*"'
# `scanner` is missing in the types of `re`; unlike `match` in a loop it makes no call for each.
_TOKEN: Any = re.compile(rf"\s*({_STRING})\s*:\s*(\d+)\s*([,}}])")
_MERGE: Any = re.compile(rf"\s*(?:({_STRING})|\[\s*({_STRING})\s*,\s*({_STRING})\s*\])\s*([,\]])")
_NOTHING = re.compile(r"\s*\]")


@dataclass(frozen=True, slots=True)
class Parts:
    """A tokenizer.json.

    rest: what it has besides, with nothing in the places of these two.
    """

    vocab: Mapping[str, int]
    merges: Sequence[tuple[str, str]]
    rest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Made:
    """folder: like the tokenizer's own, but for a tokenizer.json that has few of its tokens."""

    tokenizer: PreTrainedTokenizerBase
    folder: Path


@contextmanager
def in_pieces(folder: Path, options: Mapping[str, Any]) -> Iterator[Made | None]:
    """The tokenizer that `AutoTokenizer.from_pretrained` makes of a folder and these options; None
    if it has to be asked itself. Code of the folder's own is never run.

    Within the block the tokenizer tells its tokens without making a dictionary of them anew.
    """
    with ExitStack() as stack:
        made = None
        # AutoTokenizer has its own words for what is wrong, if anything is.
        with suppress(*BROKEN), BareErrors("tokenizers can't read it"):
            made = _made(folder, options, stack)
        yield made


def _made(folder: Path, options: Mapping[str, Any], stack: ExitStack) -> Made:
    """
    Raises:
        ValueError, OSError, ...: it can't be made so.
    """
    if options.get("trust_remote_code"):
        raise ValueError("code of the folder's own may make it")
    parts = taken_apart((folder / FILE).read_text(encoding="utf-8"))
    if len(parts.vocab) + len(parts.rest["added_tokens"]) > LARGE and mended(folder):
        raise ValueError("transformers may mend it for its size")
    shown = special_tokens(parts, folder)
    place = stack.enter_context(with_fewer(folder, parts, shown))
    tokenizer = AutoTokenizer.from_pretrained(place, **options)  # nosec B615  # a folder on disk
    put_under(tokenizer, parts, shown)
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = str(folder)
    all_tokens = {**parts.vocab, **tokenizer.get_added_vocab()}
    tokenizer.get_vocab = lambda: all_tokens
    stack.callback(delattr, tokenizer, "get_vocab")
    return Made(tokenizer, place)


# ---------------------------------------------------------------------------------------------
# The file
# ---------------------------------------------------------------------------------------------


def taken_apart(text: str) -> Parts:
    """
    Raises:
        ValueError: it is not a BPE's tokenizer.json, or not JSON.
    """
    if '"BPE"' not in text:
        raise ValueError("not a BPE")
    begin = _past(text, 0, "vocab", "{")
    vocab, end = _vocabulary(text, begin)
    first = _past(text, end, "merges", "[")
    merges, last = _merges(text, first)
    rest = json.loads(text[:begin] + text[end:first] + text[last:])
    match rest:
        case {"model": {"type": "BPE", "vocab": {} as none, "merges": []}} if not none:
            return Parts(vocab, merges, rest)
    raise ValueError("not a BPE, or one in another form")


def _past(text: str, start: int, key: str, bracket: str) -> int:
    """Where the value of that key begins, past its bracket.

    Quotes within a string are escaped: `"key"` is never a part of one.
    """
    opening = re.compile(rf"\s*:\s*\{bracket}")
    while (start := text.find(f'"{key}"', start)) >= 0:
        start += len(key) + 2
        if opened := opening.match(text, start):
            return opened.end()
    raise ValueError(f"no {key}")


def _vocabulary(text: str, begin: int) -> tuple[dict[str, int], int]:
    """And where its closing bracket is."""
    vocab: dict[str, int] = {}
    for token in iter(_TOKEN.scanner(text, begin).match, None):
        vocab[_string(token[1])] = int(token[2])
        if token[3] == "}":
            return vocab, token.end() - 1
    raise ValueError("a vocabulary in another form")


def _merges(text: str, begin: int) -> tuple[list[tuple[str, str]], int]:
    merges: list[tuple[str, str]] = []
    if none := _NOTHING.match(text, begin):
        return merges, none.end() - 1
    for merge in iter(_MERGE.scanner(text, begin).match, None):
        if merge[1] is not None:
            a, b = _string(merge[1]).split(" ")
        else:
            a, b = _string(merge[2]), _string(merge[3])
        merges.append((a, b))
        if merge[4] == "]":
            return merges, merge.end() - 1
    raise ValueError("merges in another form")


def _string(quoted: str) -> str:
    if "\\" in quoted:
        text: str = json.loads(quoted)
        return text
    return quoted[1:-1]


# ---------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------


def mended(folder: Path) -> bool:
    """Whether transformers would look at what a large tokenizer cuts texts by, and may mend it."""
    kind = _content(folder / "config.json").get("model_type")
    return kind in MENDED or "fix_mistral_regex" in _content(folder / NAMING[0])


def special_tokens(parts: Parts, folder: Path) -> dict[str, int]:
    """Of the vocabulary what may be asked for before it is there, and all tokens added to it.

    Raises:
        ValueError: an added token's id is not the one it would be given.
    """
    named = {parts.rest["model"].get("unk_token")}
    named.update(text for name in NAMING for text in _texts(_content(folder / name)))
    shown = {
        token: number
        for token, number in parts.vocab.items()
        if token in named or token[:1] in {"<", "["} or token[-1:] in {">", "]"}
    }
    highest = -1
    for added in parts.rest["added_tokens"]:
        number = parts.vocab.get(added["content"], max(highest + 1, len(parts.vocab)))
        if number != added["id"]:
            raise ValueError(f"{added['content']} is no. {number}")
        shown[added["content"]] = number
        highest = max(highest, number)
    return shown


def _content(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _texts(value: object) -> Iterator[str]:
    """All texts in some JSON, keys included."""
    match value:
        case str():
            yield value
        case dict():
            yield from value
            yield from _texts(list(value.values()))
        case list():
            for item in value:
                yield from _texts(item)


@contextmanager
def with_fewer(folder: Path, parts: Parts, shown: Mapping[str, int]) -> Iterator[Path]:
    """A folder as the model's own, whose tokenizer.json has these tokens, and no merges."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        place = Path(name)
        for file in folder.iterdir():
            if file.name != FILE:
                (place / file.name).symlink_to(file.resolve())
        model = {**parts.rest["model"], "vocab": shown}
        (place / FILE).write_text(json.dumps({**parts.rest, "model": model}), encoding="utf-8")
        yield place


def put_under(tokenizer: PreTrainedTokenizerBase, parts: Parts, shown: Mapping[str, int]) -> None:
    """Give a tokenizer that was made with the shown tokens alone all of its vocabulary.

    Raises:
        ValueError: it is none of a BPE with these tokens, or others have been added to it.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("it is not one of the library tokenizers")
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.to_str())
    model = state["model"]
    if model["type"] != "BPE" or model["vocab"] != shown or model["merges"]:
        raise ValueError("its class makes something else of the vocabulary")
    if any(shown.get(added["content"]) != added["id"] for added in state["added_tokens"]):
        raise ValueError("tokens have been added to it")
    backend.model = models.BPE(
        vocab={token: _with_turns(n, i) for i, (token, n) in enumerate(parts.vocab.items())},
        merges=_Merges(parts.merges),
        **{name: model[name] for name in OPTIONS if model[name] is not None},
    )


class _Number:
    """One that others have their turn before it is told."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __index__(self) -> int:
        sleep(0)
        return self._number


def _with_turns(number: int, place: int) -> Any:
    return number if place % TURN else _Number(number)


class _Merges(Sequence[tuple[str, str]]):
    """Whoever goes through them gives others their turn meanwhile."""

    def __init__(self, merges: Sequence[tuple[str, str]]) -> None:
        self._merges = merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, place: Any) -> Any:
        return self._merges[place]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for place, merge in enumerate(self._merges):
            if place % TURN == 0:
                sleep(0)
            yield merge
