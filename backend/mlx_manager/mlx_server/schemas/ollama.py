"""Wire types of Ollama's API, as its clients send them.

Source: Ollama's docs/api.md and the types of its official client (github.com/ollama/ollama-python).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from mlx_manager.mlx_server.limits import (
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)
from mlx_manager.mlx_server.schemas.openai import FunctionDefinition, Stop
from mlx_manager.mlx_server.schemas.sampling import CacheSalt, Speculation
from mlx_manager.mlx_server.schemas.wire import (
    Images,
    Many,
    ModelName,
    NonEmpty,
    Timed,
    Wire,
    choose,
    shape,
    text_or_list,
)

KeepAlive = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[float, Tag("<number>")],
    choose(
        lambda value: "<text>" if isinstance(value, str) else "<number>",
        "a number of seconds or a duration such as '5m'",
    ),
]
Format = Annotated[
    Annotated[Literal["", "json"], Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    choose(shape, "'json' or a JSON schema"),
]
Think = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[NonEmpty, Tag("<text>")],
    choose(
        lambda value: "<boolean>" if isinstance(value, bool) else shape(value),
        "true, false or an effort such as 'low', 'medium' or 'high'",
    ),
]


Streams = Annotated[bool, BeforeValidator(lambda value: True if value is None else value)]
"""Value of `stream`: true unless it is false; a null is the default."""


class OllamaOptions(Wire):
    """Sampling and limits of one answer."""

    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    num_predict: int | None = Field(None, ge=-2, description="Most tokens; -1, -2: the context")
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: int | None = Field(
        None, ge=-1, description="0 switches `repeat_penalty` off; it looks at all tokens otherwise"
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: int | None = None
    tfs_z: float | None = None
    typical_p: float | None = None
    cache_salt: CacheSalt | None = Field(
        None, description="Only requests with the same one find the prompt's prefix; not Ollama's"
    )
    speculation: Speculation | None = Field(
        None, description="off: write one token a step; not Ollama's"
    )

    # Options of Ollama's runner: accepted, and without effect here.
    numa: Any = None
    num_ctx: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_keep: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    embedding_only: Any = None
    penalize_newline: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None


class OllamaFunctionCall(Wire):
    """A past call. `arguments` is an object, or its JSON text."""

    name: str
    arguments: Annotated[
        Annotated[dict[str, Any], Tag("<object>")] | Annotated[str, Tag("<text>")],
        choose(shape, "an object"),
    ] = Field(default_factory=dict)
    index: int | None = None
    description: Any = None


class OllamaToolCall(Wire):
    id: str | None = None
    type: Any = None
    function: OllamaFunctionCall


class OllamaMessage(Wire):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Many[OllamaToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(Wire):
    type: Literal["function"] | None = "function"
    function: FunctionDefinition


class OllamaBody(Timed):
    """Fields that every request for an answer has. `stream` is on unless it is false."""

    model: ModelName | None = Field(None, description="Model id; `:latest` may follow")
    stream: Streams = Field(True, description="NDJSON, a line for each piece; off: one object")
    format: Format | None = Field(None, description="'json', or the JSON schema the answer fits")
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = Field(
        None, description="Time without use until the model is unloaded; 0: at once, -1: never"
    )
    think: Think | None = Field(None, description="Thinking on or off, or how much of it")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncate: Any = Field(None, description="No effect: a prompt that is too long is refused")
    shift: Any = Field(None, description="No effect: an answer ends at the model's context")


class OllamaChatRequest(OllamaBody):
    """`POST /api/chat`. Without messages it only loads the model."""

    messages: Many[OllamaMessage] | None = None
    tools: Many[OllamaTool] | None = None


class OllamaGenerateRequest(OllamaBody):
    """`POST /api/generate`. Without a prompt it only loads the model."""

    prompt: str | None = None
    suffix: str | None = Field(None, description="Text behind what is to be written")
    system: str | None = None
    template: str | None = Field(None, description="Refused: the model's own template is used")
    context: list[int] | None = Field(None, description="Refused: send messages to /api/chat")
    raw: bool | None = Field(None, description="The prompt as it is, without the chat template")
    images: Images | None = None
    width: Any = None
    height: Any = None
    steps: Any = None


class OllamaEmbedRequest(Timed):
    """`POST /api/embed`."""

    model: ModelName | None = None
    input: Annotated[
        Annotated[str, Tag("<text>")] | Annotated[Many[str], Tag("<list>")],
        choose(text_or_list, "a string or a list of strings"),
    ]
    truncate: bool | None = Field(None, description="false refuses a text that is too long")
    dimensions: int | None = Field(None, ge=1)
    keep_alive: KeepAlive | None = None
    options: OllamaOptions | None = None


class OllamaEmbeddingsRequest(Timed):
    """`POST /api/embeddings`, the older form for one text."""

    model: ModelName | None = None
    prompt: str
    keep_alive: KeepAlive | None = None
    options: OllamaOptions | None = None


class OllamaErrorBody(Wire):
    """Body of every answer that is not 2xx, and of an error inside a stream."""

    error: str


class OllamaModelRequest(Timed):
    """`POST /api/show`, `POST /api/pull`, `DELETE /api/delete`: a model by its name."""

    model: ModelName | None = None
    name: ModelName | None = Field(None, description="Older name of `model`")
    stream: Streams = True
    verbose: Any = Field(None, description="No effect")
    insecure: Any = Field(None, description="No effect")
