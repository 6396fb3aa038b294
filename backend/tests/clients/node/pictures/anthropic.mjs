// Anthropic's own package shows pictures: in a message, and in a tool's result.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";

const [red, , url] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 });
const ask = { model: "sees", max_tokens: 8, temperature: 0 };
const image = {
  type: "image",
  source: { type: "base64", media_type: "image/png", data: readFileSync(red).toString("base64") },
};
const text = { type: "text", text: "What is this?" };

const messages = [{ role: "user", content: [image, text] }];
const whole = await client.messages.create({ ...ask, messages });
const streamed = await client.messages.stream({ ...ask, messages }).finalMessage();
assert.deepEqual(streamed.content, whole.content);
const { input_tokens } = await client.messages.countTokens({ model: ask.model, messages });
const bare = await client.messages.countTokens({ model: ask.model, messages: [{ role: "user", content: [text] }] });
assert.ok(input_tokens > bare.input_tokens + 10);

const tools = [{ name: "shot", description: "Take a screenshot", input_schema: { type: "object", properties: {} } }];
const turns = [
  { role: "user", content: "Take one." },
  { role: "assistant", content: [{ type: "tool_use", id: "t", name: "shot", input: {} }] },
  { role: "user", content: [{ type: "tool_result", tool_use_id: "t", content: [text, image] }] },
];
const seen = await client.messages.create({ ...ask, tools, messages: turns });
assert.ok(seen.usage.input_tokens + seen.usage.cache_read_input_tokens > 20);

const wrong = { ...image, source: { ...image.source, media_type: "image/webp" } };
await assert.rejects(client.messages.create({ ...ask, messages: [{ role: "user", content: [wrong] }] }), (error) => {
  assert.equal(error.status, 400);
  assert.match(error.message, /messages\[0\]\.content\[0\]\.source\.data/);
  return true;
});
