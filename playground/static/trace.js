// What a step's trace means, in numbers and in tokens. Pure functions, no DOM.
//
// A trace names tokens and the text of each token by itself; the answer's true text comes in the content deltas.
// The two differ: a character may be spread over several tokens (each of which reads U+FFFD alone), and the server
// may hold text back until it is sure of it. `place` lays the deltas onto the tokens without changing one character.

/**
 * The tokens of a step that stay in the answer: the drafts that held, then the token the model said itself.
 * `slot` is the place in the block: 1 for the first draft, and one behind the last held draft for the model's own.
 * `logprobs`, where there are any, has an entry for each of them that shows text, in their order.
 */
export function keptTokens(trace, logprobs = null) {
  const kept = trace.drafted.slice(0, trace.accepted).map((token, i) => ({ ...token, kind: "held", slot: i + 1 }));
  if (trace.anchor) kept.push({ ...trace.anchor, kind: "own", slot: trace.accepted + 1 });
  return kept.map((token, i) => ({ ...token, trace, wait: token.text, chance: logprobs?.[i] ?? null }));
}

/** How many tokens a step brought: as many as `keptTokens` names. */
export function emitted(trace) {
  return trace.accepted + (trace.anchor ? 1 : 0);
}

/**
 * Whether a step read text before it went on, in more verify rows than a block has places: what a preemption or the end
 * of another replica left to be read again.
 */
export function readsAgain({ rows }, blockLength) {
  return rows.verify > Math.max(1, blockLength ?? Infinity);
}

/**
 * The drafts of a step that the model did not say. The first was refused; the others built on it and fell with it.
 * Where a stop cut the step there is no anchor, and nothing is known about the drafts behind the cut.
 */
export function rejectedTokens(trace) {
  if (!trace.anchor) return [];
  return trace.drafted
    .slice(trace.accepted)
    .map((token, i) => ({ ...token, kind: "rejected", slot: trace.accepted + i + 1, refused: i === 0, trace }));
}

/**
 * Lay `delta`, the text that the server released, onto `waiting`, the kept tokens whose text has not been shown yet.
 *
 * Returns `pieces`, whose texts joined are `delta` character for character, each with the tokens it stands for (more
 * than one where they share a character, none where nothing explains the text), and the tokens that still wait.
 */
export function place(waiting, delta) {
  const pieces = [];
  let queue = waiting;
  let rest = delta;
  while (rest && queue.length) {
    const { count, length, left } = nextPiece(queue, rest);
    if (length) pieces.push({ text: rest.slice(0, length), tokens: queue.slice(0, count) });
    queue = left ? [{ ...queue[count - 1], wait: left }, ...queue.slice(count)] : queue.slice(count);
    rest = rest.slice(length);
  }
  if (rest) pieces.push({ text: rest, tokens: [] });
  return { pieces, waiting: queue };
}

// The first `count` tokens stand for the first `length` characters; `left` is what the last of them has yet to show.
// A token that is spelled empty (it only begins a character) goes with the next one that is not.
function nextPiece(queue, rest) {
  const spelled = queue.findIndex((token) => token.wait);
  if (spelled >= 0) {
    const text = queue[spelled].wait;
    if (rest.startsWith(text)) return { count: spelled + 1, length: text.length, left: "" };
    if (text.startsWith(rest)) return { count: spelled + 1, length: rest.length, left: text.slice(rest.length) };
  }
  return nextAgreement(queue, rest);
}

const MOST_PASSED = 64; // tokens that are passed over, and characters that agree: a file may have any number of either

// Text and tokens differ here: go on at the next token whose text, with the ones behind it, is found in `rest`. What is
// passed over has a character of its own where it holds a part of one.
function nextAgreement(queue, rest) {
  let least = 0;
  for (let first = 1; first < Math.min(queue.length, MOST_PASSED); first++) {
    if (queue[first - 1].wait.includes("\uFFFD")) least = 1;
    let run = "";
    for (let i = first; i < queue.length && run.length < Math.min(rest.length, MOST_PASSED); i++) {
      if (queue[i].wait.includes("\uFFFD")) break;
      run += queue[i].wait;
    }
    if (!run) continue;
    const whole = rest.indexOf(run, least);
    if (whole >= 0) return { count: first, length: whole, left: "" };
    for (let at = Math.max(least, rest.length - run.length); at < rest.length; at++) {
      if (run.startsWith(rest.slice(at))) return { count: first, length: at, left: "" };
    }
  }
  return { count: queue.length, length: rest.length, left: "" };
}

/**
 * Sums over the steps of one answer. Step 0 reads the prompt: its token is no work of the drafts, so it is apart. `timed`
 * are the tokens that came behind `firstAt`: a read may bring the steps behind the first token with it, in no time.
 */
