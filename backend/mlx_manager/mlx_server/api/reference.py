"""`docs/api.md`: every parameter, from the wire types and the tables of what is refused.

Run with `python -m mlx_manager.mlx_server.api.reference > docs/api.md`; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from mlx_manager.mlx_server.core import STRING_FORMATS
from mlx_manager.mlx_server.protocols import (
    embeddings,
    messages,
    ollama,
    parameters,
    responses,
    tokens,
)
from mlx_manager.mlx_server.protocols.dialects import Refusal
from mlx_manager.mlx_server.protocols.sse import dump
from mlx_manager.mlx_server.schemas import anthropic, openai
from mlx_manager.mlx_server.schemas import embeddings as embeddings_schemas
from mlx_manager.mlx_server.schemas import ollama as ollama_schemas
from mlx_manager.mlx_server.schemas import responses as responses_schemas

INTRODUCTION = """# Parameters

Every field of every body that asks something of a model: what it takes, and whether it is
honoured, has no effect, or is refused. Generated from the types that validate requests (`python -m
mlx_manager.mlx_server.api.reference`); a test fails when this page and they differ.

- A null means the default, everywhere.
- What a type such as `StreamOptions` holds is under that name in the server's `/openapi.json`, and
  so are the paths without a body, the admin API and the answers.
- What is wrong with a body is a 400 that names the field. A value out of its range (a number, a
  length) is a 422 in `/v1/chat/completions` and `/v1/completions`, unless
  `MLX_SERVER_VALIDATION_STATUS=400`.
- A refused field is a 400 that names it, unless its value asks for nothing ("allowed" below).
- A field of another endpoint, or of another server, that would change the answer is refused by
  name, too: each table is followed by those. A null or a value that asks for nothing is none, and
  neither is the same value beside the field's name here (`n_predict` beside `max_tokens`).
- Any other field that is in no table is accepted and named in the response header
  `x-unknown-fields` and in the log; with `MLX_SERVER_STRICT_FIELDS=true` it is refused.
- Half of a character in a string (`"\\ud83d"`) is U+FFFD.
- Fields marked "no effect" are hints that change nothing about the answer here.

## Forms

`response_format` and its kin hold the content of an answer to a form, token by token, from the end
of the thinking on. An answer that was cut by the token limit says so (`length`); every other one
fits. Schemas are JSON Schema as far as [llguidance](https://github.com/guidance-ai/llguidance)
knows it; what it can't hold an answer to (`not`, `if`, `dependencies`, most `oneOf`, look-around
in patterns) is refused with the reason. A property that the schema does not name may come twice,
and counts twice for `minProperties`. Blanks between JSON's tokens are one space, or one or two
line breaks with up to 20 blanks. The formats of strings that are enforced are {formats}; with
`strict` any other is refused, without it is an annotation, as JSON Schema has it. Properties come
in the schema's order. With `tools` the answer may be a call instead.

## Tools

`tool_choice` "required" and a named function are held to likewise: after the thinking comes a
call, in the model's own format, of a function that is offered, with arguments that fit its
parameters (a named function is called once, and so is any with `parallel_tool_calls` false). With
"auto" the text is free; if one of `tools` is `strict`, then from the marker that opens a call on,
its name and its arguments are held to the same (where calls are bare JSON, as Llama's, an object's
brace at the beginning of the answer is that marker). Once a call is held to its schema, it has no
parameters that the schema does not name, unless `additionalProperties` allows them or it names
none at all, and integers of 18 digits at most. Texts and lists are as long as the schema lets them
be: a model that does not end one runs into `max_tokens`, which comes back as `finish_reason`
"length".

Where arguments stand one by one (Qwen3-Coder, Seed-OSS, GLM, MiniMax, LongCat, DeepSeek V3.2, Kimi
K3, MiniCPM5, Muse Spark), text is written as it is and all else as JSON. What such a format has no
form for is refused by name: `anyOf`, `allOf` or `not` over all parameters at once, or over a text.
So are, for Gemma's, names with other than letters, digits, `_` and `-`, and for Python's (LFM2,
OLMo 3) names that are none in Python. Muse Spark's calls can't be `strict` with "auto". Python's
names of types ("dict", "float", "tuple", "any") are understood in parameters.

