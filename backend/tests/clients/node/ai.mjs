// The Vercel AI SDK over chat completions and Responses: text, streams, tools in steps, objects.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2];
const id = "mlx-manager/demo";
const openai = createOpenAI({ baseURL, apiKey: "none" });
const own = createOpenAICompatible({
  name: "mlx-manager",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const tools = {
  add: tool({
    description: "Add two numbers",
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => String(a + b),
  }),
};
const person = Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) });

for (const model of [own(id), openai.chat(id), openai.responses(id)]) {
  const ask = { model, temperature: 0, maxRetries: 0, maxOutputTokens: 200 };

  const question = "How do I stop the server?";
  const whole = await generateText({ ...ask, prompt: question });
  assert.match(whole.text, /Ctrl-C/);
  assert.equal(whole.finishReason, "stop");
  const stream = streamText({ ...ask, prompt: question });
  const pieces = [];
  for await (const piece of stream.textStream) pieces.push(piece);
  assert.equal(pieces.join(""), whole.text);
  assert.equal((await stream.usage).totalTokens, whole.usage.totalTokens);

  const steps = { ...ask, tools, stopWhen: stepCountIs(3), prompt: "What is 17 + 25?" };
  const added = await generateText(steps);
  assert.equal(added.steps.length, 2);
  assert.deepEqual(added.steps[0].toolCalls[0].input, { a: 17, b: 25 });
  assert.match(added.text, /42/);
  const running = streamText(steps);
  await running.consumeStream();
  assert.equal(await running.text, added.text);
  assert.equal((await running.steps).length, 2);
  const forced = await generateText({ ...ask, tools, toolChoice: "required", prompt: "Hello!" });
  assert.equal(forced.toolCalls[0].toolName, "add");

  const asked = { ...ask, output: person, prompt: "My name is Ada. I am 36 years old." };
  const made = await generateText(asked);
  assert.deepEqual(made.output, { name: "Ada", age: 36 });
  const making = streamText(asked);
  await making.consumeStream();
  assert.deepEqual(await making.output, made.output);
}
