// The public HTTP API as this page uses it: JSON and text, whole or streamed. No DOM.

const RUNNERS_UP = 5; // rivals named beside a token
const TEXT_MS = 15_000; // for models or a page of metrics, whose server may wait ten seconds for a replica

const UNREADABLE = "The server's answer cannot be read. Is there a proxy in between that wants you to sign in?";

/**
 * An answer of the server that is not what was asked for; the message is one line for the reader. `key`: asked with.
 * `code`, `param`: what is wrong, and with which field of the request, where the server says so.
 */
class ApiError extends Error {
  constructor(message, { status = 0, key = "", code = null, param = null } = {}) {
    super(message);
    Object.assign(this, { status, key, code, param });
  }
}

/** Splits a text/event-stream into the data of its events, wherever the network cut it. */
export class EventParser {
  #rest = "";
  #data = [];

  /** The data of every event that `text` completes. */
  push(text) {
    this.#rest += text;
    const events = [];
    const lines = this.#rest.split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

function headers(key) {
  const names = { Accept: "application/json, text/event-stream" };
  if (key) names.Authorization = `Bearer ${key}`;
  return names;
}

async function request(url, key, wanted, { headers: more, ...options } = {}) {
  let response;
  try {
    response = await fetch(url, { ...options, headers: { ...headers(key), ...more } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
  if (!response.ok) throw await refusal(response, key);
  const type = oneLine((response.headers.get("Content-Type") ?? "").split(";")[0]).toLowerCase();
  if (type === wanted) return response;
  response.body?.cancel().catch(() => {});
  throw new ApiError(
    `What answered is not the server's API (it sent ${type || "no type"}, not ${wanted}): ` +
      "sign in if a proxy in between wants it, or check the address.",
  );
}

async function refusal(response, key) {
  const { status, statusText } = response;
  const wait = response.headers.get("Retry-After");
  const again = /^\d+$/.test(wait ?? "") ? ` Try again in ${wait} s.` : ""; // it may be a date, of a proxy's
  try {
    const { error } = JSON.parse(await response.text());
    const { code, param } = error ?? {};
    if (error?.message) return new ApiError(oneLine(error.message) + again, { status, key, code, param });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    // Not an OpenAI error (a proxy's page, say): the status line has to do.
  }
  return new ApiError(`The server answered ${status} ${statusText}.`.replace(" .", ".") + again, { status, key });
}

function oneLine(message) {
  return String(message).replace(/\s+/g, " ").trim();
}

/** What lies at `url`, as text. */
export async function fetchText(url, key) {
  const signal = AbortSignal.timeout(TEXT_MS);
  const response = await request(url, key, "text/plain", { cache: "no-store", signal });
  return unbroken(response.text());
}

/** The JSON answer to a POST of `data`. */
export async function postJson(url, data, options) {
  const response = await post(url, JSON.stringify(data), "application/json", options);
  return parsed(await unbroken(response.text()));
}

function post(url, body, wanted, { key, signal }) {
  return request(url, key, wanted, { method: "POST", headers: { "Content-Type": "application/json" }, body, signal });
}

/** The models on offer, as `/v1/models` lists them. */
export async function listModels(base, key) {
  const signal = AbortSignal.timeout(TEXT_MS);
  const response = await request(new URL("models", base), key, "application/json", { signal });
  return parsed(await unbroken(response.text())).data ?? [];
}

// What a JSON text says, which is always an object in this API.
function parsed(text) {
  try {
    const value = JSON.parse(text);
    if (typeof value === "object" && value !== null) return value;
  } catch {
    // Said below.
  }
  throw new ApiError(UNREADABLE);
}

/**
 * POST `body` (JSON text) to a route of `/v1` that streams and yield the stream's chunks, as lists: one list for each
 * network read. Throws ApiError where the server refuses, sends an error event, or stops before the answer is complete.
 */
export async function* stream(url, body, options) {
  const response = await post(url, body, "text/event-stream", options);
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  let open = true;
  try {
    while (open) {
      const { done, value } = await unbroken(reader.read());
      const events = parser.push(done ? decoder.decode() : decoder.decode(value, { stream: true }));
      const end = events.indexOf("[DONE]");
      const chunks = (end < 0 ? events : events.slice(0, end)).map(parseChunk);
      const failed = chunks.findIndex((chunk) => chunk.error);
      if (chunks.length) yield failed < 0 ? chunks : chunks.slice(0, failed);
      if (failed >= 0) throw new ApiError(oneLine(chunks[failed].error.message ?? "The server reported an error."));
      if (end >= 0) open = false;
      else if (done) throw new ApiError("The connection closed before the answer was complete.");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function unbroken(reading) {
  try {
    return await reading;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the answer was complete.");
  }
}

// A seed has 64 bits and a JavaScript number 53: keep its digits as text.
function parseChunk(data) {
  const chunk = parsed(data);
  const seed = chunk.metrics?.tidar && /"seed"\s*:\s*(-?\d+)/.exec(data);
  if (seed) chunk.metrics.tidar.seed = seed[1];
  return chunk;
}

/**
 * The request body as JSON text, `settings.system` said before the messages. `settings.seed` is a string of digits,
 * written as the number they are, whatever its size; what is empty is left out, so that the server's own defaults hold:
 * without `settings.maxTokens` an answer may have as many tokens as there is room for.
 */
export function chatBody(model, messages, settings) {
  const tidar = { trace: true, drafts: settings.drafts };
  if (settings.block && settings.drafts !== "off") tidar.block = settings.block;
  const body = {
    model,
    messages: settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: settings.maxTokens,
    temperature: settings.temperature,
    top_p: settings.topP,
    top_k: settings.topK,
    ...(settings.logprobs && { logprobs: true, top_logprobs: RUNNERS_UP }),
    ...(settings.cacheSalt && { cache_salt: settings.cacheSalt }),
    tidar,
  };
  const text = JSON.stringify(body);
  return settings.seed ? `${text.slice(0, -1)},"seed":${BigInt(settings.seed)}}` : text;
}
