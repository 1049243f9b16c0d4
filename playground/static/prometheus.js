// The metrics page as numbers: Prometheus' text format, and what two readings of it say. Pure functions, no DOM.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/s;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/gs;

/** Every sample of a page: its name, labels and value. Lines that are none are skipped. */
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? "").matchAll(LABEL)) {
      labels[name] = value.replace(/\\(.)/gs, (_, letter) => (letter === "n" ? "\n" : letter));
    }
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

// What the page shows of a replica, and the series that it comes from.
const SERIES = {
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  cache: "vllm:kv_cache_usage_perc",
  pages: "tidar:kv_pages",
  tokens: "vllm:generation_tokens_total",
  drafted: "vllm:spec_decode_num_draft_tokens_total",
  accepted: "vllm:spec_decode_num_accepted_tokens_total",
  steps: "tidar:decode_steps_total",
  stepTokens: "tidar:decode_tokens_total",
  rows: "tidar:decode_rows_total",
};

/** Replicas by name, each with its `model` and the sum of every series of `SERIES` (0 where it has none). */
export function byReplica(samples) {
  const fields = new Map(Object.entries(SERIES).map(([field, name]) => [name, field]));
  const replicas = new Map();
  for (const { name, labels, value } of samples) {
    const field = fields.get(name);
    if (!field || labels.engine === undefined || !Number.isFinite(value)) continue;
    if (!replicas.has(labels.engine)) {
      const none = Object.fromEntries(Object.keys(SERIES).map((key) => [key, 0]));
      replicas.set(labels.engine, { model: labels.model_name, ...none });
    }
    replicas.get(labels.engine)[field] += value;
  }
  return replicas;
}

/**
 * Names that are served and not among those `there`, each with whether it `sleeps`, which every ingress has to say, and
 * how many requests are `waiting` for it.
 */
export function missing(samples, there) {
  const found = new Map();
  for (const { name, labels, value } of samples) {
    if (name !== "tidar:model_sleeps" || there.includes(labels.model_name)) continue;
    found.set(labels.model_name, { sleeps: value === 1 && (found.get(labels.model_name)?.sleeps ?? true), waiting: 0 });
  }
  for (const { name, labels, value } of samples) {
    if (name === "tidar:requests_in_progress" && found.has(labels.model_name)) found.get(labels.model_name).waiting += value;
  }
  return found;
}

/**
 * What happened between two readings of one replica, `seconds` apart; a ratio is null where nothing was counted. A
 * replica that was started anew counts from 0 again: there is nothing to compare then, and all of it is null.
 */
export function between(before, now, seconds) {
  const grown = (field) => now[field] - before[field];
  if (!(seconds > 0) || grown("tokens") < 0) return { tokensPerSecond: null, acceptance: null, perStep: null, rowsPerStep: null };
  const ratio = (part, whole) => (grown(whole) > 0 ? grown(part) / grown(whole) : null);
  return {
    tokensPerSecond: grown("tokens") / seconds,
    acceptance: ratio("accepted", "drafted"),
    perStep: ratio("stepTokens", "steps"),
    rowsPerStep: ratio("rows", "steps"),
  };
}
