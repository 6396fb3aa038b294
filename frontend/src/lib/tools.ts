/** Tools that run in the page, when a person has switched them on. */

import { calculate } from './calculator';

export interface Tool {
  name: string;
  label: string;
  about: string;
  parameters: Record<string, unknown>;
  run: (given: Record<string, unknown>) => string;
}

function time(given: Record<string, unknown>): string {
  const zone = typeof given.timezone === 'string' && given.timezone ? given.timezone : undefined;
  const shown = new Date().toLocaleString('en-GB', {
    timeZone: zone,
    dateStyle: 'full',
    timeStyle: 'long',
  });
  return JSON.stringify({ time: shown, iso: new Date().toISOString() });
}

export const TOOLS: readonly Tool[] = [
  {
    name: 'get_time',
    label: 'Clock',
    about: 'The current date and time',
    parameters: {
      type: 'object',
      properties: {
        timezone: { type: 'string', description: 'IANA name such as Europe/Rome; default: local' },
      },
    },
    run: time,
  },
  {
    name: 'calculate',
    label: 'Calculator',
    about: 'The value of an arithmetic expression',
    parameters: {
      type: 'object',
      properties: {
        expression: { type: 'string', description: 'Such as (2 + 3) * sqrt(16) / 7 ^ 2' },
      },
      required: ['expression'],
    },
    run: (given) => JSON.stringify({ value: calculate(String(given.expression ?? '')) }),
  },
];

/** The result of a call as text for the model; an error is one, too. */
export function runTool(name: string, given: string): string {
  const tool = TOOLS.find((each) => each.name === name);
  if (!tool) return JSON.stringify({ error: `There is no tool ${name}.` });
  try {
    return tool.run(JSON.parse(given || '{}'));
  } catch (error) {
    return JSON.stringify({ error: error instanceof Error ? error.message : String(error) });
  }
}
