// What is tried in a browser, by name. `servers.open` asks for no key; `servers.closed` does, and has
// an admin token.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';

const AXE = createRequire(import.meta.url).resolve('axe-core');
export const KEY = 'a-key-of-the-tests';
export const TOKEN = 'an-admin-token-of-the-tests';

export const scenarios = {};

function scenario(name, run, settings = {}) {
  scenarios[name] = { run, settings };
}

async function open({ page, servers }, path = '/', server = 'open') {
  await page.goto(servers[server] + path);
}

async function say({ page }, words, { model, wait = true } = {}) {
  if (model) await choose({ page }, model);
  await page.fill('#composer', words);
  await page.press('#composer', 'Enter');
  if (wait) await answered({ page });
}

async function choose({ page }, model) {
  await page.locator(`#model option[value="${model}"]`).waitFor({ state: 'attached' });
  await page.selectOption('#model', model);
}

async function answered({ page }) {
  await page.locator('article.assistant').last().locator('footer').waitFor();
}

const answers = ({ page }) => page.locator('article.assistant');
const questions = ({ page }) => page.locator('article.user');

async function accessible({ page }, where) {
  await page.addScriptTag({ path: AXE });
  const found = await page.evaluate(() => globalThis.axe.run({ resultTypes: ['violations'] }));
  const told = found.violations
    .filter(({ impact }) => impact === 'serious' || impact === 'critical')
    .map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html).join(' ')}`);
  assert.deepEqual(told, [], where);
}

/** The longest tasks of the page's main thread since the tracing began, in ms of the processor. */
async function longest({ browser }) {
  const { traceEvents } = JSON.parse((await browser.stopTracing()).toString());
  const names = traceEvents.filter(({ name, args }) => name === 'thread_name' && /CrRendererMain/.test(args.name));
  const mains = new Set(names.map(({ pid, tid }) => `${pid} ${tid}`));
  return traceEvents
    .filter(({ pid, tid, tdur }) => tdur && mains.has(`${pid} ${tid}`))
    .map(({ tdur }) => Math.round(tdur / 1000))
    .sort((one, other) => other - one)
    .slice(0, 3);
}

// -- chat --------------------------------------------------------------------------------------

scenario('the first answer streams', async (its) => {
  await open(its);
  await its.page.getByRole('button', { name: 'How do I list the models?' }).click();
  await answered(its);
  assert.match(await answers(its).last().innerText(), /mlx-manager list/);
  assert.match(await answers(its).last().innerText(), /\d+ \+ \d+ tokens/);
  const paint = await its.page.evaluate(
    () => performance.getEntriesByName('first-contentful-paint')[0].startTime,
  );
  await its.ask('tell', `the first paint was after ${Math.round(paint)} ms`);
  await its.shot('chat');
});

scenario('an answer is stopped and made again', async (its) => {
  await open(its);
  await say(its, 'go on', { model: 'long', wait: false });
  await its.page.waitForFunction(
    () => document.querySelector('article.assistant .prose')?.innerText.length > 40,
  );
  await its.page.getByRole('button', { name: 'Stop' }).click();
  await answered(its);
  assert.match(await answers(its).last().innerText(), /Stopped\./);
  await choose(its, 'mlx-manager/demo');
  await its.page.getByRole('button', { name: 'Another answer' }).click();
  await its.page.getByLabel('Branch 2 of 2').waitFor();
  await answered(its);
});

scenario('an edit is a branch, and a reload keeps both', async (its) => {
  const { page } = its;
  await open(its);
  await say(its, 'How do I list the models?');
  await questions(its).getByRole('button', { name: 'Edit' }).click();
  await page.getByLabel('Edit the message').fill('How do I change the port?');
  await page.getByRole('button', { name: 'Ask again' }).click();
  await questions(its).getByLabel('Branch 2 of 2').waitFor();
  await answered(its);
  const second = await answers(its).last().locator('.prose').innerText();
  await page.reload();
  await answered(its);
  assert.equal(await answers(its).last().locator('.prose').innerText(), second);
  await questions(its).getByRole('button', { name: 'Earlier branch' }).click();
  await questions(its).getByText('How do I list the models?').waitFor();
  assert.match(await answers(its).last().innerText(), /mlx-manager list/);
  await its.shot('branches');
});

scenario('conversations are listed, searched and deleted', async (its) => {
  const { page } = its;
  await open(its);
  await say(its, 'How do I list the models?');
  await page.getByRole('button', { name: 'New conversation' }).click();
  await say(its, 'How do I change the port?');
  const list = page.getByRole('navigation', { name: 'Conversations' });
  assert.equal(await list.getByRole('link').count(), 2);
  await page.keyboard.press('Control+k');
  await page.keyboard.type('list models');
  await list.getByRole('link', { name: 'How do I change the port?' }).waitFor({ state: 'detached' });
  await list.getByRole('link').click();
  assert.match(await answers(its).last().innerText(), /mlx-manager list/);
  page.on('dialog', (dialog) => dialog.accept());
  await list.getByRole('listitem').hover();
  await list.getByRole('button', { name: 'Delete' }).click();
  await list.getByText('None has these words.').waitFor();
});

scenario('reasoning is folded', async (its) => {
  await open(its);
  await say(its, 'think', { model: 'thinker' });
  const answer = answers(its).last();
  assert.match(await answer.locator('.prose').last().innerText(), /^A heading/);
  const folded = answer.locator('details.reasoning');
  assert.equal(await folded.evaluate((element) => element.open), false);
  await folded.locator('summary').click();
  await folded.getByText('Hm, let me see.').waitFor();
});

scenario('a call of the calculator is a card with its result', async (its) => {
  const { page } = its;
  await open(its);
  await page.getByRole('button', { name: 'How it answers' }).click();
  await page.getByLabel('Calculator').check();
  await its.shot('drawer');
  await page.keyboard.press('Escape');
  await say(its, 'How much is it?', { model: 'thinker' });
  await answers(its).nth(1).waitFor();
  await answered(its);
  const card = answers(its).first().locator('.call');
  assert.match(await card.innerText(), /Calculator[\s\S]*6 \* 7[\s\S]*"value": 42/);
  assert.match(await answers(its).last().innerText(), /It is/);
  await its.shot('tools');
});

scenario('an answer fits a JSON schema', async (its) => {
  const { page } = its;
  await open(its);
  await page.getByRole('button', { name: 'How it answers' }).click();
  await page.getByLabel(/JSON schema/).fill('{"type": "objec');
  await page.getByText(/This is no JSON/).waitFor();
  await page
    .getByLabel(/JSON schema/)
    .fill('{"type":"object","properties":{"yes":{"type":"boolean"}},"required":["yes"]}');
  await page.getByLabel('Temperature').fill('0');
  await page.keyboard.press('Escape');
  await say(its, 'yes or no?');
  const said = await answers(its).last().locator('.prose').innerText();
  assert.equal(typeof JSON.parse(said).yes, 'boolean');
});

scenario('a conversation is exported as Markdown and JSON', async (its) => {
  const { page } = its;
  await open(its);
  await say(its, 'How do I list the models?');
  const saved = {};
  for (const kind of ['Markdown', 'JSON']) {
    await page.getByRole('button', { name: 'Export' }).click();
    const coming = page.waitForEvent('download');
    await page.getByRole('button', { name: new RegExp(kind) }).click();
    const stream = await (await coming).createReadStream();
    saved[kind] = Buffer.concat(await stream.toArray()).toString();
  }
  assert.match(saved.Markdown, /^# How do I list the models\?\n\n## You\n\n[\s\S]*`mlx-manager list`/);
  const { messages } = JSON.parse(saved.JSON);
  assert.deepEqual(Object.values(messages).map(({ role }) => role).sort(), ['assistant', 'user']);
});

scenario('what a model writes can do nothing', async (its) => {
  const { page } = its;
  const asked = [];
  page.on('request', (request) => asked.push(request.url()));
  await open(its);
  await say(its, 'show me', { model: 'evil' });
  const answer = answers(its).last();
  await answer.getByText('The end.').waitFor();
  await page.waitForTimeout(200);
  assert.equal(await page.evaluate(() => globalThis.harmed), undefined);
  for (const tag of ['img', 'iframe', 'form', 'script', 'style', 'svg', 'object', 'input']) {
    assert.equal(await answer.locator(`.block ${tag}`).count(), 0, tag);
  }
  assert.match(await answer.innerText(), /<img src=x onerror=/);
  const attributes = await answer.locator('.prose').evaluate((element) =>
    [...element.querySelectorAll('.block *')].flatMap((each) => each.getAttributeNames()),
  );
  assert.deepEqual(attributes.filter((name) => /^on|style|^id$|^class$/.test(name)), []);
  const links = await answer.locator('.prose a').evaluateAll((all) => all.map((a) => [a.href, a.rel]));
  for (const [href, rel] of links) {
    assert.match(href, /^(https?:|$)/);
    assert.match(rel, /noopener/);
  }
  assert.deepEqual(asked.filter((url) => !url.startsWith(its.servers.open)), []);
  await its.shot('injection');
});

scenario('Markdown, code and formulas are drawn', async (its) => {
  await open(its);
  await say(its, 'show me', { model: 'thinker' });
  const answer = answers(its).last();
  await answer.locator('math').first().waitFor();
  await answer.locator('pre .hljs-keyword').first().waitFor();
  assert.equal(await answer.locator('table td').count(), 2);
  assert.equal(await answer.locator('math[display="block"]').count(), 1);
  await answer.getByRole('button', { name: 'Copy the code' }).click();
  assert.match(await its.page.evaluate(() => navigator.clipboard.readText()), /^def f\(/);
  await its.shot('markdown');
});

scenario('pictures are pasted where the model sees them, and answered', async (its) => {
  const { page } = its;
  const sent = [];
  const received = [];
  page.on('request', (request) => {
    if (request.url().endsWith('/chat/completions')) sent.push(request.postDataJSON());
  });
  page.on('response', (response) => {
    if (response.url().endsWith('/chat/completions')) received.push(response.status());
  });
  await open(its);
  await choose(its, 'thinker');
  assert.equal(await page.getByLabel('Add a picture').count(), 0);
  await choose(its, 'seeing');
  await page.getByLabel('Add a picture').waitFor({ state: 'attached' });
  await page.getByRole('button', { name: 'How it answers' }).click();
  await page.getByLabel('Most tokens').fill('8');
  await page.keyboard.press('Escape');
  await page.locator('#composer').evaluate(async (box) => {
    const canvas = document.createElement('canvas');
    canvas.width = canvas.height = 80;
    const drawn = canvas.getContext('2d');
    drawn.fillStyle = 'red';
    drawn.fillRect(10, 10, 50, 50);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve));
    const clipboardData = new DataTransfer();
    clipboardData.items.add(new File([blob], 'a.png', { type: 'image/png' }));
    box.dispatchEvent(new ClipboardEvent('paste', { clipboardData, bubbles: true, cancelable: true }));
  });
  await page.getByAltText('Picture 1 to send').waitFor();
  await its.shot('picture');
  await say(its, 'What is this?');
  await questions(its).getByAltText('Picture 1 of the question').waitFor();
  assert.match(await answers(its).last().innerText(), /\+ [1-8] tokens/);
  const [picture, text] = sent[0].messages[0].content;
  assert.match(picture.image_url.url, /^data:image\/png;base64,/);
  assert.equal(text.text, 'What is this?');
  await say(its, 'And now?');
  assert.match(await answers(its).last().innerText(), /\+ [1-8] tokens/);
  assert.equal(sent[1].messages[0].content[0].image_url.url, picture.image_url.url);
  assert.deepEqual(received, [200, 200]);
  await its.shot('picture-answered');
});

scenario('a long answer is drawn without a halt', async (its) => {
  const { page } = its;
  await open(its);
  await page.getByRole('button', { name: 'How it answers' }).click();
  await page.getByLabel('Most tokens').fill('4000');
  await page.keyboard.press('Escape');
  await its.browser.startTracing(page, { categories: ['toplevel'] });
  await say(its, 'go on', { model: 'long' });
  assert.match(await answers(its).last().innerText(), /4,000 tokens · [\d,.]+ tokens\/s/);
  const tasks = await longest(its);
  const length = (await answers(its).last().locator('.prose').innerText()).length;
  await its.ask('tell', `${length} characters; longest tasks: ${tasks} ms of the processor`);
  assert.ok(length > 10_000);
  const near = await page.evaluate(() => {
    const scroller = document.querySelector('[role=log]');
    return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  });
  assert.ok(near < 80, `the end is ${near} pixels below`);
});

scenario('keys lead everywhere', async (its) => {
  const { page } = its;
  await open(its);
  await say(its, 'How do I list the models?');
  await page.press('#composer', 'ArrowUp');
  await page.getByLabel('Edit the message').waitFor();
  await page.keyboard.press('Escape');
  await page.locator('[role=log]').focus();
  await page.keyboard.press('?');
  await page.getByRole('dialog', { name: 'Keys' }).waitFor();
  await its.shot('keys');
  await page.keyboard.press('Escape');
  await page.locator('[role=log]').focus();
  await page.keyboard.press('/');
  assert.equal(await page.evaluate(() => document.activeElement.id), 'composer');
  await page.keyboard.press('Control+Shift+O');
  await page.getByRole('heading', { name: /Talk to/ }).waitFor();
});

// -- access ------------------------------------------------------------------------------------

scenario('a key is asked for, and a wrong one is told', async (its) => {
  const { page } = its;
  await open(its, '/', 'closed');
  await page.getByLabel('API key').fill('a wrong one');
  await page.getByRole('button', { name: 'Continue' }).click();
  await page.getByText('The server does not know this key.').waitFor();
  await its.shot('wrong key');
  await page.getByLabel('API key').fill(KEY);
  await page.getByRole('button', { name: 'Continue' }).click();
  await say(its, 'How do I list the models?');
  await page.reload();
  await answered(its);
  assert.deepEqual(await its.context.cookies(), []);
  assert.equal(await page.evaluate((key) => JSON.stringify(localStorage).includes(key), KEY), false);
  const other = await its.context.newPage();
  await other.goto(its.servers.closed);
  await other.getByLabel('API key').waitFor();
});

scenario('the page needs no other site and complains of nothing', async (its) => {
  const { page } = its;
  const asked = [];
  page.on('request', (request) => asked.push(request.url()));
  for (const name of ['chat', 'models', 'now', 'log']) {
    await open(its, `/#/${name}`);
    await page.locator('main').waitFor();
  }
  assert.deepEqual(asked.filter((url) => !url.startsWith(its.servers.open)), []);
});

