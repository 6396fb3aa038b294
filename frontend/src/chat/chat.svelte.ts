/** The conversation on the screen, the list of all, and the answer that is coming. */

import { ApiError } from '../lib/api';
import { catalog } from '../lib/catalog.svelte';
import { message as said } from '../lib/format';
import { runTool, TOOLS } from '../lib/tools';
import {
  add,
  branch,
  lastOf,
  newConversation,
  PLAIN,
  siblings,
  titleOf,
  type Conversation,
  type Message,
  type Settings,
} from './conversation';
import { answer, body, type Chunk } from './request';
import * as storage from './storage';

const REMEMBERED = 'mlx-manager-chat-settings';
/** Milliseconds between two looks of the screen at an answer that comes. */
const FRAME = 60;
/** Milliseconds of an answer below which its rate says nothing. */
const BRIEF = 2;
const MOST_ROUNDS = 8;

function remembered(): Settings {
  try {
    return { ...PLAIN, ...JSON.parse(localStorage.getItem(REMEMBERED) ?? '{}') };
  } catch {
    return { ...PLAIN };
  }
}

class Chat {
  conversations = $state<Conversation[]>([]);
  current = $state<Conversation>(newConversation(remembered()));
  /** The message that is being written, while one is. */
  writing = $state<string | null>(null);
  problem = $state('');
  #stop: AbortController | null = null;
  #opened: Promise<void> | undefined;

  get shown(): Message[] {
    return branch(this.current);
  }

  get busy(): boolean {
    return this.writing !== null;
  }

  /** Read the conversations, and open the one of that id. */
  async open(id: string): Promise<void> {
    this.#opened ??= this.#read();
    await this.#opened;
    if (id === this.current.id) return;
    const found = this.conversations.find((each) => each.id === id);
    this.stop();
    if (found) this.current = found;
    else if (Object.keys(this.current.messages).length) this.start();
  }