export function newTally() {
  const sums = { tokens: 0, steps: 0, stepTokens: 0, timed: 0, drafted: 0, accepted: 0 };
  return { ...sums, sentAt: null, firstAt: null, lastAt: null };
}

/** Add the step `trace` that arrived at `now` (milliseconds). */
export function count(tally, trace, now) {
  const tokens = emitted(trace);
  tally.tokens += tokens;
  tally.firstAt ??= now;
  tally.lastAt = now;
  if (now > tally.firstAt) tally.timed += tokens;
  if (trace.step > 0) {
    tally.steps += 1;
    tally.stepTokens += tokens;
    tally.drafted += trace.drafted.length;
    tally.accepted += trace.accepted;
  }
}

/**
 * The meters' numbers; null where there is nothing to tell yet. `stepTokens` are those of the `steps`. Times are this
 * browser's: `firstToken` in ms from sending to the first token, `perSecond` over the tokens behind it.
 */
export function rates(tally) {
  const seconds = (tally.lastAt - tally.firstAt) / 1000;
  return {
    tokens: tally.tokens,
    steps: tally.steps,
    stepTokens: tally.stepTokens,
    perStep: tally.steps ? tally.stepTokens / tally.steps : null,
    acceptance: tally.drafted ? tally.accepted / tally.drafted : null,
    perSecond: seconds > 0 ? tally.timed / seconds : null,
    firstToken: tally.firstAt === null || tally.sentAt === null ? null : tally.firstAt - tally.sentAt,
  };
}

/** The same numbers, with those that the server counted (`metrics` of the last chunk) in the place of ours. */
export function finalRates(tally, metrics, usage) {
  const own = rates(tally);
  const speculative = metrics?.speculative_decoding;
  const { decode_steps: steps = own.steps, tokens_per_step } = metrics?.tidar ?? {};
  const perStep = tokens_per_step ?? own.perStep;
  return {
    ...own,
    tokens: usage?.completion_tokens ?? own.tokens,
    steps,
    stepTokens: Math.round(steps * perStep),
    perStep,
    acceptance: speculative?.num_draft_tokens ? speculative.draft_acceptance_rate : own.acceptance,
  };
}

const QUOTE_LIMIT = 40;

/** A token's text in quotes for a hint: spaces visible as they are, line ends and other controls as escapes. */
export function quoted(text) {
  const letters = Array.from(text);
  const short = letters.length > QUOTE_LIMIT ? letters.slice(0, QUOTE_LIMIT).join("") + "…" : text;
  const shown = short.replace(/[\u0000-\u001f\u007f\u200b-\u200f\u2028-\u202e\u2066-\u2069]/g, escapeControl);
  return `“${shown}”`;
}

function escapeControl(letter) {
  const known = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  return known[letter] ?? `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

/** What there is to tell about one token: a title, and lines beneath it. */
export function describe(token) {
  const { trace } = token;
  const drafts = trace.drafted.length;
  const title = { held: "Draft that held", own: "Said by the model itself", rejected: "Rejected draft" }[token.kind];
  const where = [`step ${trace.step}`, `place ${token.slot} in the block`, `${Math.round(trace.t_ms)} ms`];
  return { title, quote: quoted(token.text), story: story(token, drafts), where: where.join(" · "), id: token.id };
}

/**
 * How likely the model found a token and its rivals, where log-probabilities were asked for: the token itself first
 * among those named, each with its share of 1. They are the model's raw scores, before temperature and top-p.
 */
export function chances({ chance }) {
  if (!chance) return [];
  const own = { text: quoted(chance.token), share: Math.exp(chance.logprob), own: true };
  const top = chance.top_logprobs ?? [];
  const itself = top.findIndex(({ token, logprob }) => token === chance.token && logprob === chance.logprob);
  const rivals = top.filter((_, i) => i !== itself);
  return [own, ...rivals.map(({ token, logprob }) => ({ text: quoted(token), share: Math.exp(logprob), own: false }))];
}

function story({ kind, slot, refused, trace }, drafts) {
  if (kind === "held") return `Guessed in the step before, draft ${slot} of ${drafts}; the model agreed.`;
  if (kind === "rejected") {
    const said = quoted(trace.anchor.text);
    return refused ? `The model said ${said} instead.` : "It built on a rejected draft, and fell with it.";
  }
  if (trace.step === 0) return "The first token, read off the prompt.";
  if (trace.accepted < drafts) return `Instead of the draft ${quoted(trace.drafted[trace.accepted].text)}.`;
  if (!drafts) return "There was no draft to check.";
  return drafts === 1 ? "The draft before it held." : `All ${drafts} drafts before it held.`;
}
