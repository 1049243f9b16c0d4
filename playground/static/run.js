// One streamed answer: drawn as it comes, counted, and recorded.

import { Answer } from "./answer.js";
import { readChunk } from "./recording.js";
import { count, finalRates, newTally, rates } from "./trace.js";

/** Reads a stream once. `recording` gets the steps; `hooks.drawn`, and `hooks.traces` if any, is called as they come. */
export class Run {
  text = "";
  metrics = null;
  failure = null;
  stopped = false;
  recording;
  #usage = null;
  #tally = newTally();
  #answer;
  #hooks;

  constructor(root, recording, hooks) {
    this.recording = recording;
    this.#hooks = hooks;
    this.#answer = new Answer(root, hooks.drawn);
  }

  /** Draw and record what `open(signal)` yields; `failure` and `stopped` say how it ended, if not well. */
  async read(open, signal) {
    this.#tally.sentAt = performance.now();
    try {
      for await (const chunks of open(signal)) {
        if (signal.aborted) break;
        this.#take(chunks);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.failure = error;
    }
    this.stopped = signal.aborted;
    this.#answer.finish();
  }

  /** The answer came to its own end: all of it is here. */
  get complete() {
    return !this.failure && !this.stopped && this.recording.finish !== null;
  }

  rates() {
    return rates(this.#tally);
  }

  finalRates() {
    return finalRates(this.#tally, this.metrics, this.#usage);
  }

  #take(chunks) {
    const now = performance.now();
    const steps = chunks.map((chunk) => readChunk(chunk, now - this.#tally.sentAt));
    const traces = steps.map((step) => step.trace).filter(Boolean);
    for (const trace of traces) count(this.#tally, trace, now);
    for (const step of steps) this.text += step.text;
    this.recording.steps.push(...steps.filter((step) => step.trace || step.text));
    for (const chunk of chunks) {
      this.recording.finish = chunk.choices?.[0]?.finish_reason ?? this.recording.finish;
      this.#usage = chunk.usage ?? this.#usage;
      this.metrics = chunk.metrics ?? this.metrics;
    }
    const seed = this.metrics?.tidar?.seed;
    if (seed !== undefined) this.recording.seed = String(seed);
    this.#hooks.traces?.(traces);
    this.#answer.push(steps);
  }
}

/**
 * Draw a recording into `root` at the times at which it came. Resolves when all of it is drawn, or `signal` aborts;
 * then the rest is left out. `drawn()` is called after every frame.
 */
export function replay(recording, root, signal, drawn) {
  const answer = new Answer(root, drawn);
  const begun = performance.now();
  const { steps } = recording;
  let next = 0;
  return new Promise((resolve) => {
    const frame = () => {
      const until = performance.now() - begun;
      const first = next;
      while (next < steps.length && steps[next].at <= until) next += 1;
      if (next > first) answer.push(steps.slice(first, next));
      if (next < steps.length && !signal.aborted) return requestAnimationFrame(frame);
      answer.finish();
      resolve();
    };
    frame();
  });
}
