// Draws the dashboard in Chromium and says what was on it.
//
//   node draw.mjs --prometheus URL --out FILE.png [--minutes N] [--every 2s] [--theme light]
//     [--model NAME] [--width 1600] [--chromium PATH]
//
// Prints JSON: what the page complained of, and for each panel its title, whether it had no data, and
// its text.

import { createServer } from 'node:http';
import { readFile } from 'node:fs/promises';
import { dirname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import { build } from 'esbuild';
import puppeteer from 'puppeteer-core';

const HERE = dirname(fileURLToPath(import.meta.url));
const PUBLIC = join(HERE, 'node_modules/@grafana/ui/dist/public');
const FONTS = join(HERE, 'node_modules/@fontsource/inter/files');
const PAGE = `<!doctype html><meta charset="utf-8"><title>MLX Manager</title>
<link rel="stylesheet" href="/page.css"><style>
body { margin: 0; font-family: Inter, Helvetica, Arial, sans-serif }
.empty { display: flex; height: 100%; align-items: center; justify-content: center; opacity: .6 }
</style><div id="root"></div><script src="/page.js"></script>`;
const FACES = { Regular: '400-normal', Italic: '400-italic', Medium: '500-normal' };
const TYPES = { '.svg': 'image/svg+xml', '.js': 'text/javascript', '.css': 'text/css', '.woff2': 'font/woff2' };

const { values: options } = parseArgs({
  options: {
    prometheus: { type: 'string' },
    out: { type: 'string' },
    minutes: { type: 'string', default: '10' },
    every: { type: 'string', default: '2s' },
    theme: { type: 'string', default: 'dark' },
    model: { type: 'string', default: '' },
    width: { type: 'string', default: '1600' },
    chromium: { type: 'string', default: '/usr/bin/chromium' },
  },
});

async function bundle() {
  const { outputFiles } = await build({
    absWorkingDir: HERE,
    entryPoints: ['page.tsx'],
    bundle: true,
    write: false,
    outdir: '/',
    jsx: 'automatic',
    // Scenes asks for version 6, @grafana/ui for 5 and its bridge to 6, which 6 needs not.
    alias: { 'react-router-dom-v5-compat': 'react-router-dom' },
    define: { 'process.env.NODE_ENV': '"production"' },
    loader: { '.ttf': 'empty', '.svg': 'dataurl', '.woff2': 'dataurl' },
    logLevel: 'error',
  });
  return new Map(outputFiles.map(({ path, contents }) => [path, Buffer.from(contents)]));
}

/** The file behind one of the page's addresses; Grafana's build puts fonts and icons there. */
function place(path) {
  const face = /^\/public\/fonts\/inter\/Inter-(\w+)\.woff2$/.exec(path)?.[1];
  return face === undefined
    ? join(PUBLIC, normalize(path.replace(/^\/public\/(build\/)?/, '/')))
    : join(FONTS, `inter-latin-${FACES[face]}.woff2`);
}

async function serve(files) {
  const server = createServer(async (request, response) => {
    const path = new URL(request.url, 'http://page').pathname;
    const found = path.startsWith('/public/')
      ? await readFile(place(path)).catch(() => null)
      : files.get(path) ?? (path === '/' ? PAGE : null);
    response.writeHead(found === null ? 404 : 200, {
      'content-type': TYPES[/\.\w+$/.exec(path)?.[0]] ?? 'text/html',
    });
    response.end(found ?? '');
  });
  await new Promise((listening) => server.listen(0, '127.0.0.1', listening));
  return server;
}

/** Runs in the page. */
function panels() {
  return [...document.querySelectorAll('section[data-viz-panel-key], [data-testid^="data-testid Panel header"]')]
    .map((panel) => ({
      title: panel.querySelector('h2, [data-testid="data-testid header-container"] h2')?.textContent,
      empty: panel.querySelector('.empty') !== null,
      text: panel.innerText.split('\n').filter(Boolean),
    }));
}

const server = await serve(await bundle());
const browser = await puppeteer.launch({
  executablePath: options.chromium,
  args: ['--no-sandbox', '--disable-gpu', '--force-device-scale-factor=1'],
});
try {
  const page = await browser.newPage();
  await page.setViewport({ width: Number(options.width), height: 1000 });
  const complaints = [];
  page.on('pageerror', (error) => complaints.push(String(error.stack ?? error)));
  page.on('console', (message) => {
    // Some icons are only in Grafana's own build.
    const missing = /\/(icons\/|favicon)/.test(message.location().url ?? '');
    if (message.type() === 'error' && !missing) {
      complaints.push(`${message.text()} ${message.location().url ?? ''}`);
    }
  });
  const asked = new URLSearchParams({
    prometheus: options.prometheus,
    minutes: options.minutes,
    every: options.every,
    theme: options.theme,
  });
  await page.goto(`http://127.0.0.1:${server.address().port}/?${asked}`);
  const painted = () => page.evaluate(() => new Promise(requestAnimationFrame));
  await page.waitForSelector('[data-viz-panel-key]');
  while (await page.evaluate(() => window.open())) {
    await painted();
  }
  if (options.model !== '') {
    await page.evaluate((model) => window.choose('model', [model]), options.model);
    await painted();
  }
  await page
    .waitForFunction(() => window.waiting() === 0, { timeout: 60000, polling: 200 })
    .catch((error) => complaints.push(`not all queries are answered: ${error}`));
  const height = await page.evaluate(() => document.documentElement.scrollHeight);
  await page.setViewport({ width: Number(options.width), height });
  // The panels' sizes follow the window's a little later.
  await page.waitForNetworkIdle();
  await page.screenshot({ path: options.out });
  console.log(JSON.stringify({ complaints, panels: await page.evaluate(panels) }, null, 1));
} finally {
  await browser.close();
  server.close();
}
