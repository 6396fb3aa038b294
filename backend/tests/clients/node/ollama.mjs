// Ollama's own package: lists, chats, streams, tools and schemas.

import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.argv[2].replace(/\/v1$/, "") });
const model = "mlx-manager/demo";
const options = { temperature: 0 };
const says = (content) => [{ role: "user", content }];
const add = {
  type: "function",
  function: {
    name: "add",
    description: "Add two numbers",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
  },
};

const { models } = await client.list();
assert.ok(models.some((found) => found.name === `${model}:latest`));
assert.ok((await client.show({ model })).capabilities.includes("tools"));

const messages = says("How do I stop the server?");
const whole = await client.chat({ model, messages, options });
assert.match(whole.message.content, /Ctrl-C/);
let streamed = "";
let last;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  streamed += part.message.content;
  last = part;
}
assert.equal(streamed, whole.message.content);
assert.equal(last.done, true);
assert.equal(last.eval_count, whole.eval_count);

const turns = says("What is 17 + 25?");
const called = await client.chat({ model, messages: turns, tools: [add], options });
const [call] = called.message.tool_calls;
assert.deepEqual(call.function.arguments, { a: 17, b: 25 });
turns.push(called.message, { role: "tool", tool_name: "add", content: "42" });
const answer = await client.chat({ model, messages: turns, tools: [add], options });
assert.match(answer.message.content, /42/);

const format = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const fitting = await client.chat({ model, messages: says("Ada is 36."), format, options });
assert.equal(typeof JSON.parse(fitting.message.content).name, "string");

await assert.rejects(client.chat({ model: "none", messages }), /none/);
