// What the openai package for Node gets: one JSON object on stdout. Usage: node openai_node.mjs URL
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];
const greedy = { model: "tiny", temperature: 0, max_tokens: 12 };

const completion = await client.completions.create({ ...greedy, prompt: "Hello", logprobs: 2 });
const chat = await client.chat.completions.create({ ...greedy, messages, logprobs: true, top_logprobs: 2 });

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  ...greedy, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}

const schema = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"], additionalProperties: false };
const structured = await client.chat.completions.create({
  ...greedy, max_tokens: 60, messages,
  response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } },
});

const long = await client.chat.completions.create({
  ...greedy, max_tokens: 2000, messages, stream: true, ignore_eos: true,
});
let numBeforeCancel = 0;
for await (const _ of long) {
  numBeforeCancel += 1;
  if (numBeforeCancel === 3) break; // leaving the loop closes the connection
}

let refusal = null;
try {
  await client.chat.completions.create({ ...greedy, messages, temperature: -1 });
} catch (error) {
  refusal = { status: error.status, param: error.param, kind: error.constructor.name };
}

console.log(JSON.stringify({
  completion: completion.choices[0].text,
  completion_logprobs: completion.choices[0].logprobs.token_logprobs.length,
  chat: chat.choices[0].message.content,
  chat_logprobs: chat.choices[0].logprobs.content.length,
  streamed, usage,
  structured: structured.choices[0].message.content,
  num_before_cancel: numBeforeCancel,
  models: (await client.models.list()).data.map((m) => m.id),
  refusal,
}));
