/** What the server is doing: its stream of events, for as long as a page shows them. */

import { ApiError, ask, events } from './api';
import { message } from './format';
import type { RecentCall, Sample, ServerState } from './types';

const HOUR = 3600;
const MOST_CALLS = 200;
const AGAIN = 2000;

class Live {
  state = $state.raw<ServerState | null>(null);
  samples = $state.raw<Sample[]>([]);
  calls = $state.raw<RecentCall[]>([]);
  /** Tokens a second of all models, and of each request by its id. */
  rate = $state(0);
  rates = $state.raw<Record<string, number>>({});
  locked = $state(false);
  problem = $state('');
  #stop: AbortController | null = null;

  /** Follow the stream until the returned function is called. */
  follow(): () => void {
    const stop = new AbortController();
    this.#stop?.abort();
    this.#stop = stop;
    void this.#read(stop);
    return () => stop.abort();
  }

  async #read(stop: AbortController): Promise<void> {
    while (!stop.signal.aborted) {
      try {
        const response = await ask('v1/admin/events', { signal: stop.signal });
        this.locked = false;
        this.problem = '';
        let first = true;
        for await (const { data } of events(response)) {
          this.#take(JSON.parse(data) as ServerState, first);
          first = false;
        }
        this.problem = 'The server has ended the stream. Trying again …';
      } catch (error) {
        if (stop.signal.aborted) return;
        this.locked = error instanceof ApiError && error.status === 401;
        this.problem = this.locked ? '' : message(error);
        if (error instanceof ApiError && [401, 403].includes(error.status)) return;
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
  }

  #take(state: ServerState, first: boolean): void {
    const before = this.state;
    const seconds = before ? state.time - before.time : 0;
    if (before && !first && seconds > 0) {
      const grown = state.generated_tokens - before.generated_tokens;
      this.rate = Math.max(0, grown) / seconds;
      const earlier = new Map(before.requests.map((each) => [each.id, each.tokens]));
      this.rates = Object.fromEntries(
        state.requests.map(({ id, tokens }) => [
          id,
          earlier.has(id) ? Math.max(0, tokens - earlier.get(id)!) / seconds : 0,
        ]),
      );
    }
    const [samples, calls] = first ? [[], []] : [this.samples, this.calls];
    this.samples = [...samples, ...state.samples].filter(({ time }) => time > state.time - HOUR);
    if (first || state.calls.length) {
      this.calls = [...calls, ...state.calls].slice(-MOST_CALLS);
    }
    this.state = state;
  }
}

export const live = new Live();
