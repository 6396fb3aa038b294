"""Token batches for training: texts, tokenised, bucketed by length, with the loss mask."""

from __future__ import annotations

import multiprocessing
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from corpus import CUT, texts
from numpy.typing import NDArray
from tokenizers import Tokenizer

LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
SHARD_TEXTS = 8192

# Per bucket: ids (texts, length) uint16, and where the loss counts (texts, length) bool.
Rows = tuple[NDArray[np.uint16], NDArray[np.bool_]]


@lru_cache(maxsize=1)
def _tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def loss_mask(ids: NDArray[np.uint16], tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """True where a token is the assistant's (its `<|eot_id|>` with it), or a document's."""
    header = tokenizer.token_to_id("<|start_header_id|>")
    eot = tokenizer.token_to_id("<|eot_id|>")
    assistant = tokenizer.token_to_id("assistant")
    mask = np.zeros(len(ids), dtype=bool)
    headers = np.flatnonzero(ids == header)
    if not len(headers):
        mask[1:] = True
        return mask
    ends = np.flatnonzero(ids == eot)
    for start, end in zip(headers, ends, strict=True):
        if ids[start + 1] == assistant:
            mask[start + 4 : end + 1] = True
    return mask


def shard(model: Path, seed: int) -> dict[int, Rows]:
    """One shard's rows by padded length. Texts beyond the longest bucket are left out."""
    tokenizer = _tokenizer(model)
    pad = tokenizer.token_to_id("<|finetune_right_pad_id|>")
    grouped: dict[int, list[NDArray[np.uint16]]] = defaultdict(list)
    for text in texts(seed, SHARD_TEXTS):
        parts = tokenizer.encode_batch(text.split(CUT), add_special_tokens=False)
        ids = np.array([token for part in parts for token in part.ids], dtype=np.uint16)
        length = next((n for n in LENGTHS if len(ids) <= n), None)
        if length is not None:
            grouped[length].append(ids)
    rows: dict[int, Rows] = {}
    for length, group in grouped.items():
        ids = np.full((len(group), length), pad, dtype=np.uint16)
        mask = np.zeros((len(group), length), dtype=bool)
        for row, text in enumerate(group):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = loss_mask(text, tokenizer)
        rows[length] = (ids, mask)
    return rows


def batches(model: Path, first_seed: int, tokens: int, workers: int) -> Iterator[Rows]:
    """Endless batches of about `tokens` tokens; the same first seed gives the same ones.

    Every batch holds rows of one bucket, so that few shapes are compiled and little is padded.
    """
    rng = random.Random(first_seed)
    waiting: dict[int, list[Rows]] = defaultdict(list)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for rows in pool.imap(partial(shard, model), range(first_seed, first_seed + 100_000)):
            ready: list[Rows] = []
            for length, group in rows.items():
                waiting[length].append(group)
                ids, mask = (np.concatenate(part) for part in zip(*waiting[length], strict=True))
                size = max(1, tokens // length)
                whole = len(ids) // size * size
                ready += [
                    (ids[at : at + size], mask[at : at + size]) for at in range(0, whole, size)
                ]
                waiting[length] = [(ids[whole:], mask[whole:])]
            rng.shuffle(ready)
            yield from ready
