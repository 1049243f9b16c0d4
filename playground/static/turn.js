// One question and its answer on the page.

import { answerText } from "./answer.js";
import { button, element } from "./dom.js";
import { formatRates } from "./meters.js";
import { Run } from "./run.js";
import { replicas } from "./stats.js";

const ENDINGS = { stop: "finished", length: "cut at max tokens", abort: "ended by the server", error: "ended by an error" };

/** Asks one question: reads the stream, draws it, and says at the end what it took. `parts` is what the chat lends. */
export class Turn {
  recording;
  #parts;
  #question;
  #article;
  #answerText;
  #run = null;

  constructor(parts, recording) {
    this.recording = recording;
    this.#parts = parts;
    this.#question = element("div", "asked", recording.asked);
    this.#question.dir = "auto";
    this.#article = element("article", "answered");
    this.#article.setAttribute("aria-label", "Answer");
    this.#answerText = answerText("Text of the answer");
    this.#article.append(this.#answerText);
    parts.list.append(this.#question, this.#article);
  }

  get text() {
    return this.#run?.text ?? "";
  }

  remove() {
    this.#question.remove();
    this.#article.remove();
  }

  /** Read the stream that `open(signal)` starts. */
  async run(open, signal) {
    const parts = this.#parts;
    const run = new Run(this.#answerText, this.recording, {
      traces: (traces) => {
        if (traces.length) parts.status("Answering…");
        parts.ribbon.push(traces);
      },
      drawn: () => this.#drawn(),
    });
    this.#run = run;
    parts.ribbon.clear();
    parts.badge.textContent = "measuring";
    parts.meters.show(run.rates(), { insist: true });
    parts.follow({ insist: true });
    await run.read(open, signal);
    if (parts.current()) this.#close();
  }

  #drawn() {
    if (!this.#parts.current()) return;
    if (this.#parts.meters.show(this.#run.rates())) this.#parts.ribbon.draw();
    this.#parts.follow();
  }

  #close() {
    const { failure, stopped, metrics, text } = this.#run;
    const final = this.#run.finalRates();
    this.#parts.meters.show(final, { insist: true });
    this.#parts.ribbon.draw();
    this.#parts.badge.textContent = metrics ? "counted by the server" : "as far as it came";
    const why = stopped ? "stopped by you" : ENDINGS[this.recording.finish] ?? "broken off";
    if (failure) this.#parts.failed(failure, this);
    else this.#parts.status(stopped ? "Stopped." : `Done: ${spoken(final)}.`);
    if (text || !failure) this.#article.append(this.#facts(final, metrics, why));
    this.#parts.done(this);
    this.#parts.follow();
  }

  #facts(final, metrics, why) {
    const { steps, asked, settings } = this.recording;
    const shown = formatRates(final);
    const facts = element("div", "facts");
    const fact = (value, label) => {
      const line = element("span", "fact");
      line.append(element("b", "", value), ` ${label}`);
      facts.append(line);
    };
    if (final.tokens) fact(shown.tokens, final.tokens === 1 ? "token" : "tokens");
    if (final.perStep !== null) fact(shown.perStep, "per step");
    if (final.perSecond !== null) fact(shown.perSecond, "per second");
    if (final.acceptance !== null) fact(shown.acceptance, "of drafts held");
    for (const name of replicas(steps).slice(1)) facts.append(element("span", "fact", `carried on by replica ${name}`));
    facts.append(element("span", "fact", why));
    const seed = metrics?.tidar?.seed;
    if (this.#parts.sampled && seed !== undefined) this.#addSeed(facts, String(seed));
    if (settings.drafts === "full" && steps.some(({ trace }) => trace?.drafted.length)) {
      const race = button("link", "Race it", () => this.#parts.raceIt(asked));
      race.title = "Full drafting shows most; the race measures what drafts bring on Auto.";
      facts.append(race);
    }
    const buttons = element("span", "fact-buttons");
    const inside = button("quiet", "Look inside", () => this.#parts.lookInside(this.recording));
    inside.hidden = !steps.some((step) => step.trace);
    const copy = button("quiet", "Copy", () => this.#copy(copy));
    copy.hidden = !this.text;
    buttons.append(inside, copy);
    facts.append(buttons);
    return facts;
  }

  #addSeed(facts, seed) {
    const line = element("span", "fact", "seed ");
    const again = button("link", seed, () => {
      this.#parts.useSeed(seed);
      this.#parts.status(`The next answer uses seed ${seed}.`);
    });
    again.title = "Use this seed again";
    line.append(again);
    facts.append(line);
  }

  async #copy(button) {
    try {
      await navigator.clipboard.writeText(this.text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(this.#answerText);
      button.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
}

function spoken(final) {
  const { tokens, perStep } = formatRates(final);
  const words = final.tokens === 1 ? "token" : "tokens";
  return final.perStep === null ? `${tokens} ${words}` : `${tokens} ${words}, ${perStep} per step`;
}
