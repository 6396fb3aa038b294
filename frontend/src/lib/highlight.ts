/** Colours of code, in the languages that models write most. */

import hljs from 'highlight.js/lib/core';
import bash from 'highlight.js/lib/languages/bash';
import c from 'highlight.js/lib/languages/c';
import cpp from 'highlight.js/lib/languages/cpp';
import csharp from 'highlight.js/lib/languages/csharp';
import css from 'highlight.js/lib/languages/css';
import diff from 'highlight.js/lib/languages/diff';
import go from 'highlight.js/lib/languages/go';
import ini from 'highlight.js/lib/languages/ini';
import java from 'highlight.js/lib/languages/java';
import javascript from 'highlight.js/lib/languages/javascript';
import json from 'highlight.js/lib/languages/json';
import kotlin from 'highlight.js/lib/languages/kotlin';
import lua from 'highlight.js/lib/languages/lua';
import makefile from 'highlight.js/lib/languages/makefile';
import markdown from 'highlight.js/lib/languages/markdown';
import php from 'highlight.js/lib/languages/php';
import python from 'highlight.js/lib/languages/python';
import r from 'highlight.js/lib/languages/r';
import ruby from 'highlight.js/lib/languages/ruby';
import rust from 'highlight.js/lib/languages/rust';
import sql from 'highlight.js/lib/languages/sql';
import swift from 'highlight.js/lib/languages/swift';
import typescript from 'highlight.js/lib/languages/typescript';
import xml from 'highlight.js/lib/languages/xml';
import yaml from 'highlight.js/lib/languages/yaml';

import { trusted } from './markdown';

const LANGUAGES = {
  ...{ bash, c, cpp, csharp, css, diff, go, ini, java, javascript, json, kotlin, lua, makefile },
  ...{ markdown, php, python, r, ruby, rust, sql, swift, typescript, xml, yaml },
};
for (const [name, language] of Object.entries(LANGUAGES)) hljs.registerLanguage(name, language);

const LONGEST = 50_000;

/** The code as HTML; undefined in a language that is not known, or of a size that takes long. */
export function highlighted(text: string, lang: string): string | undefined {
  if (!hljs.getLanguage(lang) || text.length > LONGEST) return undefined;
  const html = hljs.highlight(text, { language: lang, ignoreIllegals: true }).value;
  return trusted(html, { ALLOWED_TAGS: ['span'], ALLOWED_ATTR: ['class'] });
}
