// One lane of the race: its answer, its numbers, all its runs.

import { answerText } from "./answer.js";
import { Follower } from "./browser.js";
import { button } from "./dom.js";
import { Meters } from "./meters.js";
import { replay, Run } from "./run.js";
import { median } from "./stats.js";
import { newTally, rates } from "./trace.js";

const LINE = 24; // px: whoever scrolls up by more reads there

export class Lane {
  runs = [];
  #root;
  #meters;
  #inside;
  #over = null; // the latest run that is over

  constructor(root, lookInside) {
    this.#root = root;
    this.#meters = new Meters(root);
    this.#inside = button("quiet", "Look inside", () => lookInside(this.#over.recording));
    this.#inside.hidden = true;
    root.append(this.#inside);
  }

  get latest() {
    return this.runs.at(-1);
  }

  name(text) {
    this.#root.querySelector("h3").textContent = text;
  }

  clear() {
    this.runs = [];
    this.#box.replaceChildren();
    this.#meters.show(rates(newTally()), { insist: true });
    this.#inside.hidden = true;
    this.#state("waits");
  }

  #state(text) {
    this.#root.querySelector("[data-lane-state]").textContent = text;
  }

  get #box() {
    return this.#root.querySelector(".lane-text");
  }

  // In a box as high as the other lane's.
  #freshText() {
    const text = answerText("Text of this run");
    this.#box.replaceChildren(text);
    return text;
  }

  /** Show the answer from its start, to be compared with the other lane's. */
  toTop() {
    this.#root.querySelector(".answer-text").scrollTop = 0;
  }

  async measure(recording, open, signal) {
    const text = this.#freshText();
    const follower = new Follower(text, LINE);
    const run = new Run(text, recording, {
      drawn: () => {
        this.#meters.show(run.rates());
        follower.follow();
      },
    });
    this.runs.push(run);
    this.#state("measuring");
    await run.read(open, signal);
    this.#show(run);
  }

  #show(run) {
    this.#meters.show({ ...run.finalRates(), perSecond: this.speed(), firstToken: this.firstToken() }, { insist: true });
    this.#over = run;
    this.#inside.hidden = !run.recording.steps.some((step) => step.trace);
    this.#state(run.complete ? `measured ${this.runs.length === 1 ? "once" : `${this.runs.length} times`}` : "broken off");
  }

  /** Draw the latest run again at the times at which it came. */
  async replay(signal) {
    this.#box.style.minHeight = `${this.#box.offsetHeight}px`; // so that nothing moves while the text grows again
    const text = this.#freshText();
    const follower = new Follower(text, LINE);
    this.#root.dataset.replay = "";
    this.#state("replay");
    await replay(this.latest.recording, text, signal, () => follower.follow());
    this.#box.style.minHeight = "";
    delete this.#root.dataset.replay;
    this.#state(signal.aborted ? "replay stopped" : "replay over");
  }

  /** Tokens per second over all runs: the middle one. */
  speed() {
    return median(this.runs.map((run) => run.rates().perSecond).filter(Boolean));
  }

  firstToken() {
    return median(this.runs.map((run) => run.rates().firstToken).filter((value) => value !== null));
  }
}
