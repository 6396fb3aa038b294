"""What the parameters of sampling may be, wherever they are said: in a request of any protocol, and
in the models' file; and how many tokens a request may ask for.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

LARGEST_TOP_K = 2**31 - 1
"""More than any vocabulary has."""


LARGEST_MAX_TOKENS = 2**63 - 1
"""More than any context has. What is beyond, counters and traces can't hold."""


def _kept(top_k: int) -> int:
    return min(max(top_k, 0), LARGEST_TOP_K)


UNLIMITED = -1
"""As many tokens as the context has room for, as llama.cpp and LM Studio say it."""


def _counted(max_tokens: int) -> int:
    return min(max_tokens, LARGEST_MAX_TOKENS)


Finite = Annotated[float, Field(allow_inf_nan=False)]

Temperature = Annotated[Finite, Field(ge=0, le=2)]
TopP = Annotated[Finite, Field(ge=0, le=1)]
"""0 leaves the most likely token, as OpenAI's description allows; vLLM refuses it."""
TopK = Annotated[int, Field(ge=-1), AfterValidator(_kept)]
"""-1 means what 0 does, as in vLLM."""
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
"""0 where a prompt may be echoed alone."""


# ---------------------------------------------------------------------------------------------
# Forms that answers are held to
# ---------------------------------------------------------------------------------------------

MOST_SCHEMA = 2**19
"""Characters of a JSON schema."""
MOST_GRAMMAR = 2**18
"""Characters of a grammar, or of all options of a choice."""
MOST_PATTERN = 2**14
"""Characters of a regular expression, and of a terminal with all that it refers to: a mask takes
time with the square of that, up to 0.2 s."""
DEEPEST = 128
"""Schemas, rules or terminals of which each refers to the next. One takes up to 5 kB of a stack."""
COMPILE_SECONDS = 3.0
"""Seconds of processor time in which a process of its own compiles and tries a form."""
COMPILE_MEMORY = 256 * 2**20
"""Bytes that it may take meanwhile."""
