// The chat: asks the server, and hands what comes back to the drawing parts.

import { fitHeight, Follower, submitOnEnter } from "./browser.js";
import { focusButton, swap } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Meters, Ribbon } from "./meters.js";
import { newRecording } from "./recording.js";
import { chatBody } from "./stream.js";
import { newTally, rates } from "./trace.js";
import { Turn } from "./turn.js";

const NARROW = matchMedia("(max-width: 60rem)"); // one column, as in the style sheets

export class Chat {
  #page;
  #root;
  #follower = new Follower();
  #meters;
  #ribbon;
  #turns = []; // { asked, answered } of the turns that the model is told about
  #running = null; // AbortController of the answer under way

  constructor(page) {
    this.#page = page;
    this.#root = page.root;
    this.#meters = new Meters(this.#find(".live"));
    this.#ribbon = new Ribbon(this.#find("[data-ribbon]"));
    new Inspector(this.#find("#t-turns"), this.#find("#t-hint"));
    this.#listen();
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  visible(now) {
    if (now) this.#fitPrompt();
  }

  focus() {
    this.#find("#t-prompt").focus({ preventScroll: true });
  }

  #listen() {
    const prompt = this.#find("#t-prompt");
    prompt.addEventListener("input", () => this.#fitPrompt());
    const form = this.#find("#t-ask");
    submitOnEnter(prompt, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask(prompt.value);
    });
    this.#find("#t-stop").addEventListener("click", () => this.#stop());
    this.#find("#t-clear").addEventListener("click", () => this.#clear());
    this.#find(".examples").addEventListener("click", (event) => {
      if (!event.target.matches("button")) return;
      this.#ask(event.target.textContent);
      focusButton(this.#find("#t-stop")); // the examples are gone, if it was asked
    });
    this.#makeRoom();
  }

  // On a narrow page the cards stand above the conversation: fold them.
  #makeRoom() {
    if (!NARROW.matches) return;
    for (const card of this.#root.querySelectorAll(".side details")) card.open = false;
  }

  #fitPrompt() {
    fitHeight(this.#find("#t-prompt"));
  }

  #setPrompt(text) {
    this.#find("#t-prompt").value = text;
    this.#fitPrompt();
  }

  #status(text) {
    const line = this.#find("#t-status");
    if (line.textContent !== text) line.textContent = text; // said aloud again otherwise
  }

  // ---- a turn ----

  async #ask(text) {
    const { server, settings } = this.#page;
    const asked = text.trim();
    if (!asked || this.#running || !settings.hold()) return;
    const running = new AbortController();
    if (!this.#page.engage(running)) return;
    this.#begin(running);
    const ready = await server.ready();
    if (this.#running !== running) return;
    if (!ready) {
      this.#status("");
      return this.#end();
    }
    this.#setPrompt("");
    const chosen = settings.read();
    const body = chatBody(server.model.id, this.#messages(asked), chosen);
    const recording = newRecording({ title: "Chat", asked, model: server.model, settings: chosen });
    await new Turn(this.#parts(chosen, running), recording).run((signal) => server.chat(body, signal), running.signal);
  }

  #parts(settings, running) {
    return {
      sampled: settings.temperature > 0,
      list: this.#find("#t-turns"),
      meters: this.#meters,
      ribbon: this.#ribbon,
      badge: this.#find("[data-badge]"),
      follow: (options) => this.#root.dataset.tab === "chat" && this.#follower.follow(options),
      status: (line) => this.#status(line),
      useSeed: (seed) => this.#page.settings.useSeed(seed),
      lookInside: (recording) => this.#page.lookInside(recording),
      raceIt: (asked) => this.#page.raceIt(asked),
      failed: (error, turn) => this.#failed(error, turn),
      done: (turn) => this.#done(turn),
      current: () => this.#running === running,
    };
  }

  #messages(asked) {
    const before = this.#turns.flatMap((turn) => [
      { role: "user", content: turn.asked },
      { role: "assistant", content: turn.answered },
    ]);
    return [...before, { role: "user", content: asked }];
  }

  #begin(running) {
    this.#running = running;
    delete this.#root.dataset.empty;
    this.#makeRoom();
    this.#page.problem("");
    this.#status("Waiting for the first token…");
    swap(this.#find("#t-send"), this.#find("#t-stop"));
  }

  #end() {
    this.#page.release(this.#running);
    this.#running = null;
    swap(this.#find("#t-stop"), this.#find("#t-send"));
    if (!this.#find("#t-turns").childElementCount) this.#root.dataset.empty = "";
  }

  #done(turn) {
    this.#page.shelf.put(turn.recording);
    if (turn.text) this.#turns.push({ asked: turn.recording.asked, answered: turn.text });
    this.#end();
  }

  #failed(error, turn) {
    this.#status("");
    this.#page.failed(error);
    if (turn.text) return;
    turn.remove();
    if (!this.#find("#t-prompt").value) this.#setPrompt(turn.recording.asked);
  }

  #stop() {
    this.#running?.abort();
    this.focus();
  }

  #clear() {
    this.#running?.abort();
    this.#end();
    this.#turns = [];
    this.#find("#t-turns").replaceChildren();
    this.#root.dataset.empty = "";
    this.#page.problem("");
    this.#status("");
    this.#ribbon.clear();
    this.#meters.show(rates(newTally()), { insist: true });
    this.#find("[data-badge]").textContent = "no answer yet";
    this.focus();
  }
}
