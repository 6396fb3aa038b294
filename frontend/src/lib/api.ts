/** Requests to the server that this page came from, with the key that was typed in. */

import { session } from './session.svelte';

/** The folder that `/` or `/ui` is in: a proxy may serve both under a prefix. */
export const BASE = new URL('.', location.href.split('#')[0]).href;

/** Paths that take the admin token in place of a key. */
const OWNERS = /^(v1\/admin\/|api\/delete$)/;

export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
    readonly requestId: string,
  ) {
    super(message);
  }
}

export interface ServerEvent {
  event: string;
  data: string;
}

/** Ask for `path` (without a slash before it); throws ApiError for an answer that is one. */
export async function ask(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const secret = OWNERS.test(path) ? session.token : session.key;
  if (secret) headers.set('authorization', `Bearer ${secret}`);
  let response: Response;
  try {
    response = await fetch(BASE + path, { ...init, headers, credentials: 'omit', cache: 'no-store' });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, 'unreachable', 'The server does not answer. Is it still running?', '');
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response: Response): Promise<ApiError> {
  const id = response.headers.get('x-request-id') ?? '';
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error === 'string') return new ApiError(response.status, '', error, id);
    return new ApiError(response.status, error.code ?? '', error.message, id);
  } catch {
    return new ApiError(response.status, '', `${response.status} ${response.statusText}`, id);
  }
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await ask(path, { signal })).json();
}

export async function post<T>(path: string, body: unknown = {}, signal?: AbortSignal): Promise<T> {
  return (await send('POST', path, body, signal)).json();
}

export function send(
  method: string,
  path: string,
  body: unknown,
  signal?: AbortSignal,
): Promise<Response> {
  const headers = { 'content-type': 'application/json' };
  return ask(path, { method, headers, body: JSON.stringify(body), signal });
}

/** The lines of an answer as they come. */
async function* lines(response: Response): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const found = (rest + value).split('\n');
      rest = found.pop()!;
      yield* found;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The server-sent events of an answer. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  let event = 'message';
  let data: string[] = [];
  for await (const line of lines(response)) {
    if (line === '' || line === '\r') {
      if (data.length) yield { event, data: data.join('\n') };
      event = 'message';
      data = [];
    } else if (line.startsWith('data:')) data.push(line.slice(5).trim());
    else if (line.startsWith('event:')) event = line.slice(6).trim();
  }
}
