// A bounded burst of prompts in one request, and how batching and the draft policy respond to it.
//
// One request of many prompts, because a browser opens no more than six connections to a host.

import { drawBars, Plot } from "./charts.js";
import { swap } from "./dom.js";
import { one, two } from "./numbers.js";
import { plural } from "./stats.js";
import { emitted, readsAgain } from "./trace.js";
import { tellOfWaking, WAITING } from "./waking.js";

const SLICE_MS = 500;
const STEPS_A_PART = 2; // of the curve, at least: with fewer it would fall to nothing between the steps of a large model
const SHOW_MS = 250;

/** Upper ends of the classes of answers at once. */
const CLASSES = [1, 2, 4, 8, 16, 32, 64];

/**
 * Counts over a burst of `answers`, by time and by how many answers were under way. Times in milliseconds. `blockLength`
 * is the drafter's.
 */
export class BurstTally {
  slices = []; // { active, tokens } for every half second
  classes = new Map(); // upper end -> { steps, verify, mask, tokens }
  tokens = 0;
  done = 0;
  firstAt = null;
  lastAt = 0;
  #answers;
  #blockLength;
  #stepped = new Set(); // answers that had their part of the engine's step under way
  #steps = 0; // of the engine
  #ended = 0; // answers that ended in the steps before that one
  #timed = 0; // tokens that were made while the clock of `tokensPerSecond` ran

  constructor(answers, blockLength) {
    this.#answers = answers;
    this.#blockLength = blockLength;
  }