// -- the owner's pages -------------------------------------------------------------------------

const row = ({ page }, name) => page.getByRole('listitem', { name, exact: true }).first();

scenario('a model is loaded, pinned and unloaded', async (its) => {
  await open(its, '/#/models');
  const model = row(its, 'spare');
  await model.getByRole('button', { name: 'Load', exact: true }).click();
  await model.getByText('loaded', { exact: true }).waitFor();
  await model.getByRole('button', { name: 'Pin' }).click();
  await model.getByText('pinned', { exact: true }).waitFor();
  await model.getByRole('button', { name: 'Pin' }).click();
  await model.getByRole('button', { name: 'Unload' }).click();
  await model.getByRole('button', { name: 'Load', exact: true }).waitFor();
});

scenario('a model is found on the hub, pulled with a pause, and deleted', async (its) => {
  const { page } = its;
  await its.ask('hold');
  await open(its, '/#/models');
  await page.getByLabel('Search the hub by name').fill('demo 4bit');
  await page.keyboard.press('Enter');
  const found = page.locator('section[aria-labelledby=hub]').getByRole('listitem', { name: 'one/demo-4bit' });
  await found.getByRole('button', { name: 'Does it fit?' }).click();
  await found.getByText(/room for [\d,]+ tokens of all rows/).waitFor();
  await found.getByText('apache-2.0', { exact: true }).waitFor();
  await found.getByRole('button', { name: 'Download' }).click();
  const download = page.getByRole('listitem', { name: 'Download of one/demo-4bit' });
  await download.getByText(/B of/).waitFor();
  await download.getByRole('button', { name: 'Pause' }).click();
  await download.getByText('paused').waitFor();
  await its.shot('download');
  await its.ask('release');
  await download.getByRole('button', { name: 'Go on' }).click();
  await download.getByText('is here').waitFor();
  const model = row(its, 'one/demo-4bit');
  page.on('dialog', (dialog) => dialog.accept());
  await model.getByRole('button', { name: 'Delete' }).click();
  await page.getByRole('button', { name: 'Settings of one/demo-4bit' }).waitFor({ state: 'detached' });
});

