// One question and its answer on the page.

import { Answer, readDelta, readTrace } from "./answer.js";
import { formatRates } from "./meters.js";
import { count, finalRates, newTally, rates } from "./trace.js";

const ENDINGS = { stop: "finished", length: "cut at max tokens", abort: "ended by the server", error: "ended by an error" };

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** Asks one question: reads the stream, draws it, and says at the end what it took. `parts` is what the page lends. */
export class Turn {
  text = "";
  #parts;
  #question;
  #article;
  #answerText;
  #tally = newTally();

  constructor(parts, asked) {
    this.asked = asked;
    this.#parts = parts;
    this.#question = element("div", "asked", asked);
    this.#question.dir = "auto";
    this.#article = element("article", "answered");
    this.#article.setAttribute("aria-label", "Answer");
    this.#answerText = element("div", "answer-text");
    this.#answerText.tabIndex = 0;
    this.#answerText.setAttribute("role", "group");
    this.#answerText.setAttribute("aria-label", "Text of the answer; arrow keys walk through its tokens");
    this.#answerText.addEventListener("copy", copyExactly);
    this.#article.append(this.#answerText);
    parts.list.append(this.#question, this.#article);
  }

  remove() {
    this.#question.remove();
    this.#article.remove();
  }

  async run(body, running) {
    const parts = this.#parts;
    const end = { reason: null, usage: null, metrics: null };
    const answer = new Answer(this.#answerText, () => this.#drawn(running));
    parts.ribbon.clear();
    parts.badge.textContent = "measuring";
    parts.meters.show(rates(this.#tally), { insist: true });
    parts.follow({ insist: true });
    this.#tally.sentAt = performance.now();
    let failure = null;
    try {
      for await (const chunks of parts.open(body, running.signal)) {
        if (running.signal.aborted) break;
        this.#take(chunks, end);
        answer.push(chunks);
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
    }
    answer.finish();
    if (parts.current(running)) this.#close(end, running, failure);
  }

  #take(chunks, end) {
    const now = performance.now();
    for (const chunk of chunks) {
      const trace = readTrace(chunk);
      if (trace) {
        if (!this.#tally.tokens) this.#parts.status("Answering…");
        count(this.#tally, trace, now);
        this.#parts.ribbon.push([trace]);
      }
      this.text += readDelta(chunk);
      end.reason = chunk.choices?.[0]?.finish_reason ?? end.reason;
      end.usage = chunk.usage ?? end.usage;
      end.metrics = chunk.metrics ?? end.metrics;
    }
  }

  #drawn(running) {
    if (!this.#parts.current(running)) return;
    this.#parts.meters.show(rates(this.#tally));
    this.#parts.ribbon.draw();
    this.#parts.follow();
  }

  #close(end, running, failure) {
    const final = finalRates(this.#tally, end.metrics, end.usage);
    this.#parts.meters.show(final, { insist: true });
    this.#parts.badge.textContent = end.metrics ? "counted by the server" : "as far as it came";
    const stopped = running.signal.aborted;
    const why = stopped ? "stopped by you" : ENDINGS[end.reason];
    if (failure) this.#parts.failed(failure, this);
    else this.#parts.status(stopped ? "Stopped." : `Done: ${spoken(final)}.`);
    if (this.text || !failure) this.#article.append(this.#facts(final, end.metrics, why));
    this.#parts.done(this, running);
    this.#parts.follow();
  }

  #facts(final, metrics, why) {
    const shown = formatRates(final);
    const facts = element("div", "facts");
    const fact = (value, label) => {
      const line = element("span", "fact");
      line.append(element("b", "", value), ` ${label}`);
      facts.append(line);
    };
    fact(shown.tokens, final.tokens === 1 ? "token" : "tokens");
    fact(shown.perStep, "per step");
    fact(shown.perSecond, "per second");
    if (final.acceptance !== null) fact(shown.acceptance, "of drafts held");
    if (why) facts.append(element("span", "fact", why));
    const seed = metrics?.tidar?.seed;
    if (this.#parts.sampled && seed !== undefined) this.#addSeed(facts, String(seed));
    const copy = element("button", "quiet", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => this.#copy(copy));
    facts.append(copy);
    return facts;
  }

  #addSeed(facts, seed) {
    const line = element("span", "fact", "seed ");
    const button = element("button", "link", seed);
    button.type = "button";
    button.title = "Use this seed again";
    button.addEventListener("click", () => {
      this.#parts.useSeed(seed);
      this.#parts.status(`The next answer uses seed ${seed}.`);
    });
    line.append(button);
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

// Every line is a block and ends with its line end: a browser would copy that end twice, and the ghosts too.
function copyExactly(event) {
  const selection = getSelection();
  const range = selection.rangeCount ? selection.getRangeAt(0) : null;
  if (!range || !event.currentTarget.contains(range.commonAncestorContainer)) return;
  const copied = range.cloneContents();
  for (const ghosts of copied.querySelectorAll(".ghosts")) ghosts.remove();
  event.clipboardData.setData("text/plain", copied.textContent);
  event.preventDefault();
}

function spoken(final) {
  const { tokens, perStep } = formatRates(final);
  const words = final.tokens === 1 ? "token" : "tokens";
  return final.perStep === null ? `${tokens} ${words}` : `${tokens} ${words}, ${perStep} per step`;
}
