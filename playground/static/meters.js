// The live numbers, and the ribbon of the last steps.

import { element } from "./dom.js";
import { one, orDash, two, whole } from "./numbers.js";
import { plural } from "./stats.js";

const RIBBON_STEPS = 64;
const METER_MS = 100; // numbers that change faster than this cannot be read

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function formatTime(ms) {
  return ms < 999.5 ? `${whole.format(Math.round(ms))} ms` : `${two.format(ms / 1000)} s`;
}

function formatSpeed(perSecond) {
  if (perSecond < 99.95) return one.format(perSecond);
  return (perSecond < 9999.5 ? whole : compact).format(perSecond);
}

/** Every number of `rates` as the reader sees it; a dash where there is none. */
export function formatRates(rates) {
  return {
    tokens: whole.format(rates.tokens),
    steps: whole.format(rates.steps),
    perStep: orDash(rates.perStep, two.format),
    inWords: rates.perStep === null ? "" : `${plural(rates.stepTokens, "token")} in ${plural(rates.steps, "step")}`,
    acceptance: orDash(rates.acceptance, (value) => `${Math.round(value * 100)} %`),
    perSecond: orDash(rates.perSecond, formatSpeed),
    firstToken: orDash(rates.firstToken, formatTime),
  };
}

/** Writes rates into the elements of `root` that carry a `data-meter` name. */
export class Meters {
  #fields;
  #bar;
  #drawnAt = -Infinity;

  constructor(root) {
    this.#fields = [...root.querySelectorAll("[data-meter]")];
    this.#bar = root.querySelector("[data-meter-bar]");
  }

  /** Show `rates`, unless numbers were shown a moment ago and nothing insists; whether they were shown. */
  show(rates, { insist = false } = {}) {
    const now = performance.now();
    if (!insist && now - this.#drawnAt < METER_MS) return false;
    this.#drawnAt = now;
    const shown = formatRates(rates);
    for (const field of this.#fields) {
      const text = shown[field.dataset.meter];
      if (field.textContent !== text) field.textContent = text;
    }
    this.#bar?.style.setProperty("--part", String(rates.acceptance ?? 0));
    return true;
  }
}

/** One column a step, newest right: held drafts, the model's own token on top, rejected drafts above it. */
export class Ribbon {
  #root;
  #traces = [];

  constructor(root) {
    this.#root = root;
  }

  clear() {
    this.#traces = [];
    this.#root.replaceChildren();
  }

  push(traces) {
    this.#traces.push(...traces);
  }

  draw() {
    if (!this.#traces.length) return;
    const fresh = this.#traces.slice(-RIBBON_STEPS).map(column);
    this.#traces = [];
    this.#root.append(...fresh);
    while (this.#root.childElementCount > RIBBON_STEPS) this.#root.firstElementChild.remove();
  }
}

function column(trace) {
  const rejected = trace.anchor ? trace.drafted.length - trace.accepted : 0;
  const cells = [
    ...Array(trace.accepted).fill("held"),
    ...(trace.anchor ? ["own"] : []),
    ...Array(rejected).fill("rejected"),
  ];
  return element("span", "column-of-step", ...cells.map((kind) => element("i", kind)));
}
