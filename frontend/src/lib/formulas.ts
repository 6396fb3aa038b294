/** Formulas as MathML, which browsers draw themselves; KaTeX comes when the first one does. */

type Katex = typeof import('katex').default;

let katex: Katex | undefined;
let coming: Promise<void> | undefined;
const waiting = new Set<() => void>();

/** Call `then` when formulas that were shown as their source can be drawn. */
export function whenFormulasAreReady(then: () => void): () => void {
  waiting.add(then);
  return () => waiting.delete(then);
}

export function formula(source: string, display: boolean): string {
  if (katex === undefined) {
    coming ??= import('katex').then((module) => {
      katex = module.default;
      for (const then of waiting) then();
    });
    return `<code>${source.replace(/[&<>]/g, (c) => `&#${c.charCodeAt(0)};`)}</code>`;
  }
  const drawn = katex.renderToString(source, {
    output: 'mathml',
    displayMode: display,
    throwOnError: false,
    strict: 'ignore',
    trust: false,
    maxExpand: 200,
    maxSize: 20,
  });
  return drawn.replace(/<annotation[\s\S]*?<\/annotation>/g, '');
}
