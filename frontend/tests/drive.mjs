// Drives the page in Chromium, scenario by scenario, against servers that a test has started.
//
//   node drive.mjs '{"chromium": PATH, "shots": FOLDER?, "only": [NAME]?, "servers": {NAME: URL}}'
//
// Prints a line of JSON for each scenario: its name, and what failed. A line with `do` asks the
// test for something, whose answer is a line on the standard input.

import { createInterface } from 'node:readline';

import { chromium } from 'playwright-core';

import { scenarios } from './scenarios.mjs';

const options = JSON.parse(process.argv[2]);
const FLAGS = [
  ...['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-sync'],
  ...['--disable-background-networking', '--disable-component-update', '--disable-dev-shm-usage'],
];
const replies = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);

const browser = await chromium.launch({ executablePath: options.chromium, args: FLAGS });

/** What a scenario has: a page of its own, and what the page complained of. */
async function world(name, settings) {
  const context = await browser.newContext({
    viewport: { width: 1200, height: 800 },
    permissions: ['clipboard-read', 'clipboard-write'],
    ...settings,
  });
  context.setDefaultTimeout(60_000);
  const page = await context.newPage();
  const complaints = [];
  page.on('pageerror', (error) => complaints.push(error.message));
  page.on('console', (told) => {
    if (told.type() === 'error' && !told.text().startsWith('Failed to load resource')) {
      complaints.push(told.text());
    }
  });
  return {
    context,
    page,
    browser,
    complaints,
    servers: options.servers,
    /** Have the test do something, and return its answer. */
    async ask(what, ...given) {
      say({ do: what, given });
      return JSON.parse((await replies.next()).value);
    },
    /** Keep a picture to be looked at, where that is wanted. */
    async shot(of = name) {
      if (options.shots) await page.screenshot({ path: `${options.shots}/${of}.png` });
    },
  };
}

for (const [name, { settings, run }] of Object.entries(scenarios)) {
  if (options.only && !options.only.includes(name)) continue;
  const began = performance.now();
  const its = await world(name, settings);
  let failure = null;
  try {
    await run(its);
    if (its.complaints.length) failure = `the page complains: ${its.complaints.join('; ')}`;
  } catch (error) {
    failure = error.stack;
    await its.shot(`${name} (failed)`).catch(() => {});
  }
  await its.context.close();
  say({ name, failure, seconds: (performance.now() - began) / 1000 });
}
await browser.close();
process.exit(0);
