// OpenAI's own package shows pictures, in chat and in Responses.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [red, blue, baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "sees";
const url = (file, type) => `data:${type};base64,${readFileSync(file).toString("base64")}`;
const redUrl = url(red, "image/png");
const text = "What is this?";
const greedy = { model, temperature: 0 };

const chat = (...urls) => ({
  ...greedy,
  max_tokens: 8,
  messages: [
    {
      role: "user",
      content: [...urls.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }],
    },
  ],
});
const whole = await client.chat.completions.create(chat(redUrl));
const bare = await client.chat.completions.create(chat());
assert.ok(whole.usage.prompt_tokens > bare.usage.prompt_tokens + 10);
const both = await client.chat.completions.create(chat(redUrl, url(blue, "image/jpeg")));
assert.ok(both.usage.prompt_tokens > whole.usage.prompt_tokens + 10);
const stream = client.chat.completions.stream(chat(redUrl));
const streamed = await stream.finalChatCompletion();
assert.equal(streamed.choices[0].message.content, whole.choices[0].message.content);

const input = [
  {
    role: "user",
    content: [{ type: "input_image", image_url: redUrl, detail: "auto" }, { type: "input_text", text }],
  },
];
const response = await client.responses.create({ ...greedy, max_output_tokens: 8, input });
assert.equal(response.output_text, whole.choices[0].message.content);
const items = await client.responses.inputItems.list(response.id);
assert.equal(items.data[0].content[0].image_url, redUrl);

await assert.rejects(client.chat.completions.create(chat(url(red, "image/gif"))), (error) => {
  assert.equal(error.status, 400);
  assert.equal(error.param, "messages[0].content[0].image_url.url");
  return true;
});
