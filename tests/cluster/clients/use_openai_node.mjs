// openai (Node): chats and the Responses API, whole and streamed.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { all, ASK, run, SERVED, THINK } from "./asking.mjs";

const client = new OpenAI({ baseURL: SERVED.url, apiKey: SERVED.key });
const model = SERVED.model;
const messages = [{ role: "user", content: ASK }];
const Weather = z.object({ city: z.enum(["Paris", "Rome"]) });
const Verdict = z.object({ good: z.boolean(), marks: z.union([z.literal(1), z.literal(2), z.literal(3)]) });
const weather = { name: "weather", parameters: Weather, description: "Looks up the weather." };
const named = { type: "function", function: { name: "weather" } };

async function chat() {
  const ask = { model, messages, temperature: 0, max_completion_tokens: 24 };
  const whole = await client.chat.completions.create(ask);
  const parts = await all(
    await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } }),
  );
  assert.equal(parts.map((part) => part.choices[0]?.delta.content ?? "").join(""), whole.choices[0].message.content);
  assert.equal(parts.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
}

async function chat_stream_helper() {
  const stream = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 24 });
  let text = "";
  stream.on("content", (more) => (text += more));
  assert.equal(await stream.finalContent(), text);
  assert((await stream.finalChatCompletion()).choices[0].message.content);
}

async function chat_parse() {
  const ask = { model, messages, temperature: 0, response_format: zodResponseFormat(Verdict, "verdict") };
  assert(Verdict.parse((await client.chat.completions.parse(ask)).choices[0].message.parsed));
  const streamed = await client.chat.completions.stream(ask).finalChatCompletion();
  assert(Verdict.parse(streamed.choices[0].message.parsed));
}

async function chat_tools() {
  const ask = { model, tools: [zodFunction(weather)] };
  const forced = { ...ask, messages, tool_choice: "required", parallel_tool_calls: false };
  const { message, finish_reason } = (await client.chat.completions.parse(forced)).choices[0];
  assert.equal(finish_reason, "tool_calls");
  assert(Weather.parse(message.tool_calls[0].function.parsed_arguments));
  const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "It is sunny." };
  const said = [...messages, message, result];
  assert((await client.chat.completions.create({ ...ask, messages: said, max_tokens: 24 })).choices[0].message.content);
  const streamed = await client.chat.completions.stream(forced).finalChatCompletion();
  assert(Weather.parse(streamed.choices[0].message.tool_calls[0].function.parsed_arguments));
}

async function chat_run_tools() {
  for (const stream of [false, true]) {
    const asked = [];
    const tool = zodFunction({ ...weather, function: (found) => asked.push(found.city) && "It is sunny." });
    const runner = client.chat.completions.runTools({ model, messages, tools: [tool], tool_choice: named, stream });
    await runner.done();
    assert.equal(asked.length, 1);
    assert.equal(await runner.finalFunctionToolCallResult(), "It is sunny.");
  }
}

async function chat_thoughts() {
  const ask = { model, messages, max_tokens: 64, reasoning_effort: "low", ...THINK };
  const found = await client.chat.completions.create(ask);
  assert(found.choices[0].message.reasoning_content);
  assert(found.usage.completion_tokens_details.reasoning_tokens);
}

async function responses() {
  const ask = { model, input: ASK, instructions: "Be brief.", temperature: 0, max_output_tokens: 24 };
  const whole = await client.responses.create(ask);
  assert(whole.output_text);
  const events = await all(await client.responses.create({ ...ask, stream: true }));
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal((await client.responses.stream(ask).finalResponse()).output_text, whole.output_text);
}

async function responses_parse() {
  const ask = { model, input: ASK, temperature: 0, text: { format: zodTextFormat(Verdict, "verdict") } };
  assert(Verdict.parse((await client.responses.parse(ask)).output_parsed));
  assert(Verdict.parse((await client.responses.stream(ask).finalResponse()).output_parsed));
}

async function responses_tools() {
  const ask = { model, max_output_tokens: 200, tools: [zodResponsesFunction(weather)] };
  const forced = { ...ask, input: ASK, tool_choice: { type: "function", name: "weather" } };
  const found = await client.responses.parse(forced);
  const call = found.output.find((item) => item.type === "function_call");
  assert(Weather.parse(call.parsed_arguments));
  const result = { type: "function_call_output", call_id: call.call_id, output: "It is sunny." };
  assert((await client.responses.create({ ...ask, input: [...messages, ...found.output, result] })).output_text);
  const streamed = await client.responses.stream(forced).finalResponse();
  assert(Weather.parse(streamed.output[0].parsed_arguments));
}

async function responses_thoughts() {
  const ask = { model, max_output_tokens: 64, reasoning: { effort: "low", summary: "auto" }, store: false, ...THINK };
  const found = await client.responses.create({ ...ask, input: ASK, include: ["reasoning.encrypted_content"] });
  assert.equal(found.output[0].type, "reasoning");
  const input = [...messages, ...found.output, ...messages];
  const events = await all(await client.responses.create({ ...ask, input, stream: true }));
  assert(events.some((event) => event.type === "response.reasoning_text.delta"));
}

async function counting() {
  assert((await client.responses.inputTokens.count({ model, input: ASK })).input_tokens);
}

async function models() {
  assert((await all(await client.models.list())).some((one) => one.id === model));
  assert.equal((await client.models.retrieve(model)).id, model);
}

async function completions() {
  const ask = { model, prompt: ["One, two,", "A, b,"], max_tokens: 8, logprobs: 2 };
  assert((await client.completions.create(ask)).choices[1].logprobs.tokens);
}

async function aborts() {
  const stream = await client.chat.completions.create({ model, messages, ignore_eos: true, stream: true });
  for await (const part of stream) {
    assert(part.choices);
    stream.controller.abort();
  }
  const leaving = new AbortController();
  const left = client.chat.completions.create({ model, messages, ignore_eos: true }, { signal: leaving.signal });
  setTimeout(() => leaving.abort(), 200);
  await assert.rejects(left, OpenAI.APIUserAbortError);
}

async function errors() {
  const stranger = new OpenAI({ baseURL: SERVED.url, apiKey: "another" });
  const ask = (more) => client.chat.completions.create({ model, messages, ...more }, { maxRetries: 0 });
  await assert.rejects(ask({ top_p: 5 }), OpenAI.BadRequestError);
  await assert.rejects(ask({ messages: [{ role: "user", content: "word ".repeat(20_000) }] }), (error) => {
    assert(error instanceof OpenAI.BadRequestError);
    return error.code === "context_length_exceeded";
  });
  await assert.rejects(ask({ model: "nobody" }), OpenAI.NotFoundError);
  const other = await ask({ ignore_eos: true, stream: true });
  await assert.rejects(ask({ n: 128 }), OpenAI.RateLimitError); // more than there is room for beside another
  other.controller.abort();
  await assert.rejects(client.responses.create({ model, input: ASK, max_tokens: 5 }), OpenAI.BadRequestError);
  await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
}

await run(
  "openai", chat, chat_stream_helper, chat_parse, chat_tools, chat_run_tools, chat_thoughts, responses,
  responses_parse, responses_tools, responses_thoughts, counting, models, completions, aborts, errors,
);
