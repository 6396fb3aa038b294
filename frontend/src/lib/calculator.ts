/** Arithmetic: numbers, + - * / % ^, brackets, a few functions and constants. */

const TOKEN = /\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|([a-z]+)|(\*\*|[-+*/%^(),]))/giy;

const FUNCTIONS: Record<string, (...x: number[]) => number> = {
  ...{ sqrt: Math.sqrt, abs: Math.abs, round: Math.round, floor: Math.floor, ceil: Math.ceil },
  ...{ sin: Math.sin, cos: Math.cos, tan: Math.tan, exp: Math.exp, ln: Math.log },
  ...{ log: Math.log10, min: Math.min, max: Math.max },
};
const CONSTANTS: Record<string, number> = { pi: Math.PI, e: Math.E };

export function calculate(expression: string): number {
  const tokens = tokenized(expression);
  let at = 0;

  const take = (...wanted: string[]): string | undefined =>
    wanted.includes(tokens[at] ?? '') ? tokens[at++] : undefined;
  const need = (wanted: string): void => {
    if (!take(wanted)) throw new Error(`${wanted} is missing after ${tokens.slice(0, at).join(' ')}`);
  };

  function sum(): number {
    let value = product();
    for (let sign = take('+', '-'); sign; sign = take('+', '-')) {
      value = sign === '+' ? value + product() : value - product();
    }
    return value;
  }

  function product(): number {
    let value = signed();
    for (let sign = take('*', '/', '%'); sign; sign = take('*', '/', '%')) {
      const other = signed();
      value = sign === '*' ? value * other : sign === '/' ? value / other : value % other;
    }
    return value;
  }

  function signed(): number {
    if (take('-')) return -signed();
    if (take('+')) return signed();
    const value = atom();
    return take('^', '**') ? value ** signed() : value;
  }

  function atom(): number {
    const token = tokens[at++];
    if (token === undefined) throw new Error('The expression ends too early.');
    if (token === '(') {
      const value = sum();
      need(')');
      return value;
    }
    if (/^[\d.]/.test(token)) return Number(token);
    if (Object.hasOwn(CONSTANTS, token)) return CONSTANTS[token]!;
    if (!Object.hasOwn(FUNCTIONS, token)) throw new Error(`${token} is unknown here.`);
    need('(');
    const given = [sum()];
    while (take(',')) given.push(sum());
    need(')');
    return FUNCTIONS[token]!(...given);
  }

  const value = sum();
  if (at < tokens.length) throw new Error(`${tokens[at]} is not expected here.`);
  return value;
}

function tokenized(expression: string): string[] {
  const tokens: string[] = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < expression.trimEnd().length) {
    const from = TOKEN.lastIndex;
    const found = TOKEN.exec(expression);
    if (!found) throw new Error(`${expression.slice(from).trim()[0]} is not expected here.`);
    tokens.push(found[0].trim().toLowerCase());
  }
  return tokens;
}
