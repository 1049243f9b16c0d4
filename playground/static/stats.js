// What the steps of an answer come to, taken together. Pure functions, no DOM.

import { emitted, keptTokens, readsAgain } from "./trace.js";

/** The traces of decode steps: the step that read the prompt is no work of the drafts. */
export function decodeTraces(steps) {
  return steps.map((step) => step.trace).filter((trace) => trace && trace.step > 0);
}

/**
 * For draft 1, 2, …: in how many steps it was judged, and in how many it held. Where a stop cut a step, nothing is
 * known of the drafts behind the cut, so they count as not judged.
 */
export function acceptanceByPosition(traces) {
  const places = [];
  for (const { drafted, accepted, anchor } of traces) {
    const judged = anchor ? drafted.length : accepted;
    for (let place = 0; place < judged; place++) {
      places[place] ??= { judged: 0, held: 0 };
      places[place].judged += 1;
      if (place < accepted) places[place].held += 1;
    }
  }
  return places;
}

/** How many steps brought 1, 2, 3, … tokens: the entry at index t is for t tokens. */
export function tokensPerStep(traces) {
  const counts = [];
  for (const trace of traces) counts[emitted(trace)] = (counts[emitted(trace)] ?? 0) + 1;
  return Array.from(counts, (steps) => steps ?? 0);
}

/** The shapes that steps had, most frequent first: drafts verified, outcomes drafted for, slots each. */
export function shapes(traces) {
  const found = new Map();
  for (const { drafted, proposals, block } of traces) {
    const shape = { verified: drafted.length, outcomes: proposals.length, block: proposals.length ? block : 0 };
    const key = `${shape.verified} ${shape.outcomes} ${shape.block}`;
    const known = found.get(key);
    if (known) known.steps += 1;
    else found.set(key, { ...shape, steps: 1 });
  }
  return [...found.values()].sort((a, b) => b.steps - a.steps);
}

/** A shape in words. */
export function describeShape({ verified, outcomes, block }) {
  const verify = verified ? `verify ${plural(verified, "draft")}` : "no drafts to verify";
  const draft = outcomes ? `draft for ${plural(outcomes, "outcome")} × ${plural(block, "slot")}` : "draft nothing";
  return `${verify}, ${draft}`;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

/** Rows, tokens and milliseconds of every step that only decoded and whose predecessor is known, by the engine's clock. */
export function stepTimes(steps, blockLength) {
  const times = [];
  let before = null;
  for (const { trace } of steps) {
    if (!trace) continue;
    const follows = before?.step === trace.step - 1 && before.replica === trace.replica; // each has a clock of its own
    if (follows && trace.t_ms > before.t_ms && !readsAgain(trace, blockLength)) {
      const rows = trace.rows.verify + trace.rows.mask;
      times.push({ step: trace.step, rows, ms: trace.t_ms - before.t_ms, tokens: emitted(trace) });
    }
    before = trace;
  }
  return times;
}

/** The replicas that wrote an answer, in turn: more than one where another had to carry on. */
export function replicas(steps) {
  const names = steps.map(({ trace }) => trace?.replica).filter((name) => name !== undefined);
  return names.filter((name, i) => name !== names[i - 1]);
}

export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** A measured curve at `rows`: straight between its points and beyond the last, flat before the first. */
export function curveAt(xs, ys, rows) {
  if (rows <= xs[0]) return ys[0];
  if (xs.length === 1) return (ys[0] * rows) / xs[0];
  const found = xs.findIndex((x) => x >= rows);
  const right = found < 0 ? xs.length - 1 : found;
  const share = (rows - xs[right - 1]) / (xs[right] - xs[right - 1]);
  return ys[right - 1] + share * (ys[right] - ys[right - 1]);
}

/** Milliseconds of a step that verifies only: every row gets a score. */
export function plainStep(cost, rows) {
  return curveAt(cost.rows, cost.trunk_ms, rows) + curveAt(cost.rows, cost.head_ms, rows);
}

/** Milliseconds of a step of one verify row and mask rows behind it, `picked` drafts of which are picked. */
export function draftingStep(cost, rows, picked) {
  const mask = rows - 1;
  if (mask < 1) return plainStep(cost, 1);
  const at = (curve, count) => curveAt(cost.rows, curve, count);
  return at(cost.trunk_ms, rows) + at(cost.head_ms, 1) + at(cost.adapter_ms, mask) + at(cost.head_ms, picked);
}

/**
 * Where two answers part: null where they are the same. `texts` are compared, and where they agree the ids of the
 * tokens too, since a text can be spelled in more than one way.
 */
export function firstDifference(one, other) {
  const letters = [Array.from(one.text), Array.from(other.text)];
  const at = parting(letters[0], letters[1]);
  if (at !== null) return { kind: "text", at, said: letters.map((all) => all.slice(at, at + 24).join("")) };
  const ids = [one, other].map(({ steps }) => tokenIds(steps));
  const token = parting(ids[0], ids[1]);
  return token === null ? null : { kind: "token", at: token, said: ids.map((all) => String(all[token] ?? "")) };
}

function parting(one, other) {
  const shorter = Math.min(one.length, other.length);
  for (let at = 0; at < shorter; at++) if (one[at] !== other[at]) return at;
  return one.length === other.length ? null : shorter;
}

/** The ids of an answer's tokens, in order. */
export function tokenIds(steps) {
  return steps.flatMap(({ trace }) => (trace ? keptTokens(trace).map(({ id }) => id) : []));
}
