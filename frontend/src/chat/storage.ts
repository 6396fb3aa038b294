/** Conversations in this browser's IndexedDB; the server keeps none of them. */

import type { Conversation } from './conversation';

const NAME = 'mlx-manager';
const STORE = 'conversations';

let opened: Promise<IDBDatabase> | undefined;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const opening = indexedDB.open(NAME, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: 'id' });
    opening.onsuccess = () => resolve(opening.result);
    opening.onerror = () => reject(opening.error);
  });
  return opened;
}

async function run<T>(
  mode: IDBTransactionMode,
  work: (store: IDBObjectStore) => IDBRequest<T>,
): Promise<T> {
  const db = await database();
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(STORE, mode);
    const request = work(transaction.objectStore(STORE));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = () => reject(transaction.error);
    transaction.onabort = () => reject(transaction.error);
  });
}

export async function all(): Promise<Conversation[]> {
  const found = await run<Conversation[]>('readonly', (store) => store.getAll());
  return found.sort((one, other) => other.updated - one.updated);
}

export async function keep(conversation: Conversation): Promise<void> {
  await run('readwrite', (store) => store.put(conversation));
}

export async function remove(id: string): Promise<void> {
  await run('readwrite', (store) => store.delete(id));
}
