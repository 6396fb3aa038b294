/** A model's text as HTML that can do nothing: it is a stranger's, and may try. */

import DOMPurify, { type Config } from 'dompurify';
import { Lexer, Marked, type Token, type Tokens, type TokensList } from 'marked';

import { formula } from './formulas';

export type Block =
  | { kind: 'space'; raw: string }
  | { kind: 'html'; html: string; raw: string }
  | { kind: 'code'; text: string; lang: string; raw: string };

const CLEAN: Config = {
  USE_PROFILES: { html: true, mathMl: true },
  // No pictures: to fetch one tells its server what the model wrote.
  FORBID_TAGS: [
    ...['img', 'picture', 'audio', 'video', 'form', 'input', 'button', 'select', 'textarea', 'style'],
    ...['dialog', 'marquee', 'map', 'area', 'font', 'center', 'label', 'fieldset', 'optgroup'],
  ],
  FORBID_ATTR: ['style', 'class', 'id', 'name', 'tabindex', 'background', 'popover', 'accesskey'],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  // Addresses of the web and of mail, and values that are no addresses with a scheme.
  ALLOWED_URI_REGEXP: /^(?:(?:https?|mailto):|[^a-z]|[a-z+.-]+(?:[^a-z+.\-:]|$))/i,
};

DOMPurify.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName === 'A') {
    node.setAttribute('target', '_blank');
    node.setAttribute('rel', 'noopener noreferrer nofollow');
  }
});

const BLOCK_MATH = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])(?:\n|$)/;
const INLINE_MATH =
  /^(?:\$\$([^\n]+?)\$\$|\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\])/s;

const PLAIN_TAG =
  /&#60;(\/?)(br|sub|sup|b|i|u|s|em|strong|kbd|mark|small|details|summary|p)\s*\/?&#62;/gi;

const marked = new Marked({
  gfm: true,
  extensions: [
    {
      name: 'blockMath',
      level: 'block',
      start: (src) => src.match(/\n {0,3}(?:\$\$|\\\[)/)?.index,
      tokenizer(src) {
        const found = BLOCK_MATH.exec(src);
        if (!found) return;
        return { type: 'blockMath', raw: found[0], text: (found[1] ?? found[2] ?? '').trim() };
      },
      renderer: (token) => formula(token.text, true),
    },
    {
      name: 'inlineMath',
      level: 'inline',
      start: (src) => src.match(/\$|\\\(|\\\[/)?.index,
      tokenizer(src) {
        const found = INLINE_MATH.exec(src);
        if (!found) return;
        return { type: 'inlineMath', raw: found[0], text: found.slice(1).find(Boolean) ?? '' };
      },
      renderer: (token) => formula(token.text, token.raw.startsWith('\\[')),
    },
  ],
  renderer: {
    image({ href, text }: Tokens.Image) {
      const shown = escaped(text || href);
      return `<a href="${escaped(href)}">${shown}</a>`;
    },
    // HTML is shown as the text that it is, but for tags that do nothing and have nothing in them.
    html({ text }: Tokens.HTML | Tokens.Tag) {
      return escaped(text).replace(PLAIN_TAG, '<$1$2>');
    },
    checkbox({ checked }: Tokens.Checkbox) {
      return checked ? '☑ ' : '☐ ';
    },
  },
});

const LONGEST_KEPT = 2000;
const kept = new Map<string, string>();

/** A text that grows at its end: of what comes later only the last blocks are read again. */
export class Growing {
  #text = '';
  #blocks: Block[] = [];
  #drawn = 0;

  /** The blocks of the text as it is now. */
  blocks(text: string): Block[] {
    let from = 0;
    let before: Block[] = [];
    if (this.#drawn === drawings && text.startsWith(this.#text) && !text.includes('\r')) {
      // The last two may still become others: a list goes on after an empty line.
      before = this.#blocks.slice(0, -2);
      from = before.reduce((length, { raw }) => length + raw.length, 0);
    }
    const tokens = new Lexer(marked.defaults).lex(text.slice(from));
    this.#blocks = [...before, ...tokens.map((token) => block(token, tokens))];
    [this.#text, this.#drawn] = [text, drawings];
    return this.#blocks.filter(({ kind }) => kind !== 'space');
  }
}

let drawings = 0;

function block(token: Token, all: TokensList): Block {
  if (token.type === 'space') return { kind: 'space', raw: token.raw };
  if (token.type === 'code') {
    const { text, lang = '', raw } = token as Tokens.Code;
    return { kind: 'code', text, lang: lang.split(/\s/)[0] ?? '', raw };
  }
  let html = kept.get(token.raw);
  if (html === undefined) {
    const list = Object.assign([token], { links: all.links });
    html = clean(marked.parser(list));
    if (kept.size > LONGEST_KEPT) kept.clear();
    kept.set(token.raw, html);
  }
  return { kind: 'html', html, raw: token.raw };
}

/** Forget the conversions: formulas can be drawn now. */
export function forget(): void {
  kept.clear();
  drawings += 1;
}

function clean(html: string): string {
  // With Trusted Types this is a TrustedHTML, which Svelte passes on as it is.
  return DOMPurify.sanitize(html, { ...CLEAN, RETURN_TRUSTED_TYPE: true }) as unknown as string;
}

export function trusted(html: string, config: Config): string {
  return DOMPurify.sanitize(html, { ...config, RETURN_TRUSTED_TYPE: true }) as unknown as string;
}

function escaped(text: string): string {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}
