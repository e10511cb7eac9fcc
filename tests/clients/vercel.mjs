// The Vercel AI SDK: both routes of its OpenAI provider, and its provider of compatible servers.
import assert from "node:assert";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, , root] = process.argv.slice(2);
const require = createRequire(`${root}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateObject, generateText, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const options = { baseURL: `${url}/v1`, apiKey: "unused" };
const openai = createOpenAI(options);
const compatible = createOpenAICompatible({
  ...options, name: "penstock", supportsStructuredOutputs: true,
});
const models = {
  chat: openai.chat("tiny"), responses: openai.responses("tiny"), compatible: compatible("tiny"),
};
const add = tool({
  description: "Add two numbers",
  inputSchema: z.object({ a: z.number().int().min(0).max(99), big: z.boolean() }),
});

for (const [name, model] of Object.entries(models)) {
  const asked = {
    model, prompt: "the penstock", temperature: 0, maxOutputTokens: 300, maxRetries: 0,
    onError: ({ error }) => { throw error; },
  };
  const { text } = await generateText(asked);
  assert(text);
  console.log(name, "plain");
  let streamed = "";
  for await (const piece of streamText(asked).textStream) streamed += piece;
  assert.equal(streamed, text);
  console.log(name, "streamed");
  const called = { ...asked, tools: { add }, toolChoice: { type: "tool", toolName: "add" } };
  const { toolCalls } = await generateText(called);
  assert.deepEqual(Object.keys(toolCalls[0].input).sort(), ["a", "big"]);
  const calls = await streamText(called).toolCalls;
  assert.deepEqual(calls[0].input, toolCalls[0].input);
  console.log(name, "tool");
  const { object } = await generateObject({ ...asked, schema: z.object({ open: z.boolean() }) });
  assert.equal(typeof object.open, "boolean");
  console.log(name, "json_schema");
}
