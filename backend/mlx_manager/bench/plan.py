"""Plan of a load test, made before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from mlx_manager.pictures import PictureFile

MARK = 8
"""Bytes that tell a request's picture from others'."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load.

    url: without `/v1`. requests: how many; None with `duration`, in seconds, after which none is
    begun. concurrency: most requests under way. rate: arrivals a second, at random as people's are
    (a Poisson process); None: the next follows as soon as one ends. prompt_tokens, output_tokens:
    of each request. warmup: requests before, which do not count. timeout: seconds for one answer.
    extra: fields of every body; None removes one of ours. images: pictures of which each request
    has one, at random.
    """

    url: str
    model: str
    key: str | None
    requests: int | None
    duration: float | None
    concurrency: int
    rate: float | None
    prompt_tokens: int
    output_tokens: int
    warmup: int
    timeout: float
    seed: int
    extra: dict[str, Any] = field(default_factory=dict)
    images: tuple[PictureFile, ...] = ()

    def body(self, random: Random, words: int, output_tokens: int) -> dict[str, Any]:
        """Return a request of random words.

        Its picture, if any, is marked behind its file's end: as of the words, nothing is cached.
        """
        content: str | list[dict[str, Any]] = random_text(random, words)
        if self.images:
            shown = random.choice(self.images).part(random.randbytes(MARK))  # nosec B311
            content = [shown, {"type": "text", "text": content}]
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    def pauses(self) -> Iterator[float]:
        """Seconds before each request."""
        if self.rate is None:
            while True:
                yield 0.0
        random = Random(self.seed)  # nosec B311  # draws a load
        while True:
            yield random.expovariate(self.rate)


WORDS = tuple(
    """
    time year people way day man thing woman life child world school state family student group
    country problem hand part place case week company system program question work government
    number night point home water room mother area money story fact month lot right study book eye
    job word business issue side kind head house service friend father power hour game line end
    member law car city community name president team minute idea body information back
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class TextLength:
    """Estimated tokens of a random prompt: `overhead` of the template, and `per_word` a word."""

    overhead: float
    per_word: float

    @staticmethod
    def measured(few: tuple[int, int], many: tuple[int, int]) -> TextLength:
        """Return the estimate from two prompts, each (words, tokens).

        `USUAL` if the longer prompt has no more tokens than the shorter.
        """
        per_word = (many[1] - few[1]) / (many[0] - few[0])
        if per_word <= 0:
            return USUAL
        return TextLength(few[1] - few[0] * per_word, per_word)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead) / self.per_word))


USUAL = TextLength(0, 1.33)
"""Estimate where the server does not state the tokens of a prompt."""


def random_text(random: Random, words: int) -> str:
    """Return random words. Two texts differ from the first word on, so that no prefix is cached."""
    return " ".join(random.choices(WORDS, k=words))  # nosec B311  # words of a prompt