  async #read(): Promise<void> {
    try {
      this.conversations = await storage.all();
      // The reactive one, which the list shows, too.
    } catch (error) {
      this.problem = `Conversations can't be kept in this browser: ${said(error)}`;
    }
  }

  /** A new conversation, with the settings of the last one but its schema. */
  start(): void {
    this.stop();
    const settings = { ...$state.snapshot(this.current.settings), schema: '' };
    this.current = newConversation(settings);
  }

  async remove(id: string): Promise<void> {
    if (this.current.id === id) this.start();
    this.conversations = this.conversations.filter((each) => each.id !== id);
    await storage.remove(id);
  }

  async rename(conversation: Conversation, title: string): Promise<void> {
    conversation.title = titleOf(title) || conversation.title;
    await storage.keep($state.snapshot(conversation) as Conversation);
  }

  /** Remember the settings for the next conversation, and keep them with this one. */
  settle(): void {
    localStorage.setItem(REMEMBERED, JSON.stringify({ ...this.current.settings, schema: '' }));
    if (this.current.leaf !== null) void this.#keep(this.current);
  }

  async send(text: string, images: string[]): Promise<void> {
    await this.#ask(this.current.leaf, text, images);
  }

  /** Ask something else in the place of a message: a branch. */
  async edit(message: Message, text: string): Promise<void> {
    if (message.role === 'assistant') {
      const { parent, model } = message;
      add(this.current, { parent, model, role: 'assistant', text, finish: 'edited' });
      await this.#keep(this.current);
      return;
    }
    await this.#ask(message.parent, text, $state.snapshot(message.images) ?? []);
  }

  /** Another answer in the place of one: a branch. */
  async regenerate(message: Message): Promise<void> {
    if (this.busy) return;
    this.current.leaf = message.parent;
    await this.#answer();
  }

  select(message: Message): void {
    this.current.leaf = lastOf(this.current, message);
    void this.#keep(this.current);
  }

  siblings(message: Message): Message[] {
    return siblings(this.current, message);
  }

  stop(): void {
    this.#stop?.abort();
  }

  async #ask(parent: string | null, text: string, images: string[]): Promise<void> {
    if (this.busy) return;
    const images_ = images.length ? { images } : {};
    add(this.current, { parent, role: 'user', text, ...images_ });
    this.current.title ||= titleOf(text) || 'Picture';
    await this.#answer();
  }

  async #answer(): Promise<void> {
    const conversation = this.current;
    for (let round = 0; round < MOST_ROUNDS; round += 1) {
      const message = await this.#write(conversation);
      const own = (message.calls ?? []).filter(({ name }) => TOOLS.some((t) => t.name === name));
      if (message.finish !== 'tool_calls' || own.length !== message.calls?.length) return;
      for (const { id, name, arguments: given } of own) {
        const text = runTool(name, given);
        add(conversation, { parent: conversation.leaf, role: 'tool', callId: id, text });
      }
      await this.#keep(conversation);
    }
  }

  async #write(conversation: Conversation): Promise<Message> {
    const settings = $state.snapshot(conversation.settings) as Settings;
    const model = settings.model || (catalog.models[0]?.id ?? '');
    const asked = branch(conversation);
    const message = add(conversation, {
      ...{ parent: conversation.leaf, role: 'assistant' as const, text: '', model },
    });
    this.writing = message.id;
    this.#stop = new AbortController();
    const writer = new Writer(message);
    try {
      const wanted = body({ ...settings, model }, $state.snapshot(asked) as Message[]);
      const id = (requestId: string): void => void (message.requestId = requestId);
      for await (const chunk of answer(wanted, this.#stop.signal, id)) writer.take(chunk);
      writer.end();
    } catch (error) {
      writer.end();
      if (this.#stop.signal.aborted) message.finish = 'stopped';
      else {
        message.error = said(error);
        if (error instanceof ApiError) {
          message.requestId ||= error.requestId;
          if (error.status === 401) catalog.locked = true;
        }
      }
    } finally {
      this.writing = null;
      this.#stop = null;
      await this.#keep(conversation);
    }
    return message;
  }

  async #keep(conversation: Conversation): Promise<void> {
    if (!this.conversations.some((each) => each.id === conversation.id)) {
      this.conversations.unshift(conversation);
      const kept = this.conversations[0]!;
      if (this.current.id === kept.id) this.current = kept;
    }
    try {
      await storage.keep($state.snapshot(conversation) as Conversation);
    } catch (error) {
      this.problem = `This conversation can't be kept: ${said(error)}`;
    }
  }
}

/** Puts the pieces of an answer into its message, some times a second. */
class Writer {
  #text = '';
  #reasoning = '';
  #began = performance.now();
  #first = 0;
  #perSecond: number | undefined;
  #timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly message: Message) {}

  take(chunk: Chunk): void {
    const { message } = this;
    if (!this.#first && (chunk.text || chunk.reasoning || chunk.calls)) {
      this.#first = performance.now();
    }
    if (chunk.text) this.#text += chunk.text;
    if (chunk.reasoning) this.#reasoning += chunk.reasoning;
    for (const piece of chunk.calls ?? []) {
      message.calls ??= [];
      const call = message.calls[piece.index];
      if (call) call.arguments += piece.arguments ?? '';
      else {
        const { id = '', name = '', arguments: given = '' } = piece;
        message.calls.push({ id, name, arguments: given });
      }
    }
    if (chunk.finish) message.finish = chunk.finish;
    if ((chunk.timings?.predicted_ms ?? 0) >= BRIEF) this.#perSecond = chunk.timings?.predicted_per_second;
    if (chunk.usage) this.#count(chunk.usage);
    this.#timer ??= setTimeout(() => this.#show(), FRAME);
  }

  end(): void {
    this.#show();
  }

  #count(usage: NonNullable<Chunk['usage']>): void {
    this.message.figures = {
      promptTokens: usage.prompt,
      cachedTokens: usage.cached,
      tokens: usage.completion,
      first: ((this.#first || performance.now()) - this.#began) / 1000,
      rate: this.#perSecond ?? 0,
    };
  }

  #show(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    if (this.#text) {
      this.message.text += this.#text;
      this.#text = '';
    }
    if (this.#reasoning) {
      this.message.reasoning = (this.message.reasoning ?? '') + this.#reasoning;
      this.#reasoning = '';
    }
  }
}

export const chat = new Chat();