  /**
   * One step of the answer number `answer` that came at `at`; `finished`: it was its last. Answers that share a step of
   * the engine, and may end in it together, come one by one: the next step begins with an answer that had this one.
   */
  count(answer, trace, finished, at) {
    const tokens = emitted(trace);
    if (this.#stepped.has(answer)) {
      this.#stepped.clear();
      this.#ended = this.done;
    }
    if (!this.#stepped.size) this.#steps += 1;
    this.#stepped.add(answer);
    const active = this.#answers - this.#ended;
    this.firstAt ??= at;
    this.lastAt = at;
    this.tokens += tokens;
    const slice = Math.floor(at / SLICE_MS);
    this.slices[slice] ??= { active: 0, tokens: 0 };
    this.slices[slice].active = Math.max(this.slices[slice].active, active);
    this.slices[slice].tokens += tokens;
    if (trace.step > 0 && at > this.firstAt) this.#timed += tokens;
    if (trace.step > 0 && !readsAgain(trace, this.#blockLength)) {
      const end = CLASSES.find((most) => active <= most) ?? CLASSES.at(-1);
      if (!this.classes.has(end)) this.classes.set(end, { steps: 0, verify: 0, mask: 0, tokens: 0 });
      const found = this.classes.get(end);
      found.steps += 1;
      found.verify += trace.rows.verify;
      found.mask += trace.rows.mask;
      found.tokens += tokens;
    }
    if (finished) this.done += 1;
  }

  /**
   * For every half second, or as many as `STEPS_A_PART` steps take where they are slow: `{ at, perSecond, active }`: its
   * middle in seconds, tokens per second, answers under way. The last part ends with the last token; where that comes too
   * soon to tell a speed, it is part of the one before.
   */
  get course() {
    const every = Math.max(1, Math.ceil((STEPS_A_PART * (this.lastAt - this.firstAt)) / this.#steps / SLICE_MS));
    let active = this.#answers;
    const parts = [];
    for (let i = 0; i < this.slices.length; i += every) {
      const some = this.slices.slice(i, i + every).filter(Boolean);
      if (some.length) active = Math.max(...some.map((slice) => slice.active));
      const tokens = some.reduce((sum, slice) => sum + slice.tokens, 0);
      parts.push({ from: i * SLICE_MS, to: Math.min((i + every) * SLICE_MS, this.lastAt), tokens, active });
    }
    const last = parts.at(-1);
    if (parts.length > 1 && last.to - last.from < (every * SLICE_MS) / 2) {
      parts.pop();
      parts.at(-1).to = last.to;
      parts.at(-1).tokens += last.tokens;
    }
    return parts.map(({ from, to, tokens, active }) => ({
      at: (from + to) / 2000,
      perSecond: (1000 * tokens) / (to - from || 1),
      active,
    }));
  }

  /** From the first token to the last; null where no step came behind those that read the prompts. */
  get tokensPerSecond() {
    const seconds = (this.lastAt - (this.firstAt ?? 0)) / 1000;
    return this.#timed ? this.#timed / seconds : null;
  }
}

/** How a class of `CLASSES` is called. */
function classLabel(end) {
  const below = CLASSES[CLASSES.indexOf(end) - 1] ?? 0;
  return end - below === 1 ? `${end} at once` : `${below + 1}–${end} at once`;
}

export class Burst {
  #page;
  #root;
  #chart;
  #running = null;

  constructor(page, root) {
    this.#page = page;
    this.#root = root;
    this.#chart = new Plot(this.#find("[data-chart=burst]"), 180);
    this.#find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (event.target.reportValidity()) this.#start();
    });
    this.#find("#b-stop").addEventListener("click", () => this.#running?.abort());
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  #status(text) {
    this.#find("#b-status").textContent = text;
  }

  async #start() {
    const { server, problem, failed, engage, release } = this.#page;
    const running = new AbortController();
    if (this.#running || !engage(running)) return;
    this.#running = running;
    problem("");
    swap(this.#find("#b-start"), this.#find("#b-stop"));
    this.#find("[data-burst]").hidden = true;
    const answers = Number(this.#find("#b-answers").value);
    const ready = await server.ready(running.signal);
    const tally = new BurstTally(answers, server.facts.block_length);
    try {
      if (ready) await this.#send(answers, tally, running.signal);
    } catch (error) {
      if (error.name !== "AbortError") failed(error);
    }
    this.#find("#b-status").ariaBusy = "false";
    if (tally.tokens) this.#show(tally, answers, running.signal.aborted ? "Stopped" : tally.done < answers ? "Broken off" : "Done");
    else this.#status(running.signal.aborted ? "Stopped." : "");
    release(running);
    this.#running = null;
    swap(this.#find("#b-stop"), this.#find("#b-start"));
  }

  async #send(answers, tally, signal) {
    const { server } = this.#page;
    const { model } = server; // of every request, whatever is chosen meanwhile
    this.#status(`Writing ${plural(answers, "prompt")}…`);
    const prompts = await Promise.all(Array.from({ length: answers }, (_, i) => this.#prompt(i, model, signal)));
    const body = {
      model: model.id,
      prompt: prompts,
      max_tokens: Number(this.#find("#b-tokens").value),
      temperature: 0,
      stream: true,
      tidar: { trace: true, drafts: this.#find("[name=b-drafts]:checked").value },
    };
    const begun = performance.now();
    this.#status(WAITING);
    const waits = () => this.#running?.signal === signal && !tally.tokens;
    tellOfWaking(server, model.id, waits, (line) => this.#status(line));
    let shownAt = begun;
    this.#find("#b-status").ariaBusy = "true"; // it changes too often to be said aloud: the last line alone is
    for await (const chunks of server.complete(JSON.stringify(body), signal)) {
      const now = performance.now();
      for (const chunk of chunks) {
        const [choice] = chunk.choices ?? [];
        if (chunk.tidar) tally.count(choice?.index, chunk.tidar, Boolean(choice?.finish_reason), now - begun);
      }
      if (now - shownAt < SHOW_MS) continue;
      shownAt = now;
      this.#show(tally, answers, "Measuring");
    }
  }

  // Through the model's own template: /v1/completions takes token ids.
  async #prompt(number, model, signal) {
    const messages = [{ role: "user", content: `Tell me something about the number ${number + 2}, in plain words.` }];
    return (await this.#page.server.tokenize({ model: model.id, messages }, signal)).tokens;
  }

  #show(tally, answers, state) {
    this.#find("[data-burst]").hidden = false;
    const { course, classes, done, tokens, tokensPerSecond, lastAt } = tally;
    const speed = tokensPerSecond === null ? "" : `, ${one.format(tokensPerSecond)} tokens per second in all`;
    this.#status(`${state}: ${done} of ${plural(answers, "answer")} finished, ${tokens} tokens${speed}.`);
    this.#find("[data-answers]").textContent = `answers under way, of ${answers}: all of them at the top`;
    this.#chart.show((canvas) => {
      const yEnd = Math.max(...course.map(({ perSecond }) => perSecond), 1);
      canvas.axes({ xEnd: lastAt / 1000, yEnd, xLabel: "seconds", yLabel: "tokens/s" });
      canvas.line(course.map(({ at, perSecond }) => ({ x: at, y: perSecond })), "plain");
      canvas.line(course.map(({ at, active }) => ({ x: at, y: (canvas.top * active) / answers })), "drafting");
    });
    const found = [...classes].sort(([a], [b]) => a - b);
    const rows = ({ verify, mask, steps }) => (verify + mask) / steps;
    const most = Math.max(...found.map(([, one]) => rows(one)), 1);
    drawBars(
      this.#find("[data-chart=classes]"),
      found.map(([end, sums]) => ({
        label: classLabel(end),
        share: rows(sums) / most,
        value: `${one.format(sums.verify / sums.steps)} verify + ${one.format(sums.mask / sums.steps)} mask rows, ${two.format(sums.tokens / sums.steps)} tokens`,
      })),
    );
  }
}
