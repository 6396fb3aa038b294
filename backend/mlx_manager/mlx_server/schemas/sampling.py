"""Parameters by which the tokens of an answer are drawn, as every protocol may state them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mlx_manager.mlx_server.limits import MinP, Penalty, RepetitionPenalty, Temperature, TopK, TopP
from mlx_manager.mlx_server.schemas.wire import Timed


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
