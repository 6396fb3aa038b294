// Anthropic's own package over Messages: streamed, with a tool over several turns, and a schema.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const url = process.argv[2].replace(/\/v1$/, "");
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const ask = { model: "claude-local", max_tokens: 200, temperature: 0 };
const tools = [
  {
    name: "add",
    description: "Add two numbers",
    input_schema: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
  },
];
const schema = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};
const says = (content) => [{ role: "user", content }];
const said = (message) => message.content.map(({ type, text, name, input }) => ({ type, text, name, input }));

// Both ways at once: what is streamed, accumulated, is what comes whole.
async function both(body) {
  const whole = await client.messages.create({ ...ask, ...body });
  const stream = client.messages.stream({ ...ask, ...body });
  let texts = "";
  stream.on("text", (delta) => (texts += delta));
  const streamed = await stream.finalMessage();
  assert.deepEqual(said(streamed), said(whole));
  assert.equal(streamed.stop_reason, whole.stop_reason);
  assert.equal(streamed.usage.output_tokens, whole.usage.output_tokens);
  const shown = whole.content.filter(({ type }) => type === "text").map(({ text }) => text);
  assert.equal(texts, shown.join(""));
  return streamed;
}

const told = await both({ messages: says("How do I stop the server?") });
assert.match(told.content[0].text, /Ctrl-C/);
assert.equal(told.stop_reason, "end_turn");

const messages = says("What is 17 + 25?");
const called = await both({ messages, tools });
assert.equal(called.stop_reason, "tool_use");
const [call] = called.content;
assert.deepEqual([call.name, call.input], ["add", { a: 17, b: 25 }]);
messages.push({ role: "assistant", content: called.content });
messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "42" }] });
const answer = await both({ messages, tools });
assert.match(answer.content[0].text, /42/);
messages.push({ role: "assistant", content: answer.content }, ...says("What is 30 + 12?"));
const next = await both({ messages, tools });
assert.deepEqual(next.content[0].input, { a: 30, b: 12 });
const forced = await both({ messages: says("Hello!"), tools, tool_choice: { type: "tool", name: "add" } });
assert.equal(forced.content[0].name, "add");

const person = await both({
  messages: says("My name is Ada. I am 36 years old."),
  output_config: { format: { type: "json_schema", schema } },
});
assert.deepEqual(JSON.parse(person.content[0].text), { name: "Ada", age: 36 });

const counted = await client.messages.countTokens({ model: ask.model, messages, tools });
assert.ok(counted.input_tokens > 20);
await assert.rejects(
  client.messages.create({ ...ask, model: "other", messages: says("Hello!") }),
  Anthropic.NotFoundError,
);
