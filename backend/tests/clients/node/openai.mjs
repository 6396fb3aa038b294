// openai's own package over chat completions and Responses: streamed, with tools and schemas.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const url = process.argv[2];
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const model = "mlx-manager/demo";
const question = "How do I stop the server?";
const sum = "What is 17 + 25?";
const add = {
  name: "add",
  description: "Add two numbers",
  parameters: {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
    additionalProperties: false,
  },
};
const Person = z.object({ name: z.string(), age: z.number().int() });
const says = (content) => [{ role: "user", content }];

await chat();
await responses();
await errors();

async function chat() {
  const ask = { model, temperature: 0 };
  const whole = await client.chat.completions.create({ ...ask, messages: says(question) });
  assert.match(whole.choices[0].message.content, /Ctrl-C/);
  const stream = client.chat.completions.stream({
    ...ask,
    messages: says(question),
    stream_options: { include_usage: true },
  });
  let deltas = "";
  stream.on("content", (delta) => (deltas += delta));
  const streamed = await stream.finalChatCompletion();
  assert.equal(deltas, whole.choices[0].message.content);
  assert.equal(streamed.choices[0].message.content, deltas);
  assert.equal(streamed.choices[0].finish_reason, whole.choices[0].finish_reason);
  assert.equal(streamed.usage.total_tokens, whole.usage.total_tokens);

  const tools = [{ type: "function", function: add }];
  const messages = says(sum);
  const called = await client.chat.completions.create({ ...ask, messages, tools });
  const again = await client.chat.completions
    .stream({ ...ask, messages, tools })
    .finalChatCompletion();
  assert.equal(again.choices[0].finish_reason, "tool_calls");
  const { message } = again.choices[0];
  assert.equal(message.content, called.choices[0].message.content);
  const bare = (calls) => calls.map((call) => call.function);
  assert.deepEqual(
    bare(message.tool_calls).map(({ name, arguments: text }) => [name, text]),
    bare(called.choices[0].message.tool_calls).map(({ name, arguments: text }) => [name, text]),
  );
  const { a, b } = JSON.parse(message.tool_calls[0].function.arguments);
  messages.push(message, {
    role: "tool",
    tool_call_id: message.tool_calls[0].id,
    content: String(a + b),
  });
  const answer = await client.chat.completions.create({ ...ask, messages, tools });
  assert.match(answer.choices[0].message.content, /42/);

  const runner = client.chat.completions.runTools({
    ...ask,
    stream: true,
    messages: says(sum),
    tools: [
      {
        type: "function",
        function: { ...add, parse: JSON.parse, function: ({ a, b }) => String(a + b) },
      },
    ],
  });
  assert.equal(await runner.finalContent(), answer.choices[0].message.content);

  const response_format = zodResponseFormat(Person, "person");
  const person = says("My name is Ada. I am 36 years old.");
  const parsed = await client.chat.completions.parse({ ...ask, messages: person, response_format });
  assert.deepEqual(parsed.choices[0].message.parsed, { name: "Ada", age: 36 });
  const typed = await client.chat.completions
    .stream({ ...ask, messages: person, response_format })
    .finalChatCompletion();
  assert.deepEqual(typed.choices[0].message.parsed, { name: "Ada", age: 36 });
}

async function responses() {
  const ask = { model, temperature: 0 };
  const whole = await client.responses.create({ ...ask, input: question });
  assert.match(whole.output_text, /Ctrl-C/);
  const streamed = await client.responses.stream({ ...ask, input: question }).finalResponse();
  assert.equal(streamed.output_text, whole.output_text);
  assert.equal(streamed.status, "completed");
  assert.equal(streamed.usage.total_tokens, whole.usage.total_tokens);

  const tools = [{ type: "function", strict: true, ...add }];
  const called = await client.responses.create({ ...ask, input: sum, tools });
  const again = await client.responses.stream({ ...ask, input: sum, tools }).finalResponse();
  const [call] = again.output;
  assert.equal(call.type, "function_call");
  assert.deepEqual([call.name, call.arguments], [called.output[0].name, called.output[0].arguments]);
  const { a, b } = JSON.parse(call.arguments);
  const result = { type: "function_call_output", call_id: call.call_id, output: String(a + b) };
  const by_hand = await client.responses.create({
    ...ask,
    input: [...says(sum), { type: "function_call", call_id: call.call_id, name: call.name, arguments: call.arguments }, result],
    tools,
  });
  const going_on = await client.responses
    .stream({ ...ask, input: [result], previous_response_id: again.id, tools })
    .finalResponse();
  assert.match(going_on.output_text, /42/);
  assert.equal(by_hand.output_text, going_on.output_text);

  const parsed = await client.responses.parse({
    ...ask,
    input: "My name is Ada. I am 36 years old.",
    text: { format: zodTextFormat(Person, "person") },
  });
  assert.deepEqual(parsed.output_parsed, { name: "Ada", age: 36 });
}

async function errors() {
  const unknown = client.chat.completions.create({ model: "other", messages: says("Hello!") });
  await assert.rejects(unknown, OpenAI.NotFoundError);
}
