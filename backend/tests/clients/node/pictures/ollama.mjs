// Ollama's own package shows pictures: as bytes and as base64.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { Ollama } from "ollama";

const [red, blue, url] = process.argv.slice(2);
const client = new Ollama({ host: url.replace(/\/v1$/, "") });
const model = "sees";
const options = { temperature: 0, num_predict: 8 };
const content = "What is this?";
const ask = (...images) => client.chat({ model, options, messages: [{ role: "user", content, images }] });

assert.ok((await client.show({ model })).capabilities.includes("vision"));
const base64 = readFileSync(red).toString("base64");
const whole = await ask(base64);
const bytes = await ask(new Uint8Array(readFileSync(red)));
assert.equal(bytes.message.content, whole.message.content);
const bare = await ask();
assert.ok(whole.prompt_eval_count > bare.prompt_eval_count + 10);
const both = await ask(base64, readFileSync(blue).toString("base64"));
assert.ok(both.prompt_eval_count > whole.prompt_eval_count + 10);
const generated = await client.generate({ model, prompt: content, images: [base64], options });
assert.equal(generated.response, whole.message.content);
let streamed = "";
for await (const part of await client.chat({
  model,
  options,
  messages: [{ role: "user", content, images: [base64] }],
  stream: true,
})) {
  streamed += part.message.content;
}
assert.equal(streamed, whole.message.content);
await assert.rejects(ask("AAAA"), /messages\[0\]\.images\[0\]/);
