"""Models' tokenizers: read from their folders, and kept when the models go.

To make one of 128,000 tokens takes 0.3 to 1 s, and every stream stands still for as long as
Python's lock is held meanwhile: up to 50 ms at a time for a BPE, which is made in pieces (`bpe`),
and 0.2 s for others. So as many are kept as models may be loaded, the most recently used ones, some
60 MB each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

from mlx_lm import tokenizer_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _tokenizer_defaults, load_config, load_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mlx_manager.mlx_server.models.bpe import Made, in_pieces
from mlx_manager.mlx_server.models.files import read_json
from mlx_manager.mlx_server.models.folder import check_regular
from mlx_manager.mlx_server.models.weight_files import WEIGHTS
from mlx_manager.mlx_server.utils.bare import BareErrors

T = TypeVar("T")
Stamp = tuple[tuple[str, int, int], ...]
TEMPLATES = "additional_chat_templates"
"""The folder of a model's other templates."""


class Tokenizers:
    """Reads tokenizers, and keeps `most` of them. Any thread may ask.

    Models of one folder share theirs. A folder whose files have changed is read again.

    trust_remote_code: whether code that comes with a model may make its tokenizer.
    """

    def __init__(self, most: int = 0, *, trust_remote_code: bool = False) -> None:
        self._most = most
        self._trust = trust_remote_code
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._reading: dict[tuple[Any, ...], Lock] = {}
        self._lock = Lock()

    @property
    def full(self) -> bool:
        """Whether one more would make another go."""
        return len(self._kept) >= self._most

    def text(self, folder: Path) -> TokenizerWrapper:
        """A text model's.

        Raises:
            ValueError, OSError, ...: what the libraries raise over files that they can't read.
        """
        return self._of(folder, partial(read_tokenizer, folder, self._trust))

    def encoder(self, folder: Path) -> PreTrainedTokenizerBase:
        """An embedding model's or reranker's; raises what `text` does."""
        return self._of(folder, partial(read_encoders, folder, self._trust))

    def _of(self, folder: Path, read: partial[T]) -> T:
        check_regular(folder)
        key = (read.func, folder, stamp(folder))
        with self._lock:
            reading = self._reading.setdefault(key, Lock())
        # Of this key alone: a file that is never read must hold up nobody else.
        with reading:
            with self._lock:
                made: T | None = self._kept.get(key)
            made = read() if made is None else made
            with self._lock:
                self._kept[key] = made
                self._kept.move_to_end(key)
                self._reading.pop(key, None)
                while len(self._kept) > self._most:
                    self._kept.popitem(last=False)
        return made


def stamp(folder: Path) -> Stamp:
    """Of a folder's files, weights aside: name, bytes, and when it was written (ns)."""
    files = [file for place in (folder, folder / TEMPLATES) for file in place.glob("*")]
    found = [(file, file.stat()) for file in files if file.is_file() and not file.match(WEIGHTS)]
    return tuple(sorted((str(file), of.st_size, of.st_mtime_ns) for file, of in found))


UNREADABLE = BareErrors(f"tokenizers {version('tokenizers')} can't read its tokenizer.json")


@UNREADABLE
def read_tokenizer(folder: Path, trust_remote_code: bool) -> TokenizerWrapper:
    options = {"trust_remote_code": trust_remote_code, **processors_template(folder)}
    end = load_config(folder).get("eos_token_id")
    with in_pieces(folder, options) as made:
        if made is not None:
            return wrapped(made, end, _tokenizer_defaults(folder))
    return load_tokenizer(folder, options, eos_token_ids=end)


@UNREADABLE
def read_encoders(folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    options = {"trust_remote_code": trust_remote_code}
    with in_pieces(folder, options) as made:
        if made is not None:
            return made.tokenizer
    return AutoTokenizer.from_pretrained(folder, **options)  # nosec B615  # a folder on disk


def wrapped(made: Made, end: object, defaults: Mapping[str, Any] | None) -> TokenizerWrapper:
    """What mlx-lm makes of a tokenizer: its own code, to which AutoTokenizer is whoever has it."""
    having = SimpleNamespace(from_pretrained=lambda *_: made.tokenizer)
    names = {**vars(tokenizer_utils), "AutoTokenizer": having}
    load = FunctionType(
        tokenizer_utils.load.__code__, names, argdefs=tokenizer_utils.load.__defaults__
    )
    wrapper: TokenizerWrapper = load(made.folder, eos_token_ids=end, defaults=defaults)
    return wrapper


def processors_template(folder: Path) -> Mapping[str, Any]:
    """The chat template of chat_template.json, where models that also see used to have their only
    one and which transformers reads for those alone."""
    file, settings = folder / "chat_template.json", folder / "tokenizer_config.json"
    if not file.is_file() or (folder / "chat_template.jinja").is_file():
        return {}
    if settings.is_file() and "chat_template" in read_json(settings):
        return {}
    return {"chat_template": read_json(file).get("chat_template")}
