/** A conversation as a tree: an edit or a new answer is a sibling, and nothing is lost. */

export type Role = 'user' | 'assistant' | 'tool';

export interface Call {
  id: string;
  name: string;
  arguments: string;
}

export interface Figures {
  promptTokens: number;
  cachedTokens: number;
  tokens: number;
  /** Seconds until the first token, and tokens a second after it. */
  first: number;
  rate: number;
}

export interface Message {
  id: string;
  parent: string | null;
  role: Role;
  text: string;
  reasoning?: string;
  /** Pictures, as data URLs. */
  images?: string[];
  calls?: Call[];
  /** Of a tool's result: the call that it answers. */
  callId?: string;
  model?: string;
  /** Why it ended: stop, length, tool_calls; stopped by the person; or empty while it comes. */
  finish?: string;
  error?: string;
  requestId?: string;
  figures?: Figures;
  time: number;
}

export interface Sampling {
  temperature?: number;
  top_p?: number;
  top_k?: number;
  min_p?: number;
  repetition_penalty?: number;
  presence_penalty?: number;
  frequency_penalty?: number;
  max_tokens?: number;
  seed?: number;
}

export interface Settings {
  model: string;
  system: string;
  sampling: Sampling;
  stop: string;
  effort: string;
  schema: string;
  tools: string[];
}

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  messages: Record<string, Message>;
  /** The last message of the branch that is shown. */
  leaf: string | null;
  settings: Settings;
}

export const PLAIN: Settings = {
  ...{ model: '', system: '', sampling: {}, stop: '', effort: '', schema: '', tools: [] },
};

export function newId(): string {
  return crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint32Array(4))).join('-');
}

export function newConversation(settings: Settings): Conversation {
  const now = Date.now();
  return {
    ...{ id: newId(), title: '', created: now, updated: now, messages: {}, leaf: null },
    settings: structuredClone(settings),
  };
}

/** The messages of the branch that is shown, from the first to the leaf. */
export function branch(conversation: Conversation, leaf = conversation.leaf): Message[] {
  const found: Message[] = [];
  for (let id = leaf; id !== null; ) {
    const message = conversation.messages[id];
    if (!message) break;
    found.unshift(message);
    id = message.parent;
  }
  return found;
}

/** The messages that stand in the same place, in the order of their making. */
export function siblings(conversation: Conversation, message: Message): Message[] {
  return children(conversation, message.parent);
}

function children(conversation: Conversation, parent: string | null): Message[] {
  return Object.values(conversation.messages)
    .filter((message) => message.parent === parent)
    .sort((one, other) => one.time - other.time);
}

/** The newest end of what follows a message. */
export function lastOf(conversation: Conversation, message: Message): string {
  let at = message;
  for (;;) {
    const following = children(conversation, at.id).at(-1);
    if (!following) return at.id;
    at = following;
  }
}

export function add(
  conversation: Conversation,
  message: Omit<Message, 'id' | 'time'>,
): Message {
  const newest = Math.max(0, ...Object.values(conversation.messages).map((each) => each.time));
  const whole = { ...message, id: newId(), time: Math.max(Date.now(), newest + 1) };
  conversation.messages[whole.id] = whole;
  conversation.leaf = whole.id;
  conversation.updated = Date.now();
  // In a proxy it is another object than the one that was put in.
  return conversation.messages[whole.id]!;
}

const LONGEST_TITLE = 60;

export function titleOf(text: string): string {
  const line = text.trim().split('\n')[0]!.trim();
  return line.length > LONGEST_TITLE ? `${line.slice(0, LONGEST_TITLE - 1)}…` : line;
}

export function matches(conversation: Conversation, words: string): boolean {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return true;
  const texts = Object.values(conversation.messages).map((message) => message.text);
  const all = [conversation.title, ...texts].join('\n').toLowerCase();
  return wanted.every((word) => all.includes(word));
}
