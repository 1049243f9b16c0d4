// LangChain.js' ChatOpenAI, over chats and over the Responses API, and its agent on top of it.

import assert from "node:assert/strict";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { createAgent, providerStrategy } from "langchain";
import { z } from "zod";
import { all, ASK, run, SERVED, THINK } from "./asking.mjs";

const Verdict = z.object({ good: z.boolean(), marks: z.union([z.literal(1), z.literal(2), z.literal(3)]) });
const schema = z.object({ city: z.enum(["Paris", "Rome"]) });
const described = { name: "weather", description: "Looks up the weather.", schema };
const weather = tool(({ city }) => `It is sunny in ${city}.`, described);

const chatOpenAI = (more) =>
  new ChatOpenAI({
    configuration: { baseURL: SERVED.url },
    apiKey: SERVED.key,
    model: SERVED.model,
    temperature: 0,
    maxTokens: 200,
    ...more,
  });

async function whole(stream) {
  return (await all(stream)).reduce((one, two) => one.concat(two));
}

async function talks(more) {
  const chat = chatOpenAI(more);
  const answer = await chat.invoke(ASK);
  assert(answer.text);
  assert(answer.usage_metadata.output_tokens > 0);
  const streamed = await whole(await chat.stream(ASK));
  assert.equal(streamed.text, answer.text);
  assert.equal(streamed.usage_metadata.output_tokens, answer.usage_metadata.output_tokens);
  assert.deepEqual((await chat.batch([ASK, ASK])).map((one) => one.text), [answer.text, answer.text]);
}

async function calls(more) {
  // By its name: over the Responses API this client passes on neither "required" nor "auto".
  const bound = chatOpenAI(more).bindTools([weather], { tool_choice: "weather", parallel_tool_calls: false });
  const said = [new HumanMessage("Weather in Paris?")];
  said.push(await bound.invoke(said));
  const [call] = said[1].tool_calls;
  said.push(new ToolMessage({ content: await weather.invoke(call.args), tool_call_id: call.id }));
  assert((await chatOpenAI(more).bindTools([weather]).invoke(said)).text);
  assert(schema.parse((await whole(await bound.stream("Weather in Rome?"))).tool_calls[0].args));
}

async function structures(more) {
  for (const method of ["jsonSchema", "functionCalling"]) {
    const structured = chatOpenAI(more).withStructuredOutput(Verdict, { name: "verdict", method });
    assert(Verdict.parse(await structured.invoke(ASK)));
  }
  const strict = chatOpenAI(more).withStructuredOutput(Verdict, { name: "verdict", strict: true, includeRaw: true });
  assert(Verdict.parse((await strict.invoke(ASK)).parsed));
}

async function agent(more) {
  const asked = { messages: [new HumanMessage(ASK)] };
  const answers = createAgent({ model: chatOpenAI(more), tools: [], responseFormat: providerStrategy(Verdict) });
  assert(Verdict.parse((await answers.invoke(asked)).structuredResponse));
}

const OVER_RESPONSES = { useResponsesApi: true };
const chat = () => talks({});
const chat_tools = () => calls({});
const chat_structured = () => structures({});
const chat_agent = () => agent({});
const responses = () => talks(OVER_RESPONSES);
const responses_tools = () => calls(OVER_RESPONSES);
const responses_structured = () => structures(OVER_RESPONSES);
const responses_agent = () => agent(OVER_RESPONSES);

async function responses_thoughts() {
  // Not as an option of its own, which this client passes on to OpenAI's models alone.
  const modelKwargs = { reasoning: { effort: "low", summary: "auto" }, ...THINK };
  const thinking = chatOpenAI({ ...OVER_RESPONSES, zdrEnabled: true, modelKwargs });
  const answer = await thinking.invoke(ASK);
  assert(answer.usage_metadata.output_token_details.reasoning > 0);
  assert((await thinking.invoke([new HumanMessage(ASK), answer, new HumanMessage(ASK)])).text);
  const streamed = await whole(await thinking.stream(ASK));
  assert((await thinking.invoke([new HumanMessage(ASK), streamed, new HumanMessage(ASK)])).text);
}

async function errors() {
  const asked = (more, text = ASK) => chatOpenAI({ maxRetries: 0, ...more }).invoke(text);
  await assert.rejects(asked({ apiKey: "another" }), { status: 401 });
  await assert.rejects(asked({ model: "nobody" }), { status: 404 });
  await assert.rejects(asked({ topP: 5 }), { status: 400 });
  await assert.rejects(asked({}, "word ".repeat(20_000)), { name: "ContextOverflowError" });
}

await run(
  "@langchain/openai", chat, chat_tools, chat_structured, chat_agent, responses, responses_tools, responses_structured,
  responses_agent, responses_thoughts, errors,
);
