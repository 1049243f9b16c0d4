// Under the hood: one recorded answer, its steps, and what they come to.

import { Plot, drawBars } from "./charts.js";
import { drawCurve, tellCurve } from "./curve.js";
import { two } from "./numbers.js";
import { formatRecording, LARGEST_FILE, parseRecording } from "./recording.js";
import { Scrubber } from "./scrubber.js";
import { acceptanceByPosition, decodeTraces, describeShape, plural, shapes, stepTimes, tokensPerStep } from "./stats.js";
import { emitted, readsAgain } from "./trace.js";

const MOST_SHAPES = 8;
const wholePercent = (share) => `${Math.round(100 * share)} %`;

export class Hood {
  #page;
  #root;
  #scrubber;
  #rows;
  #curve;
  #visible = false;
  #drawn = null; // the recording that is on show

  constructor(page) {
    this.#page = page;
    this.#root = page.root.querySelector("#panel-hood");
    this.#rows = new Plot(this.#find("[data-chart=rows]"), 190);
    this.#curve = new Plot(this.#find("[data-chart=curve]"), 280);
    this.#scrubber = new Scrubber(this.#find(".scrubber"), page.root.querySelector("#t-hint"), (at) => this.#rows.mark(at));
    page.shelf.addEventListener("change", () => this.#show());
    page.server.addEventListener("models", () => this.#showCurve());
    this.#find("#h-which").addEventListener("change", (event) => {
      page.shelf.choose(page.shelf.recordings[event.target.selectedIndex]);
    });
    this.#find("#h-export").addEventListener("click", () => this.#export());
    this.#find("#h-open").addEventListener("click", () => this.#find("#h-file").click());
    this.#find("#h-file").addEventListener("change", (event) => this.#open(event.target));
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  /** The tab was opened or left: nothing is drawn or played while nobody looks. */
  visible(now) {
    this.#visible = this.#page.shelf.studied = now;
    if (!now) this.#scrubber.pause();
    this.#show();
  }

  #show() {
    const { recordings, chosen } = this.#page.shelf;
    if (!this.#visible) return;
    const select = this.#find("#h-which");
    select.replaceChildren(...recordings.map((one) => new Option(label(one), "", false, one === chosen)));
    this.#find(".hood-empty").hidden = Boolean(chosen);
    for (const part of this.#root.querySelectorAll("[data-needs-recording]")) part.hidden = !chosen;
    this.#find("#h-export").disabled = !chosen;
    if (!chosen) return this.#showCurve();
    if (chosen === this.#drawn) return;
    this.#drawn = chosen;
    this.#find("[data-origin]").textContent = origin(chosen);
    this.#drawRows();
    this.#scrubber.open(chosen);
    this.#drawNumbers(chosen);
    this.#showCurve();
  }

  #drawNumbers(recording) {
    const traces = decodeTraces(recording.steps);
    const places = acceptanceByPosition(traces);
    drawBars(
      this.#find("[data-chart=acceptance]"),
      places.map(({ judged, held }, i) => ({
        label: `draft ${i + 1}`,
        share: held / judged,
        value: `${wholePercent(held / judged)} · ${held} of ${judged}`,
      })),
    );
    this.#find("[data-note=acceptance]").textContent = places.length
      ? "Of the steps that verified a draft at that place, how many kept it."
      : "No step of this answer verified a draft.";
    const counts = tokensPerStep(traces);
    const most = Math.max(...counts, 1);
    drawBars(
      this.#find("[data-chart=tokens]"),
      counts.map((steps, tokens) => ({ label: plural(tokens, "token"), share: steps / most, value: plural(steps, "step") })).slice(1),
    );
    const total = traces.reduce((sum, trace) => sum + emitted(trace), 0);
    this.#find("[data-note=tokens]").textContent = traces.length
      ? `${total} tokens in ${plural(traces.length, "step")}: ${two.format(total / traces.length)} tokens a step. Without drafts every step brings one.`
      : "This answer had no decode step.";
    const found = shapes(traces);
    drawBars(
      this.#find("[data-chart=shapes]"),
      found.slice(0, MOST_SHAPES).map((shape) => ({
        label: describeShape(shape),
        share: shape.steps / found[0].steps,
        value: plural(shape.steps, "step"),
      })),
    );
    const more = found.length > MOST_SHAPES ? ` ${plural(found.length - MOST_SHAPES, "rarer shape")} left out.` : "";
    const { drafts } = recording.settings;
    const chose = { auto: "The policy chose these shapes by measured cost and acceptance.", full: "Full drafting was asked for.", off: "Drafts were switched off." }[drafts];
    this.#find("[data-note=shapes]").textContent = chose + more;
  }

  #drawRows() {
    const traces = this.#drawn.steps.map((step) => step.trace).filter(Boolean);
    const { block_length } = this.#drawn.model;
    const decode = traces
      .map((trace, x) => ({ x, rows: trace.rows, reads: trace.step === 0 || readsAgain(trace, block_length) }))
      .filter(({ reads }) => !reads); // hundreds of rows would leave the others none of the height
    const most = decode.reduce((found, { rows }) => Math.max(found, rows.verify + rows.mask), 1);
    this.#rows.show((canvas) => {
      canvas.axes({ xStart: -0.5, xEnd: traces.length - 0.5, yEnd: most, xLabel: "step", yLabel: "rows" });
      canvas.columns(decode.map(({ x, rows }) => ({ x, from: 0, to: rows.verify })), "verify");
      canvas.columns(decode.map(({ x, rows }) => ({ x, from: rows.verify, to: rows.verify + rows.mask })), "mask");
    });
  }

  #showCurve() {
    if (!this.#visible) return;
    const recording = this.#page.shelf.chosen;
    const cost = recording ? recording.model.step_cost : this.#page.server.facts.step_cost;
    this.#find("[data-curve]").hidden = !cost;
    if (!cost) return;
    const model = recording?.model ?? this.#page.server.facts;
    const times = stepTimes(recording?.steps ?? [], model.block_length);
    this.#curve.show((canvas) => drawCurve(canvas, cost, times, model.block_length));
    this.#find("[data-note=curve]").textContent = tellCurve(cost, times);
  }

  // ---- files ----

  #export() {
    const { chosen } = this.#page.shelf;
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([formatRecording(chosen)], { type: "application/json" }));
    link.download = `tidar-trace-${chosen.made.replace(/[^0-9T]/g, "").slice(0, 15)}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  async #open(input) {
    const [file] = input.files;
    input.value = ""; // so that the same file can be opened again
    if (!file) return;
    this.#page.problem("");
    try {
      if (file.size > LARGEST_FILE) throw new Error("This file is too large for a trace: 64 MiB at most.");
      const recording = parseRecording(await file.text());
      if (!recording.steps.some((step) => step.trace)) throw new Error("This trace holds no steps.");
      this.#page.shelf.put(recording);
    } catch (error) {
      this.#page.problem(error.message);
    }
  }
}

function label({ title, asked, settings, opened, made }) {
  const question = Array.from(asked.replace(/\s+/g, " "));
  const short = question.length > 48 ? `${question.slice(0, 47).join("")}…` : question.join("");
  const at = new Date(made);
  const time = Number.isNaN(at.getTime()) ? "" : ` · ${at.toLocaleTimeString()}`; // what was asked again is told apart
  return `${opened ? "File: " : ""}${title} (${settings.drafts}): ${short}${time}`;
}

function origin({ opened, made, model }) {
  const at = new Date(made);
  const when = Number.isNaN(at.getTime()) ? "at an unknown time" : at.toLocaleString();
  const where = [model.id, model.dtype, model.device].filter(Boolean).join(" · ");
  return opened
    ? `Opened from a file, which says: recorded ${when}, ${where}. Nothing in it was measured here.`
    : `Recorded in this page, ${when}, ${where}.`;
}
