/** The page that the address names behind its `#`, and the conversation, if any. */

export const PAGES = ['chat', 'models', 'now', 'log'] as const;
export type Page = (typeof PAGES)[number];

function read(): { page: Page; id: string } {
  const [page = '', id = ''] = location.hash.replace(/^#\/?/, '').split('/');
  return { page: PAGES.find((name) => name === page) ?? 'chat', id: decodeURIComponent(id) };
}

class Route {
  #now = $state(read());

  constructor() {
    addEventListener('hashchange', () => (this.#now = read()));
  }

  get page(): Page {
    return this.#now.page;
  }

  get id(): string {
    return this.#now.id;
  }

  /** Put a conversation's id into the address, without a new entry in the history. */
  name(id: string): void {
    history.replaceState(null, '', id ? `#/chat/${encodeURIComponent(id)}` : '#/chat');
    this.#now = read();
  }
}

export const route = new Route();
