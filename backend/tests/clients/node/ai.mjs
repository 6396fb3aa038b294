// The Vercel AI SDK over chat completions and Responses: text, streams, tools in steps, objects; and
// over Responses what was said before, which it refers to.

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

await references();

// What was kept is referred to: all texts and all thinking of the assistant, and no call.
async function references() {
  const sent = [];
  const watched = createOpenAI({
    baseURL,
    apiKey: "none",
    fetch: (url, init) => {
      sent.push(JSON.parse(init.body).input);
      return fetch(url, init);
    },
  });
  const ask = { model: watched(id), temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
  const says = (content) => [{ role: "user", content }];
  const kinds = (input) => input.map((item) => item.type ?? item.role);

  const messages = says("What is 17 + 25?");
  const steps = { ...ask, tools, stopWhen: stepCountIs(3) };
  for (const question of ["How do I stop the server?", "What is 30 + 12?"]) {
    const turn = streamText({ ...steps, messages, onError: () => {} });
    await turn.consumeStream();
    messages.push(...(await turn.response).messages, ...says(question));
  }
  const last = await generateText({ ...steps, messages });
  assert.match(last.text, /42/);
  assert.deepEqual(kinds(sent.at(-1)), [
    ...["user", "function_call", "function_call_output", "item_reference"],
    ...["user", "item_reference", "user", "function_call", "function_call_output"],
  ]);

  // No model here thinks: its thinking is the client's, and has been kept since it was sent.
  const made = await fetch(`${baseURL}/responses`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      input: [
        ...says("What is 17 + 25?"),
        { type: "reasoning", id: "rs_1", content: [{ type: "reasoning_text", text: "Add." }] },
        { type: "function_call", call_id: "c", name: "add", arguments: '{"a":17,"b":25}' },
        { type: "function_call_output", call_id: "c", output: "42" },
      ],
    }),
  });
  const [said] = (await made.json()).output;
  const of = (itemId) => ({ providerOptions: { openai: { itemId } } });
  const call = { toolCallId: "c", toolName: "add" };
  const output = { type: "text", value: "42" };
  const thought = await generateText({
    ...steps,
    messages: [
      ...says("What is 17 + 25?"),
      {
        role: "assistant",
        content: [
          { type: "reasoning", text: "Add.", ...of("rs_1") },
          { type: "tool-call", ...call, input: { a: 17, b: 25 } },
        ],
      },
      { role: "tool", content: [{ type: "tool-result", ...call, output }] },
      { role: "assistant", content: [{ type: "text", text: said.content[0].text, ...of(said.id) }] },
      ...says("What is 30 + 12?"),
    ],
  });
  assert.match(thought.text, /42/);
  assert.deepEqual(kinds(sent.at(-2)), [
    ...["user", "item_reference", "function_call", "function_call_output", "item_reference"],
    "user",
  ]);
  const unkept = [{ type: "text", text: "x", ...of("msg_unkept") }];
  const lost = generateText({ ...ask, messages: [{ role: "assistant", content: unkept }] });
  await assert.rejects(lost, /input\[0\].*msg_unkept/);
}
