// Vercel's AI SDK, over chats (its openai-compatible provider and OpenAI's own) and over the Responses API.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, isStepCount, Output, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { all, ASK, run, SERVED, THINK } from "./asking.mjs";

const told = { baseURL: SERVED.url, apiKey: SERVED.key };
const compatible = (more) =>
  createOpenAICompatible({ ...told, name: "tidar", includeUsage: true, supportsStructuredOutputs: true, ...more });
const openai = createOpenAI(told);
const Verdict = z.object({ good: z.boolean(), marks: z.union([z.literal(1), z.literal(2), z.literal(3)]) });
// Nothing is stored here, so the whole conversation is to be sent.
const NOT_STORED = { openai: { store: false } };

async function talks(model) {
  const ask = { model, prompt: ASK, instructions: "Be brief.", temperature: 0, maxOutputTokens: 24 };
  const whole = await generateText({ ...ask, providerOptions: NOT_STORED });
  const streamed = streamText({ ...ask, providerOptions: NOT_STORED });
  assert.equal((await all(streamed.textStream)).join(""), whole.text);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
  assert(whole.usage.outputTokens > 0);
}

async function calls(model) {
  const asked = [];
  const execute = ({ city }) => asked.push(city) && `It is sunny in ${city}.`;
  const inputSchema = z.object({ city: z.enum(["Paris", "Rome"]) });
  const weather = tool({ description: "Looks up the weather.", inputSchema, execute });
  const ask = {
    model,
    prompt: ASK,
    tools: { weather },
    maxOutputTokens: 200,
    stopWhen: isStepCount(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
    providerOptions: { openai: { store: false, parallelToolCalls: false } },
  };
  const found = await generateText(ask);
  assert.match(found.steps[0].toolResults[0].output, /sunny/);
  assert(found.text);
  const streamed = streamText(ask);
  const kinds = new Set((await all(streamed.fullStream)).map((part) => part.type));
  assert(kinds.has("tool-result") && kinds.has("text-delta"), [...kinds].join());
  assert(asked.length >= 2);
}

async function structures(model) {
  const ask = { model, prompt: ASK, maxOutputTokens: 200, temperature: 0, providerOptions: NOT_STORED };
  assert(Verdict.parse((await generateObject({ ...ask, schema: Verdict })).object));
  const streamed = streamObject({ ...ask, schema: Verdict });
  assert((await all(streamed.partialObjectStream)).length);
  assert(Verdict.parse(await streamed.object));
  const output = Output.object({ schema: Verdict });
  assert(Verdict.parse((await generateText({ ...ask, output })).output));
  assert((await all(streamText({ ...ask, output }).partialOutputStream)).length);
}

async function thinks(model, providerOptions) {
  const ask = { model, prompt: ASK, maxOutputTokens: 64, providerOptions };
  const found = await generateText(ask);
  assert(found.reasoningText);
  assert(found.text);
  const again = [{ role: "user", content: ASK }, ...found.response.messages, { role: "user", content: ASK }];
  const streamed = streamText({ ...ask, prompt: undefined, messages: again });
  assert((await all(streamed.fullStream)).some((part) => part.type === "reasoning-delta"));
}

const chat = () => talks(compatible()(SERVED.model));
const chat_tools = () => calls(compatible()(SERVED.model));
const chat_structured = () => structures(compatible()(SERVED.model));
const chat_thoughts = () => thinks(compatible()(SERVED.model), { tidar: { reasoningEffort: "low", ...THINK } });
const openai_chat = () => talks(openai.chat(SERVED.model));
const openai_chat_tools = () => calls(openai.chat(SERVED.model));
const openai_chat_structured = () => structures(openai.chat(SERVED.model));
const responses = () => talks(openai(SERVED.model));
const responses_tools = () => calls(openai(SERVED.model));
const responses_structured = () => structures(openai(SERVED.model));

async function errors() {
  const stranger = createOpenAI({ ...told, apiKey: "another" });
  const long = "word ".repeat(20_000);
  for (const [status, model, prompt] of [
    [401, stranger(SERVED.model), ASK],
    [404, openai("nobody"), ASK],
    [400, openai(SERVED.model), long],
    [400, compatible()(SERVED.model), long],
  ]) {
    const failed = (error) => APICallError.isInstance(error) && error.statusCode === status;
    await assert.rejects(generateText({ model, prompt, maxRetries: 0 }), failed);
  }
}

await run(
  "ai", chat, chat_tools, chat_structured, chat_thoughts, openai_chat, openai_chat_tools, openai_chat_structured,
  responses, responses_tools, responses_structured, errors,
);