scenario('settings of a model are written into the owner’s file', async (its) => {
  const { page } = its;
  await open(its, '/#/models');
  await page.getByRole('button', { name: 'Settings of thinker' }).click();
  await page.getByLabel(/Unload after/).fill('soon');
  await page.getByRole('button', { name: 'Show what changes' }).click();
  await page.getByText(/must be seconds/).waitFor();
  await page.getByLabel(/Unload after/).fill('90m');
  await page.getByLabel(/Other names/).fill('wise, older');
  await page.getByRole('button', { name: 'Show what changes' }).click();
  assert.match(await page.getByLabel('Changes').innerText(), /\+aliases = \["wise", "older"\]/);
  await its.shot('settings');
  await page.getByRole('button', { name: 'Write it' }).click();
  await page.getByText(/also wise, older/).waitFor();
  assert.match(await its.ask('models_file'), /# of the owner[\s\S]*ttl = "90m"/);
});

scenario('what runs is shown and cancelled', async (its) => {
  const { page } = its;
  const asking = await its.context.newPage();
  await open({ ...its, page: asking });
  await say({ page: asking }, 'go on', { model: 'long', wait: false });
  await open(its, '/#/now');
  const running = page.getByRole('row').filter({ hasText: 'answers' });
  await running.waitFor();
  await its.shot('now busy');
  await running.getByRole('button', { name: /^Cancel/ }).click();
  await page.getByText('Nobody is waiting').waitFor();
  await page.getByRole('row').filter({ hasText: 'request_cancelled' }).first().waitFor();
  await asking.getByText('The server\'s owner has ended this request.').waitFor();
});

scenario('a missed prefix is explained', async (its) => {
  const { page } = its;
  const ask = (content) =>
    page.request.post(`${its.servers.open}/v1/chat/completions`, {
      data: {
        max_tokens: 2,
        messages: [
          { role: 'system', content: 'Speak like this, and not like that. '.repeat(20) + content },
          { role: 'user', content: 'Tell me more of it, please. '.repeat(20) },
        ],
      },
    });
  await ask('It is Monday.');
  await ask('It is Tuesday.');
  await open(its, '/#/now');
  await page.getByText(/At token \d+: messages\[0\] \(system\) from \d+ on has changed/).first().waitFor();
});

scenario('the part of drafts that is accepted is shown', async (its) => {
  const { page } = its;
  const ask = async (more) => {
    const data = { model: 'mlx-manager/demo', temperature: 0, ...more };
    data.messages = [{ role: 'user', content: 'How do I stop the server?' }];
    const answer = await page.request.post(`${its.servers.open}/v1/chat/completions`, { data });
    return (await answer.json()).choices[0].message.content;
  };
  const content = await ask({});
  await ask({ prediction: { type: 'content', content } });
  await open(its, '/#/models');
  await row(its, 'mlx-manager/demo').getByText(/ \d+ % of drafts accepted/).waitFor();
  await open(its, '/#/now');
  await page.getByText('Accepted of drafts', { exact: true }).waitFor();
});

scenario('the admin token opens what is the owner’s', async (its) => {
  const { page } = its;
  await open(its, '/#/now', 'closed');
  await page.getByLabel('Admin token').fill(KEY);
  await page.getByRole('button', { name: 'Continue' }).click();
  await page.getByText('This is another token than the server has.').waitFor();
  await page.getByLabel('Admin token').fill(TOKEN);
  await page.getByRole('button', { name: 'Continue' }).click();
  await page.getByRole('heading', { name: 'Memory' }).waitFor();
  await page.getByRole('link', { name: 'Log' }).click();
  await page.locator('main.ready').waitFor();
  await page.getByRole('button', { name: 'Forget the key' }).click();
  await page.getByLabel('Admin token').waitFor();
});

scenario('a page of another site can do nothing', async (its) => {
  const { page, servers } = its;
  const there = JSON.stringify(servers.open);
  await page.route('http://127.0.0.1:9/**', (route) =>
    route.fulfill({
      contentType: 'text/html',
      body: `<iframe src=${there}></iframe>
        <form method=post enctype=text/plain action="${servers.open}/v1/admin/drain"><input name=x></form>`,
    }),
  );
  await page.goto('http://127.0.0.1:9/');
  const read = await page.evaluate(async (url) => {
    const tried = {};
    const all = [
      ['GET', '/v1/admin/state', {}],
      ['POST', '/v1/admin/drain', {}],
      ['POST', '/v1/admin/drain', { mode: 'no-cors' }],
      ['POST', '/v1/chat/completions', { body: '{"messages":[]}', mode: 'no-cors' }],
    ];
    for (const [method, path, more] of all) {
      const answer = await fetch(url + path, { method, ...more }).catch(() => null);
      tried[`${method} ${path} ${more.mode ?? ''}`] = answer && answer.type !== 'opaque';
    }
    return tried;
  }, servers.open);
  assert.deepEqual(Object.values(read).filter(Boolean), [], JSON.stringify(read));
  // A form's answer takes the place of the page.
  const [answer] = await Promise.all([
    page.waitForResponse(/admin\/drain/),
    page.evaluate(() => document.forms[0].submit()),
  ]);
  assert.equal(answer.status(), 403);
  const state = await (await page.request.get(`${servers.open}/v1/admin/state`)).json();
  assert.equal(state.draining, false);
  its.complaints.length = 0; // The browser tells of the frame and of the requests that it refused.
});

// -- looks -------------------------------------------------------------------------------------

for (const [look, settings] of [
  ['light', { colorScheme: 'light' }],
  ['dark', { colorScheme: 'dark' }],
  ['phone', { colorScheme: 'light', viewport: { width: 390, height: 780 }, hasTouch: true }],
]) {
  scenario(
    `${look}: every page can be read by all`,
    async (its) => {
      const { page } = its;
      await open(its);
      await say(its, 'show me', { model: 'thinker' });
      await accessible(its, 'chat');
      await its.shot(`chat ${look}`);
      const shown = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
      assert.equal(shown === 'rgb(23, 25, 24)', look === 'dark');
      for (const name of ['models', 'now', 'log']) {
        await page.getByRole('link', { name, exact: false }).first().click();
        await page.locator('main.ready').waitFor();
        await accessible(its, name);
        await its.shot(`${name} ${look}`);
      }
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      assert.ok(wide <= 0, `the page is ${wide} pixels too wide`);
    },
    { ...settings, bypassCSP: true },
  );
}
