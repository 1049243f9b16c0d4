// The step scrubber: a recorded answer step by step. Always a replay, never the model at work.

import { Inspector } from "./inspector.js";
import { drawStep, tellStep } from "./figure.js";
import { answerText, keep, layOut, Lines } from "./answer.js";

const PLAY_MS = 700; // a step, at a pace at which it can be read

/** `onStep(index)` is called with the index, among the traced steps, of the one that is shown. */
export class Scrubber {
  #root;
  #steps = []; // those of the recording that carry a trace
  #spans = []; // for each of them, the pieces of the answer that it brought
  #at = 0;
  #timer = 0;
  #onStep;

  constructor(root, hint, onStep) {
    this.#root = root;
    this.#onStep = onStep;
    new Inspector(this.#find("[data-text]"), hint);
    this.#slider.addEventListener("input", () => {
      this.pause();
      this.show(Number(this.#slider.value));
    });
    for (const button of root.querySelectorAll("[data-go]")) {
      button.addEventListener("click", () => {
        this.pause();
        this.show(this.#at + Number(button.dataset.go));
      });
    }
    this.#find("[data-play]").addEventListener("click", () => (this.#timer ? this.pause() : this.#play()));
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  get #slider() {
    return this.#find("input[type=range]");
  }

  /** Take up another recording, at its first decode step that checked a draft. */
  open(recording) {
    this.pause();
    this.#steps = recording.steps.filter((step) => step.trace);
    this.#spans = this.#steps.map(() => []);
    this.#layOutText(recording.steps);
    this.#slider.max = String(Math.max(0, this.#steps.length - 1));
    const first = this.#steps.findIndex(({ trace }) => trace.accepted > 0 && trace.accepted < trace.drafted.length);
    this.show(Math.max(0, first));
  }

  // All pieces at once; those of steps to come are pale.
  #layOutText(steps) {
    const index = new Map(this.#steps.map(({ trace }, i) => [trace, i]));
    let now = 0;
    const root = answerText("The answer up to this step");
    root.classList.add("scrub-text");
    this.#find("[data-text]").replaceChildren(root);
    const lines = new Lines(root);
    layOut(steps, (step, pieces) => {
      if (step.trace) now = index.get(step.trace);
      for (const piece of pieces) {
        const span = keep(piece);
        span.classList.add("ahead");
        this.#spans[now]?.push(span);
        lines.write(span, piece.text);
      }
    });
    this.#at = -1;
  }

  show(index) {
    const last = this.#steps.length - 1;
    if (last < 0) return;
    const at = Math.min(Math.max(index, 0), last);
    const from = Math.min(at, Math.max(0, this.#at));
    const to = Math.max(at, this.#at);
    for (let i = from; i <= to; i++) {
      for (const span of this.#spans[i]) {
        span.classList.toggle("ahead", i > at);
        span.classList.toggle("now", i === at);
      }
    }
    this.#at = at;
    const { trace } = this.#steps[at];
    drawStep(this.#find("table"), trace, this.#steps[at - 1]?.trace, this.#steps[at + 1]?.trace);
    const story = tellStep(trace);
    this.#find("[data-story]").textContent = story;
    this.#find("[data-count]").textContent = `step ${trace.step} of ${this.#steps[last].trace.step}`;
    this.#slider.value = String(at);
    this.#slider.setAttribute("aria-valuetext", story);
    this.#bringIntoSight(this.#spans[at][0]);
    this.#onStep(at);
  }

  // In the boxes that scroll, and in them alone: the page stays where it is.
  #bringIntoSight(span) {
    const figure = this.#find(".step-figure");
    const slot = figure.querySelector("tr.used .slot");
    const head = figure.querySelector("tr.used th")?.offsetWidth; // it stays while the others move
    figure.scrollLeft = slot ? slot.offsetLeft + slot.offsetWidth / 2 - (head + figure.clientWidth) / 2 : 0;
    if (!span) return;
    const box = this.#find(".scrub-text");
    const [inner, outer] = [span, box].map((one) => one.getBoundingClientRect());
    if (inner.top < outer.top || inner.bottom > outer.bottom) {
      box.scrollTop += (inner.top + inner.bottom - outer.top - outer.bottom) / 2;
    }
  }

  #play() {
    if (this.#at >= this.#steps.length - 1) this.show(0);
    this.#find("[data-play]").textContent = "Pause";
    this.#timer = setInterval(() => {
      this.show(this.#at + 1);
      if (this.#at >= this.#steps.length - 1) this.pause();
    }, PLAY_MS);
  }

  pause() {
    clearInterval(this.#timer);
    this.#timer = 0;
    this.#find("[data-play]").textContent = "Play";
  }
}
