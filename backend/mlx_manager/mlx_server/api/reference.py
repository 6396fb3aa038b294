"""`docs/api.md`: every parameter, from the wire types and the tables of what is refused.

Run with `python -m mlx_manager.mlx_server.api.reference > docs/api.md`; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from mlx_manager.mlx_server import limits
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

This page lists every field of every request body that asks something of a model: its values, and
whether the field is honoured, has no effect, or is refused. The page is generated from the types
that validate requests (`python -m mlx_manager.mlx_server.api.reference`), and a test fails when
the two differ.

- A null means the default, everywhere.
- The server's `/openapi.json` describes types such as `StreamOptions` under their names, and also
  the paths without a body, the admin API and the answers.
- A body that is wrong is a 400 that names the field. A value out of its range (a number, a length)
  is a 422 in `/v1/chat/completions` and `/v1/completions`, unless
  `MLX_SERVER_VALIDATION_STATUS=400`.
- A refused field is a 400 that names it, unless its value asks for nothing ("allowed" below).
- A field of another endpoint or another server is refused by name if it would change the answer;
  each table is followed by these fields. They are accepted where they ask for nothing, or have the
  same value as this endpoint's own field (`n_predict` beside `max_tokens`).
- Any other field that is in no table is accepted and named in the response header
  `x-unknown-fields` and in the log; with `MLX_SERVER_STRICT_FIELDS=true` it is refused.
- Half of a character in a string (`"\\ud83d"`) is U+FFFD.
- Fields marked "no effect" are hints that change nothing about the answer here.

## Forms

`response_format` and similar fields restrict the content of an answer to a form. The restriction
applies to each token from the end of the thinking on. Every answer fits its form, except one that
was cut by the token limit, whose finish reason is `length`. With `tools` the answer may be a call
instead.

Schemas are JSON Schema as far as [llguidance](https://github.com/guidance-ai/llguidance) knows it.
It can't enforce `not`, `if`, `dependencies`, `uniqueItems`, look-around in patterns, addresses in
`$ref`, unknown formats, and of most `oneOf` that a value fits only one branch. If the schema is
`strict`, a request with any of these is refused with the reason. Otherwise everything else is
enforced, and the response header `x-schema-not-enforced` names once each what is not (a stream that
begins with a sign of life has no such header). Properties come in the schema's order. A property
that the schema does not name may come twice, and counts twice for `minProperties`. Between two
tokens of JSON the model may write one space, or one or two line breaks with up to 20 spaces. These
formats of strings are enforced: {formats}.

A schema may have {schema} characters. A grammar, or all options of a choice together, may have
{grammar}; a regular expression may have {pattern}, and so may a terminal of a grammar with all that
it refers to. At most {deepest} schemas, rules or terminals may be nested in each other, counting
what they refer to. Each form is compiled by another process first, which gets {seconds} s of the
processor and {memory} MiB. A form beyond any of these limits is refused by name.

## Tools

With `tool_choice` "required" or a named function, the model must write a call after its thinking:
a call in the model's own format, of a function that is offered, with arguments that fit its
parameters. A named function is called once. With `parallel_tool_calls` false there is one call,
too. Parameters that can't be enforced are named or refused as for forms.

With `tool_choice` "auto" the text is free. If one of `tools` is `strict`, every call must name an
offered function and have arguments that fit, from the marker on that opens the call. Some models,
such as Llama, write calls as bare JSON; for them a brace at the beginning of the answer is the
marker.

A call that must fit a schema has only the parameters that the schema names. It may have others if
`additionalProperties` allows them, or if the schema names no parameters at all. Integers have at
most 18 digits. The schema alone limits the length of texts and lists: a model that does not end
one runs into `max_tokens`, and the `finish_reason` is "length". A choice that a stop string ended
has the string as `stop_reason`, as vLLM tells it.

Some models write arguments one by one instead of as one JSON object (Qwen3-Coder, Seed-OSS, GLM,
MiniMax, LongCat, DeepSeek V3.2, Kimi K3, MiniCPM5, Muse Spark). There texts are written as they
are and all other values as JSON. A schema that such a format can't express is refused by name:
`anyOf`, `allOf` or `not` over all parameters at once, or over a text. So are
names with blanks, quotes or brackets, and for Gemma's and Python's formats (LFM2, OLMo 3) names
with `=` or `,`. Muse Spark's calls can't be `strict` with "auto". Parameters may use Python's names
of types ("dict", "str", "list", "any" and so on), Gemini's ("STRING"), and OpenAPI's `nullable`.

Calls are read leniently. An end that a model leaves out or misspells ends its value if nothing else
can follow there. Markup inside a text stays text as long as the text's own end comes later.
Arguments that leave the server are a JSON object, of the types that the schema names, unless the
answer was cut by the token limit (`finish_reason` "length"). Text that is no call of an offered
function is content.

Tools that the client runs and that have a shape of their own are functions for the model: in
Responses `custom` (a text, held to a `grammar` in Lark's syntax or to a regular expression),
`local_shell`, `shell` (in the `local` environment) and `apply_patch`; in Messages those of the
types `bash_*`, `text_editor_*`, `memory_*` and `computer_*`. A call comes as the item that it is at
OpenAI (`custom_tool_call`, `local_shell_call`, `shell_call`, `apply_patch_call`), or as a
`tool_use`, and its result goes back as the item or block that belongs to it. A command that the
model wrote as one text is given to `bash -lc`; fields that it left out are empty.

Tools that only a provider can run (web search, file search, code interpreter, MCP, image
generation, tool search, OpenAI's computer use, a shell in a container), and `custom` ones in chat,
can be offered: they are left out, and named in the response header `x-ignored-tools` and in the
log. To demand one
by `tool_choice`, or any call where nothing else is offered, is refused by name. What they did
before in a conversation (`web_search_call`, `mcp_call`, `server_tool_use`,
`web_search_tool_result` and their like) the model reads as text, without images and what is
encrypted. A tool of a type that nobody knows is refused. Where a search for tools is left out,
those that it would find are offered at once.

## Pictures, times, and what a model can do

A model whose `input_modalities` have `image` sees pictures: `image_url` parts in chat,
`input_image` and a `computer_call_output`'s screenshot in Responses, `image` blocks in Messages,
Ollama's `images`; in tools' results, too. They are PNG, JPEG, WebP or GIF (its first frame), in a
data URL or base64 whose declared type is the file's own. Texts and pictures keep their order;
Ollama's pictures stand before their text. EXIF's orientation is honoured, and what is transparent
is white. A file that is broken, cut short or of another type is an error that names its place, such
as `messages[2].content[1].image_url.url`. `detail` has no effect: a model sees a picture as its
makers have it seen. Pictures count as the tokens that they take in the prompt.

`MLX_SERVER_MAX_IMAGES`, `MLX_SERVER_MAX_IMAGE_MB`, `MLX_SERVER_MAX_IMAGE_MEGAPIXELS` and
`MLX_SERVER_MAX_BODY_MB` limit them. An http(s) address is fetched only from the hosts in
`MLX_SERVER_IMAGE_HOSTS`, none by default, and only from public addresses; a `file_id` is refused.

Where a model sees none, a line that says so stands in the place of a picture in a tool's result or
before the last answer, so that a conversation goes on; one that the user has sent since is refused.
`MLX_SERVER_IMAGES_AS_TEXT` replaces all (`always`) or refuses all (`never`).

With `include_timings` (also in `stream_options`) or `timings_per_token`, chat and completions have
`timings`, as llama.cpp: `cache_n`, and `_n`, `_ms`, `_per_token_ms` and `_per_second` of `prompt`
and `predicted`; and `first_token_ms`, from the request's arrival. A whole answer has them of all
its choices together, a stream with the last chunk of each choice, or with every chunk.
Tokens that were found in the prefix cache are `cached_tokens` in chat, completions and Responses,
`cache_read_input_tokens` in Messages, `prompt_eval_cached_count` in Ollama's answers.

`GET /v1/models` and `/v1/models/{id}` tell `input_modalities`, `context_length`, `supports_tools`
and `supports_reasoning` (absent while a model is not loaded), and the same by LM Studio's names
(`type`, `max_context_length`, `loaded_context_length`, `capabilities`) and OpenRouter's
(`architecture`, `top_provider`, `supported_parameters`). A name may have slashes, percent signs and
colons, encoded or, but for the percent sign, as they are.

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

`output_config.format` is always strict.

With `thinking.display` "omitted" the answer's thinking blocks have no text, and their signature
carries the thinking (it is no secret): a block that is sent back is read by the model again. With
"summarized", "updates", and without it, thinking is given as the model wrote it; there are no
summaries. A block without text that another server signed is left out of the conversation.

A system message may hold `output_config.effort` for the turn that it stands in, with text or
without. Its text is left out once a user's message follows it where `clear_at` is
"next_user_message".

A tool with `defer_loading` is left out of the prompt until a `tool_reference` in a tool's result
names it, or a `tool_addition` in a system message. A `tool_removal` removes any tool. The model
reads each of these three as a line of text. The template writes the tools that are offered at the
end into the prompt, at the place where it writes tools. The client itself must search for tools:
where a search that Anthropic runs is offered (`tool_search_tool_regex`,
`tool_search_tool_bm25`), it is left out, and no tool is deferred.

If `cache_control` stands anywhere in a request, `cache_creation_input_tokens` in the usage says how
many of the prompt's tokens were newly kept for reuse, up to the prompt's last full page. Without
`cache_control` these tokens are kept all the same, and count as `input_tokens`.

Documents that are plain text or a list of texts and images, and search results, are read after
their title and their context or source. PDFs, files and addresses of documents are refused by name,
and so are citations if they are enabled.

If the last of `messages` is the assistant's, the answer continues it, and can't be restricted to a
format. Blanks at its end, which Anthropic refuses, are allowed here. Many templates remove them
before the model sees them.

## Seeds

A token is drawn by the seed and by the token's place in its answer. Other requests do not change
the draw. They can change the rounding of the probabilities: in a batch a model's numbers are
rounded differently than alone, by a hundred-thousandth on a CPU and by more in bf16 on a GPU. A
draw at the border of two tokens can then give the other token, and the rest of the text differs.
At temperature 0 this happens only if two tokens are equally likely to that many digits.

## Prompts that are too long

The message names both numbers, in the words that agents look for: "This model's maximum context
length is N tokens. However, your messages resulted in M tokens. Please reduce the length of the
messages." with the code `context_length_exceeded`, or "prompt is too long: M tokens > N maximum"
under `/v1/messages`. Of a text that is far too long only the beginning is counted, and M is
estimated from it.

## Log probabilities

Log probabilities are the model's own, before temperature, penalties and masks. Minus infinity,
which JSON has no number for, is -9999. With `echo` the prompt's tokens have log probabilities, too
(the first one null), and so has the token that ended the text.

## Responses that are kept

A response is stored for the key that asked, with the items of its request and of its answer,
unless `store` is false. `previous_response_id` continues a stored response with all of its items
and those before them. `{"type": "item_reference", "id": ...}` in `input` stands for one stored
item, and counts as if the item had been sent. A response or item that is not stored, or no longer
(`DELETE`, `MLX_SERVER_RESPONSE_STORE_DAYS`, `MLX_SERVER_RESPONSE_STORE_MB`), is a 404 that names
it. An item that is sent again with its id still belongs to the response that had it first.
A picture is stored once, however many responses have it, within
`MLX_SERVER_RESPONSE_STORE_IMAGES_MB`.

`include` in `GET /v1/responses/{id}` and `/v1/responses/{id}/input_items` takes the same values as
in a request. `reasoning.encrypted_content` is made for every stored reasoning.
`message.output_text.logprobs` is refused for a text that was stored without log probabilities.

An item `{"type": "additional_tools", "role": "developer", "tools": [...]}` offers tools from there
on; one takes the place of an earlier one of its name. `{"type": "configuration_update"}` with
`reasoning.effort` or `text.format` sets these for the answers that follow, before what their
requests say. What one of Codex's agents says to another (`agent_message`) is read as the user's.

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


LIMITS = {
    "schema": limits.MOST_SCHEMA,
    "grammar": limits.MOST_GRAMMAR,
    "pattern": limits.MOST_PATTERN,
    "deepest": limits.DEEPEST,
    "seconds": int(limits.COMPILE_SECONDS),
    "memory": limits.COMPILE_MEMORY >> 20,
}


def page() -> str:
    """The whole page, in Markdown."""
    names = ", ".join(f"`{name}`" for name in sorted(STRING_FORMATS))
    introduction = INTRODUCTION.replace("{formats}", names)
    for name, value in LIMITS.items():
        introduction = introduction.replace(f"{{{name}}}", f"{value:,}")
    parts = [introduction]
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
