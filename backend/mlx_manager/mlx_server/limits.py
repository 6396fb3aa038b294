"""Limits of the sampling parameters, in requests of any protocol and in the models' file; limits of
the tokens that a request may ask for, and of the forms that answers are constrained to.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

LARGEST_TOP_K = 2**31 - 1
"""Largest `top_k` that is kept, more than any vocabulary has."""


LARGEST_MAX_TOKENS = 2**63 - 1
"""Largest token limit that is kept, more than any context has: counters and traces can't hold
more."""


def _kept(top_k: int) -> int:
    return min(max(top_k, 0), LARGEST_TOP_K)


UNLIMITED = -1
"""Value for as many tokens as the context has room for, as in llama.cpp and LM Studio."""


def _counted(max_tokens: int) -> int:
    return min(max_tokens, LARGEST_MAX_TOKENS)


Finite = Annotated[float, Field(allow_inf_nan=False)]

Temperature = Annotated[Finite, Field(ge=0, le=2)]
TopP = Annotated[Finite, Field(ge=0, le=1)]
"""0 leaves the most likely token, as OpenAI's description allows; vLLM refuses it."""
TopK = Annotated[int, Field(ge=-1), AfterValidator(_kept)]
"""-1 has the meaning of 0, as in vLLM."""
MinP = Annotated[Finite, Field(ge=0, le=1)]
Penalty = Annotated[Finite, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[Finite, Field(gt=0)]
"""Without an upper limit, as in vLLM and Transformers; SGLang's is 2."""

MaxTokens = Annotated[int, Field(ge=1), AfterValidator(_counted)]


def _limited(max_tokens: int) -> int:
    if max_tokens == 0:
        raise PydanticCustomError("greater_than_equal", "Input should be at least 1, or -1")
    return max_tokens


MaxTokensOrUnlimited = Annotated[
    int, Field(ge=UNLIMITED), AfterValidator(_counted), AfterValidator(_limited)
]
MaxTokensOrZero = Annotated[int, Field(ge=UNLIMITED), AfterValidator(_counted)]
"""Token limit where 0 is allowed, for a prompt that is echoed alone."""


# ---------------------------------------------------------------------------------------------
# Forms that answers are constrained to
# ---------------------------------------------------------------------------------------------

MOST_SCHEMA = 2**19
"""Most characters of a JSON schema."""
MOST_GRAMMAR = 2**18
"""Most characters of a grammar, or of all options of a choice."""
MOST_PATTERN = 2**14
"""Most characters of a regular expression, and of a terminal with all that it refers to: the time
of a mask grows with the square of them, up to 0.2 s."""
DEEPEST = 128
"""Longest chain of schemas, rules or terminals of which each refers to the next. One of them takes
up to 5 kB of a stack."""
COMPILE_SECONDS = 3.0
"""Most CPU seconds of the process that compiles and tries a form."""
COMPILE_MEMORY = 256 * 2**20
"""Most bytes that this process may take."""
