/** A branch as a request, and an answer's stream as pieces. */

import { ask, ApiError, events } from '../lib/api';
import { TOOLS } from '../lib/tools';
import type { Call, Message, Settings } from './conversation';

export interface Chunk {
  text?: string;
  reasoning?: string;
  calls?: { index: number; id?: string; name?: string; arguments?: string }[];
  finish?: string;
  usage?: { prompt: number; cached: number; completion: number };
  timings?: { predicted_ms?: number; predicted_per_second?: number };
}

function content(message: Message): unknown {
  if (!message.images?.length) return message.text;
  const pictures = message.images.map((url) => ({ type: 'image_url', image_url: { url } }));
  return [...pictures, ...(message.text ? [{ type: 'text', text: message.text }] : [])];
}

function wire(message: Message): Record<string, unknown> {
  if (message.role === 'tool') {
    return { role: 'tool', tool_call_id: message.callId, content: message.text };
  }
  const said: Record<string, unknown> = { role: message.role, content: content(message) };
  if (message.reasoning) said.reasoning_content = message.reasoning;
  if (message.calls?.length) {
    said.tool_calls = message.calls.map(({ id, name, arguments: given }: Call) => ({
      ...{ id, type: 'function', function: { name, arguments: given } },
    }));
  }
  return said;
}

/** The body of a request for the next answer. Throws where the JSON schema is no JSON. */
export function body(settings: Settings, messages: Message[]): Record<string, unknown> {
  const system = settings.system.trim() ? [{ role: 'system', content: settings.system }] : [];
  const asked: Record<string, unknown> = {
    model: settings.model,
    messages: [...system, ...messages.filter((each) => !each.error || each.text).map(wire)],
    stream: true,
    stream_options: { include_usage: true },
    include_timings: true,
    ...settings.sampling,
  };
  const stop = settings.stop.split('\n').filter(Boolean);
  if (stop.length) asked.stop = stop;
  if (settings.effort) asked.reasoning_effort = settings.effort;
  if (settings.schema.trim()) {
    const schema: unknown = JSON.parse(settings.schema);
    asked.response_format = { type: 'json_schema', json_schema: { name: 'answer', schema } };
  }
  const tools = TOOLS.filter((tool) => settings.tools.includes(tool.name));
  if (tools.length) {
    asked.tools = tools.map(({ name, about, parameters }) => ({
      ...{ type: 'function', function: { name, description: about, parameters } },
    }));
  }
  return asked;
}

/** Ask, and hand on each piece of the answer. `begun` is told the request's id. */
export async function* answer(
  asked: Record<string, unknown>,
  signal: AbortSignal,
  begun: (requestId: string) => void,
): AsyncGenerator<Chunk> {
  const response = await ask('v1/chat/completions', {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: JSON.stringify(asked),
    signal,
  });
  const requestId = response.headers.get('x-request-id') ?? '';
  begun(requestId);
  let whole = false;
  for await (const { data } of events(response)) {
    if (data === '[DONE]') {
      whole = true;
      break;
    }
    const said = JSON.parse(data);
    if (said.error) {
      throw new ApiError(200, said.error.code ?? '', said.error.message, requestId);
    }
    yield piece(said);
  }
  if (!whole) throw new ApiError(0, 'broken', 'The connection broke before the answer ended.', requestId);
}

// eslint-disable-next-line @typescript-eslint/no-explicit-any
function piece(said: any): Chunk {
  const choice = said.choices?.[0];
  const delta = choice?.delta ?? {};
  const chunk: Chunk = {
    text: delta.content ?? undefined,
    reasoning: delta.reasoning_content ?? delta.reasoning ?? undefined,
    finish: choice?.finish_reason ?? undefined,
    timings: said.timings ?? undefined,
  };
  if (delta.tool_calls) {
    chunk.calls = delta.tool_calls.map((call: Record<string, never>) => ({
      index: call['index'],
      id: call['id'],
      ...(call['function'] as object | undefined),
    }));
  }
  if (said.usage) {
    chunk.usage = {
      prompt: said.usage.prompt_tokens,
      cached: said.usage.prompt_tokens_details?.cached_tokens ?? 0,
      completion: said.usage.completion_tokens,
    };
  }
  return chunk;
}
