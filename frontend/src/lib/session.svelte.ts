/** Secrets of this tab, and what was asked for: they end with the tab, and no cookie holds them. */

const KEY = 'mlx-manager-key';
const TOKEN = 'mlx-manager-admin-token';

class Session {
  #key = $state(sessionStorage.getItem(KEY) ?? '');
  #token = $state(sessionStorage.getItem(TOKEN) ?? '');

  /** The API key, for everything but the owner's. */
  get key(): string {
    return this.#key;
  }

  set key(value: string) {
    this.#key = value;
    keep(KEY, value);
  }

  /** The admin token. */
  get token(): string {
    return this.#token;
  }

  set token(value: string) {
    this.#token = value;
    keep(TOKEN, value);
  }

  forget(): void {
    this.key = '';
    this.token = '';
  }
}

function keep(name: string, value: string): void {
  if (value) sessionStorage.setItem(name, value);
  else sessionStorage.removeItem(name);
}

export const session = new Session();