Tools that a provider runs (web search, file search, code interpreter, MCP, image generation, tool
search, computer use, shells, Anthropic's dated ones), and OpenAI's `custom` ones, can be offered:
they are left out, and named in the response header `x-ignored-tools` and in the log. To demand one
by `tool_choice`, or any call where nothing else is offered, is refused by name. What they did
before in a conversation (`web_search_call`, `mcp_call`, `server_tool_use`,
`web_search_tool_result` and their like) the model reads as text, without images and what is
encrypted. A tool of a type that nobody knows is refused. Where a search for tools is left out,
those that it would find are offered at once.

## Conversations

The model's own chat template renders them, and a variable that nobody sets, such as
`enable_thinking`, has the template's default. Messages come as they are where the template shows
all of them. Where it refuses some, or would leave a text out, as little as possible is changed:
neighbours of one role are joined and an empty message keeps the turns in order, text beside calls
becomes a message before them, results move to their calls, and system messages become part of what
the user says. Ids of calls are shortened where a template wants 9 characters. Arguments that are no
JSON object, as those that the token limit cut off, stay text, or one argument `arguments`. What a
template shows in no form is refused.

A model whose template has no place for tools (Gemma 2, Phi 3.5, R1's distilled models) is told of
them in the system message, and calls them in Hermes's form: `<tool_call>` around a JSON object.
Such calls are held to their tools' parameters as if these were `strict`, as far as they can be.

A template that dumps a tool's JSON Schema gets it unchanged. For one that prints types itself
(gpt-oss, Hermes, Gemma 4) references are inlined, and what it has no words for is put into the
description of the parameter or the tool, as JSON.

## Anthropic's messages

With `thinking.display` "omitted" the answer's thinking blocks have no text, and their signature
carries the thinking (it is no secret): a block that is sent back is read by the model again. With
"summarized", and without it, thinking is given as the model wrote it; there are no summaries. A
block without text that another server signed is left out of the conversation.

A tool with `defer_loading` is offered as soon as a `tool_reference` in a tool's result names it,
or a `tool_addition` in a message of role system; until then it is no part of the prompt. A
`tool_removal` takes any tool back. The model reads each of these as a line of text, and has the
tools that are offered at the end with its first message, as templates have it. What searches for
tools is a tool of the client's own; where one that Anthropic runs is offered
(`tool_search_tool_regex`, `tool_search_tool_bm25`), it is left out, and no tool is deferred.

Where `cache_control` stands anywhere in a request, the usage says in `cache_creation_input_tokens`
how many of the prompt's tokens were newly kept for reuse, up to its last full page. They are kept
all the same without it, and count as `input_tokens` then.

Of documents those that are plain text, or a list of texts, and search results are read as text,
each after its title and its context or source; images, PDFs, files and addresses are refused by
name, and so are citations where they are enabled.

Where `messages` ends with the assistant's, the answer goes on from there, and can't be held to a
format. Blanks at its end, which Anthropic refuses, are no error; the model sees them if its
template does not trim messages, as many do.

## Seeds

A draw depends on the seed and on the token's place in its answer, and on nobody else's. What a
model computes for a row is rounded otherwise in a batch than alone (by a hundred-thousandth on a
CPU, by more in bf16 on a GPU), so that a draw that lies at the border of two tokens can give the
other one, and what follows is another text. At temperature 0 that takes two tokens that are equally
likely to so many digits.

## Prompts that are too long

The message names both numbers, in the words that agents look for: "This model's maximum context
length is N tokens. However, your messages resulted in M tokens. Please reduce the length of the
messages." with the code `context_length_exceeded`, or "prompt is too long: M tokens > N maximum"
under `/v1/messages`. Of a text that is far too long only the beginning is counted, and M is
estimated from it.

## Log probabilities

They are the model's own, before temperature, penalties and masks; one that JSON has no number for
is -9999. With `echo` the prompt's tokens
have them too, the first null, and so has the token that ended the text.

## Responses that are kept

A response is kept unless `store` is false, and with it the items of its request and of its answer,
for the key that asked. `previous_response_id` goes on from all of them, and those before;
`{"type": "item_reference", "id": ...}` in `input` stands for one. It counts, and is listed
afterwards, as if it had been sent. What is not kept, or no longer (`DELETE`,
`MLX_SERVER_RESPONSE_STORE_DAYS`, `MLX_SERVER_RESPONSE_STORE_MB`), is a 404 that names it. An item
that is sent again with its id remains that of the response where it was first.

`include` of `GET /v1/responses/{id}` and its `/input_items` takes what the request's own does.
`reasoning.encrypted_content` is made for whatever was thought;
`message.output_text.logprobs` of a text that was kept without them is refused.

## Responses over a WebSocket

`/v1/responses` is a WebSocket, too, with the same keys, limits and log (`MLX_SERVER_WEBSOCKETS`; a
client reads 426 where it is off). Each frame of text is a request, `{"type": "response.create",
...}` with the fields of the body beside the type or in `response`; it is always streamed. Each
event comes back as a frame, and what fails before it begins as `{"type": "error", "status": ...,
"error": ..., "headers": ...}`. Frames are answered in their order; up to 16 may wait.
`{"type": "keepalive"}` breaks a long silence. `previous_response_id` goes on from the connection's
last response also where `store` was false; any other that is not kept is an error with the status
400 and the code `previous_response_not_found`: send the whole conversation then. With
`generate: false` the prompt is processed, so that the next one that begins alike finds it, and the
response is empty. To hang up cancels. A server that goes out of service finishes the response under
way, and closes with 1012. A frame may be as large as a body, `MLX_SERVER_MAX_BODY_MB`. A browser's
page may connect from the server's own origin and from `MLX_SERVER_CORS_ORIGINS`.

## Conversations that are summed up

`/v1/responses/compact`, an item `{"type": "compaction_trigger"}` at the end of `input`, and
`context_management` (`[{"type": "compaction", "compact_threshold": TOKENS}]`, by default three
quarters of the context) have the model sum a conversation up: in one pass that begins as the
conversation did, so that its prefix is found in the cache. The result is an item of type
`compaction`, whose `encrypted_content` is the summary in a form that this server reads again, as
text. It is no secret, and nothing is kept here. `compact` gives the user's newest messages before
it, as many as have about a quarter of the context in characters; a trigger gives the item alone;
`context_management` gives it before the answer, which is made from it, and counts both passes in
the usage. In a conversation with such an item all before the last one is left out, but for system
messages and the user's newest. A conversation that is too long for the pass itself loses its oldest
messages there, and the beginnings of texts if need be. A summary has up to 4096 tokens, or a
quarter of the context. One that another server made is refused.

## Compressed bodies

`Content-Encoding` may be gzip, deflate, br or zstd, or several of them. The limit of a body holds
for what is sent and for what becomes of it; another coding is refused by name.

## Ollama's API

`/api/chat` and `/api/generate` stream NDJSON unless `stream` is false; durations are in
nanoseconds. A name may end in `:latest`. `keep_alive` sets the time without use after which the
model is unloaded, until another request says otherwise; a pinned model stays. Without messages or
a prompt a request only loads the model, or unloads it with `keep_alive` 0. Of `options` those of
the sampling are honoured; those of Ollama's runner (`num_ctx`, `num_gpu`, `num_thread`, ...) have
no effect: a model keeps its own context. `mirostat`, `tfs_z` and `typical_p` are refused by name.
`/api/pull` and `DELETE /api/delete` are the owner's, as `/v1/admin` is. What only Ollama has
(`/api/create`, `/api/copy`, `/api/push`) is a 400.
"""


@dataclass(frozen=True, slots=True)
class Route:
    path: str
    body: type[BaseModel]
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    no_effect: frozenset[str] = frozenset()


ROUTES = (
    Route(
        "/v1/chat/completions",
        openai.ChatCompletionRequest,
        parameters.UNSUPPORTED_IN_CHAT,
        openai.NO_EFFECT,
    ),
    Route(
        "/v1/completions",
        openai.CompletionRequest,
        parameters.UNSUPPORTED_IN_COMPLETIONS,
        openai.NO_EFFECT,
    ),
    Route(
        "/v1/responses",
        responses_schemas.ResponsesRequest,
        responses.UNSUPPORTED,
        responses_schemas.NO_EFFECT,
    ),
    Route(
        "/v1/responses/input_tokens",
        responses_schemas.InputTokensRequest,
        responses.UNSUPPORTED_IN_COUNTING,
    ),
    Route(
        "/v1/responses/compact",
        responses_schemas.CompactRequest,
        responses.UNSUPPORTED_IN_COMPACTING,
        responses_schemas.NO_EFFECT_IN_COMPACTING,
    ),
    Route("/v1/messages", anthropic.MessagesRequest, messages.UNSUPPORTED, anthropic.NO_EFFECT),
    Route(
        "/v1/messages/count_tokens",
        anthropic.CountTokensRequest,
        messages.UNSUPPORTED_IN_COUNTING,
        no_effect=anthropic.NO_EFFECT & anthropic.CountTokensRequest.model_fields.keys(),
    ),
    Route(
        "/v1/embeddings",
        embeddings_schemas.EmbeddingsRequest,
        embeddings.UNSUPPORTED_IN_EMBEDDINGS,
        no_effect=embeddings_schemas.NO_EFFECT,
    ),
    Route(
        "/v1/rerank",
        embeddings_schemas.RerankRequest,
        embeddings.UNSUPPORTED_IN_RERANK,
        embeddings_schemas.NO_EFFECT,
    ),
    Route("/v1/tokenize", openai.TokenizeRequest, tokens.UNSUPPORTED_IN_TOKENIZE),
    Route("/v1/detokenize", openai.DetokenizeRequest),
    Route("/v1/apply-template", openai.PromptRequest, tokens.UNSUPPORTED_IN_TEMPLATES),
    Route("/api/chat", ollama_schemas.OllamaChatRequest),
    Route("/api/generate", ollama_schemas.OllamaGenerateRequest, ollama.UNSUPPORTED_IN_GENERATE),
    Route("/api/embed", ollama_schemas.OllamaEmbedRequest),
    Route("/api/embeddings", ollama_schemas.OllamaEmbeddingsRequest),
    Route("/api/show", ollama_schemas.OllamaModelRequest),
    Route("/api/pull", ollama_schemas.OllamaModelRequest),
)


def page() -> str:
    """The whole page, in Markdown."""
    names = ", ".join(f"`{name}`" for name in sorted(STRING_FORMATS))
    parts = [INTRODUCTION.replace("{formats}", names)]
    for route in ROUTES:
        parts.append(f"\n## `POST {route.path}`\n\n| Field | Takes | |\n|---|---|---|\n")
        parts += _rows(route)
        parts += _foreign(route)
    return "".join(parts)


def _rows(route: Route) -> Iterator[str]:
    schema = route.body.model_json_schema()
    order = {"honoured": 0, "no effect": 1, "refused": 2}
    entries = [(_status(name, route), name, found) for name, found in schema["properties"].items()]
    entries.sort(key=lambda entry: order[entry[0]])
    required = schema.get("required", ())
    for status, name, found in entries:
        needed = " (required)" if name in required else ""
        takes = "" if status == "no effect" else _takes(found)
        yield f"| `{name}`{needed} | {takes} | {_meaning(status, name, found, route)} |\n"


def _foreign(route: Route) -> Iterator[str]:
    """Yield what is refused though the body's type does not have it, grouped by what to use."""
    groups: dict[str, list[str]] = {}
    for name, refusal in route.refused.items():
        if name not in route.body.model_fields:
            groups.setdefault(refusal.instead, []).append(f"`{name}`")
    if groups:
        yield "\nRefused by name, since they mean something elsewhere:\n\n"
    for instead, names in sorted(groups.items(), key=lambda group: (not group[0], group[0])):
        yield f"- {', '.join(sorted(names))}{f': {instead}' if instead else ''}\n"


def _status(name: str, route: Route) -> str:
    if name in route.refused:
        return "refused"
    return "no effect" if name in route.no_effect else "honoured"


def _meaning(status: str, name: str, schema: Mapping[str, Any], route: Route) -> str:
    said = schema.get("description", "").replace("|", "\\|")
    if status != "refused":
        return said if said or status == "honoured" else "No effect"
    refusal = route.refused[name]
    allowed = ", ".join(f"`{dump(value)}`" for value in refusal.harmless)
    parts = [
        "**refused**",
        f" (allowed: {allowed})" if allowed else "",
        f": {said}" if said else "",
    ]
    instead = f". {refusal.instead}" if refusal.instead else ""
    return "".join(parts) + instead


def _takes(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words."""
    match schema:
        case {"anyOf": branches} | {"oneOf": branches}:
            named = [_takes(branch) for branch in branches if branch.get("type") != "null"]
            said = " or ".join(dict.fromkeys(filter(None, named)))
        case {"$ref": name}:
            said = f"`{name.rpartition('/')[2]}`"
        case {"enum": values}:
            said = ", ".join(f"`{value}`" for value in values)
        case {"const": value}:
            said = f"`{value}`"
        case {"type": "array", "items": items}:
            most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
            said = f"list of {_takes(items) or 'anything'}{most}"
        case {"type": kind}:
            said = f"{kind}{_range(schema)}"
        case _:
            said = ""
    return said


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    parts = [
        f"≥ {low}" if low is not None else "",
        f"> {above}" if above is not None else "",
        f"≤ {high}" if high is not None else "",
        f"< {below}" if below is not None else "",
    ]
    said = ", ".join(filter(None, parts))
    return f" {said}" if said else ""


if __name__ == "__main__":
    print(page(), end="")
