// One question and its answer on the page.

import { answerText } from "./answer.js";
import { button, element, focusButton } from "./dom.js";
import { formatRates } from "./meters.js";
import { Run } from "./run.js";
import { replicas } from "./stats.js";
import { answerMessage } from "./thoughts.js";
import { quoted } from "./trace.js";

const ENDINGS = { stop: "finished", length: "cut at max tokens", abort: "ended by the server", error: "ended by an error" };

/**
 * Asks one question: reads the stream, draws it, and says at the end what it took. `parts` is what the chat lends,
 * `place` counts the questions of the conversation. What asks anew is locked until the chat unlocks it.
 */
export class Turn {
  recording;
  place;
  #parts;
  #question;
  #article;
  #answerText;
  #edit;
  #again;
  #undo;
  #run = null;

  constructor(parts, recording, place) {
    this.recording = recording;
    this.place = place;
    this.#parts = parts;
    this.#edit = this.#asksAnew("Edit", () => parts.edit(this));
    this.#again = this.#asksAnew("Again", () => parts.again(this));
    this.#undo = button("quiet", "Undo", () => parts.undo());
    this.#undo.setAttribute("aria-label", "Undo: bring back what this answer took the place of");
    this.#undo.title = "Bring back what this answer took the place of";
    this.offerUndo(false);
    this.#again.title = "Ask this again, with the settings as they are now. It replaces this answer and all that follows.";
    this.lock(true);
    const asked = element("div", "asked", recording.asked);
    asked.dir = "auto";
    this.#question = element("div", "question", asked, this.#edit);
    this.#article = element("article", "answered");
    this.#article.setAttribute("aria-label", "Answer");
    this.#answerText = answerText("Text of the answer");
    this.#article.append(this.#answerText);
    this.show();
  }

  #asksAnew(text, onClick) {
    const made = button("quiet", text, onClick);
    made.setAttribute("aria-label", `${text}, question ${this.place}: ${quoted(this.recording.asked.replace(/\s+/g, " "))}`);
    return made;
  }

  get text() {
    return this.#run?.text ?? "";
  }

  get failed() {
    return Boolean(this.#run?.failure);
  }

  get stopped() {
    return Boolean(this.#run?.stopped);
  }

  /** What the model is told of it: nothing where it said nothing. */
  get messages() {
    return this.text ? [{ role: "user", content: this.recording.asked }, answerMessage(this.text)] : [];
  }

  /** Stand at the end of the conversation. */
  show() {
    this.#parts.list.append(this.#question, this.#article);
  }

  remove() {
    this.#question.remove();
    this.#article.remove();
  }

  /** What the live card says of an answer that is over. */
  showLive() {
    const { meters, ribbon, badge } = this.#parts;
    meters.show(this.#run.finalRates(), { insist: true });
    ribbon.clear();
    ribbon.push(this.recording.steps.map(({ trace }) => trace).filter(Boolean));
    ribbon.draw();
    badge.textContent = this.#run.metrics ? "counted by the server, timed here" : "as far as it came";
  }

  lock(locked) {
    this.#edit.disabled = this.#again.disabled = this.#undo.disabled = locked;
  }

  offerUndo(offered) {
    this.#undo.hidden = !offered;
  }

  /** Whether the question stands in the composer. */
  markEdited(edited) {
    this.#question.toggleAttribute("data-edited", edited);
  }

  focusEdit() {
    focusButton(this.#edit);
  }

  focusAgain() {
    focusButton(this.#again);
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
    const { failure, stopped, metrics } = this.#run;
    const final = this.#run.finalRates();
    this.showLive();
    const why = stopped ? "stopped by you" : ENDINGS[this.recording.finish] ?? "broken off";
    if (failure) this.#parts.failed(failure);
    else this.#parts.status(stopped ? "Stopped." : `Done: ${spoken(final)}.`);
    this.#article.append(this.#facts(final, metrics, why));
    this.#parts.follow();
    this.#parts.done(this);
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
    buttons.append(this.#undo, this.#again, inside, copy);
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
