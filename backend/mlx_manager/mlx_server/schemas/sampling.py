"""Parameters of an answer that every protocol may state: how tokens are drawn, and how soon."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from mlx_manager.mlx_server.limits import MinP, Penalty, RepetitionPenalty, Temperature, TopK, TopP
from mlx_manager.mlx_server.schemas.wire import Many, Timed, Wire, choose, text_or_list

Speculation = Literal["auto", "off"]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]
CACHE_SALT = (
    "Text that is part of what a prompt's prefix is found by: only requests with the same one find "
    "it, so that others can't tell by the time that a prompt is known"
)


class PredictionPart(Wire):
    """A piece of a prediction; of type text only."""

    type: str
    text: str | None = None


PredictionContent = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Many[PredictionPart], Tag("<list>")],
    choose(text_or_list, "a string or a list of content parts"),
]


class Prediction(Wire):
    """Text that the answer is expected to be much like, such as a file that is to be changed."""

    type: Literal["content"]
    content: PredictionContent


class SamplingParameters(Timed):
    """OpenAI's parameters and those that other servers added to them.

    Each means one thing, so all protocols take all of them.
    """

    temperature: Temperature | None = Field(
        None, description="0 is greedy; default: the model's, or 1"
    )
    top_p: TopP | None = Field(None, description="Nucleus sampling; 1 is off")
    top_k: TopK | None = Field(None, description="Most likely tokens kept; 0 or -1 is off")
    min_p: MinP | None = Field(
        None, description="Least probability kept, relative to the best; 0 is off"
    )
    seed: int | None = Field(
        None, ge=-(2**63), le=2**63 - 1, description="Same seed, same draws; see Seeds"
    )
    presence_penalty: Penalty | None = Field(None, description="Over the output; default 0")
    frequency_penalty: Penalty | None = Field(None, description="Over the output; default 0")
    repetition_penalty: RepetitionPenalty | None = Field(
        None, description="Multiplicative, over prompt and output; 1 is off"
    )
    repeat_penalty: RepetitionPenalty | None = Field(
        None, description="llama.cpp's name of `repetition_penalty`"
    )
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="Token id to a bias from -100 to 100"
    )
    priority: int | None = Field(
        None, description="Lower goes first among waiting requests, and is paused last; default 0"
    )
    prediction: Prediction | None = Field(
        None, description="Text that the answer is expected to be much like, which makes it faster"
    )
    cache_salt: CacheSalt | None = Field(None, description=CACHE_SALT)
    speculation: Speculation | None = Field(
        None,
        description="off: write one token a step, even where several that are likely could be "
        "tried; the answer is the same",
    )
