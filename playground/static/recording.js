// A recorded answer: what the server sent, and when. Pure functions, no DOM.
//
// The page keeps every answer in this form, replays it, exports it and opens it again. A file may come from anyone:
// `parseRecording` takes over nothing that is not of the kind that it must be.

const FORMAT = "tidar-trace/1";
export const LARGEST_FILE = 64 * 2 ** 20; // bytes

const MOST_STEPS = 200_000;
const MOST_TOKENS = 1024; // of one step: far above any block length
const LONGEST_TEXT = 2 ** 20;
const FINISHES = ["stop", "length", "abort", "error"];
const MODES = ["auto", "full", "off"];

/** What the page keeps of a streamed chunk that came `at` milliseconds after the question was sent. */
export function readChunk(chunk, at) {
  const choice = chunk.choices?.[0];
  return {
    at,
    text: choice?.delta?.content ?? "",
    trace: chunk.tidar ?? null,
    logprobs: choice?.logprobs?.content ?? null,
  };
}

/** A recording without steps yet. `model` is an entry of `/v1/models`. */
export function newRecording({ title, asked, model, settings }) {
  const { logprobs, cacheSalt, ...chosen } = settings;
  const { block_length, exact, dtype, device, step_cost } = model.tidar;
  return {
    format: FORMAT,
    title,
    asked,
    made: new Date().toISOString(),
    model: { id: model.id, block_length, exact, dtype, device, step_cost },
    settings: chosen,
    seed: null,
    finish: null,
    steps: [],
  };
}

/** The recording as the text of a file. */
export function formatRecording(recording) {
  const { opened, ...kept } = recording;
  return JSON.stringify(kept);
}

/** The recording in a file's text. Throws an Error whose message is one line for the reader. */
export function parseRecording(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is no trace: it is not JSON.");
  }
  if (data?.format !== FORMAT) throw new Error(`This file is no trace: its "format" is not "${FORMAT}".`);
  const model = record(data.model, "model");
  return {
    format: FORMAT,
    title: string(data.title, "title"),
    asked: string(data.asked, "asked"),
    made: string(data.made, "made"),
    model: {
      id: string(model.id, "model.id"),
      block_length: optional(model.block_length, (value) => counted(value, "model.block_length")),
      exact: optional(model.exact, Boolean) ?? undefined,
      dtype: optional(model.dtype, (value) => string(value, "model.dtype")),
      device: optional(model.device, (value) => string(value, "model.device")),
      step_cost: optional(model.step_cost, stepCost),
    },
    settings: settingsOf(record(data.settings, "settings")),
    seed: optional(data.seed, (value) => string(value, "seed")),
    finish: FINISHES.includes(data.finish) ? data.finish : null,
    steps: stepsOf(data.steps),
    opened: true,
  };
}

function fault(what, wanted) {
  return new Error(`This trace cannot be read: ${what} is not ${wanted}.`);
}

function record(value, what) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) throw fault(what, "an object");
  return value;
}

function optional(value, read) {
  return value === null || value === undefined ? null : read(value);
}

function string(value, what) {
  if (typeof value !== "string" || value.length > LONGEST_TEXT) throw fault(what, "a text");
  return value;
}

function number(value, what) {
  if (typeof value !== "number" || !Number.isFinite(value)) throw fault(what, "a number");
  return value;
}

function counted(value, what) {
  if (!Number.isSafeInteger(value) || value < 0 || value > 1e9) throw fault(what, "a count");
  return value;
}

function list(value, what, most, read) {
  if (!Array.isArray(value) || value.length > most) throw fault(what, `a list of at most ${most}`);
  return value.map((item, i) => read(item, `${what}[${i}]`));
}

function settingsOf(value) {
  const drafts = MODES.includes(value.drafts) ? value.drafts : "auto";
  const kinds = { number: ["maxTokens", "block", "temperature", "topP", "topK"], string: ["seed", "system"] };
  const known = Object.entries(kinds).flatMap(([kind, names]) => names.filter((name) => typeof value[name] === kind));
  return { drafts, ...Object.fromEntries(known.map((name) => [name, value[name]])) };
}

function stepCost(value) {
  const names = ["rows", "trunk_ms", "head_ms", "adapter_ms"];
  const cost = Object.fromEntries(
    names.map((name) => [name, list(record(value, "step_cost")[name], `step_cost.${name}`, 512, number)]),
  );
  const { rows } = cost;
  const rising = rows.length > 0 && rows.every((row, i) => row > (rows[i - 1] ?? 0));
  if (!rising || names.some((name) => cost[name].length !== rows.length)) throw fault("step_cost", "a curve");
  return cost;
}

function stepsOf(value) {
  let before = 0;
  return list(value, "steps", MOST_STEPS, (step, what) => {
    const at = number(record(step, what).at, `${what}.at`);
    if (at < before) throw fault(`${what}.at`, "behind the step before it");
    before = at;
    return {
      at,
      text: string(step.text, `${what}.text`),
      trace: optional(step.trace, (trace) => traceOf(trace, `${what}.trace`)),
      logprobs: optional(step.logprobs, (entries) => list(entries, `${what}.logprobs`, MOST_TOKENS, logprob)),
    };
  });
}

function traceOf(value, what) {
  const { step, t_ms, drafted, accepted, anchor, block, proposals, used, rows, replica } = record(value, what);
  const trace = {
    step: counted(step, `${what}.step`),
    t_ms: number(t_ms, `${what}.t_ms`),
    drafted: list(drafted, `${what}.drafted`, MOST_TOKENS, token),
    accepted: counted(accepted, `${what}.accepted`),
    anchor: optional(anchor, (said) => token(said, `${what}.anchor`)),
    block: counted(block, `${what}.block`),
    proposals: list(proposals, `${what}.proposals`, MOST_TOKENS, (one, name) => ({
      a: counted(record(one, name).a, `${name}.a`),
    })),
    used: optional(used, (a) => counted(a, `${what}.used`)),
    rows: {
      verify: counted(record(rows, `${what}.rows`).verify, `${what}.rows.verify`),
      mask: counted(rows.mask, `${what}.rows.mask`),
    },
  };
  if (trace.accepted > trace.drafted.length) throw fault(`${what}.accepted`, "at most the number of drafts");
  if (trace.block > MOST_TOKENS) throw fault(`${what}.block`, "a block length");
  if (trace.proposals.some(({ a }) => a < 1 || a > trace.drafted.length + 1)) {
    throw fault(`${what}.proposals`, "a list of outcomes of this step");
  }
  if (replica !== undefined) trace.replica = string(replica, `${what}.replica`);
  return trace;
}

function token(value, what) {
  const { id, text } = record(value, what);
  return { id: counted(id, `${what}.id`), text: string(text, `${what}.text`) };
}

function logprob(value, what) {
  const { token: text, logprob: chance, top_logprobs: top = [] } = record(value, what);
  return {
    token: string(text, `${what}.token`),
    logprob: number(chance, `${what}.logprob`),
    top_logprobs: list(top, `${what}.top_logprobs`, 64, (one, name) => ({
      token: string(record(one, name).token, `${name}.token`),
      logprob: number(one.logprob, `${name}.logprob`),
    })),
  };
}
