// The chat: asks the server, and hands what comes back to the drawing parts.

import { composes, fitHeight, Follower, NARROW, submitOnEnter } from "./browser.js";
import { focusButton, swap } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Meters, Ribbon } from "./meters.js";
import { newRecording } from "./recording.js";
import { chatBody } from "./stream.js";
import { newTally, rates } from "./trace.js";
import { Turn } from "./turn.js";
import { tellOfWaking, WAITING } from "./waking.js";

const NEAR_END = 120; // px
const NOTHING = { turns: [], edited: false };

export class Chat {
  #page;
  #root;
  #follower = new Follower(document.scrollingElement, NEAR_END, () => this.#root.dataset.tab === "chat");
  #meters;
  #ribbon;
  #turns = []; // all that stand on the page
  #running = null; // AbortController of the answer under way
  #replaced = NOTHING; // what the last answer took the place of, and whether with another question
  #editing = null; // { turn, draft }: whose question is in the composer, and what was there before

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
    if (!now) return;
    this.#fitPrompt();
    if (this.#running) this.#follower.follow();
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
      this.#ask(prompt.value, this.#editing?.turn);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#editing && !composes(event)) this.#cancel();
    });
    this.#find("#t-cancel").addEventListener("click", () => this.#cancel());
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
    this.#root.style.setProperty("--composer", `${this.#find(".composer").offsetHeight}px`);
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

  // What is asked takes the place of `turn`, if there is one, and of all behind it.
  async #ask(text, turn = null) {
    const { server, settings } = this.#page;
    const asked = text.trim();
    if (!asked || this.#running || !settings.hold()) return;
    const running = new AbortController();
    if (!this.#page.engage(running)) return;
    this.#begin(running);
    const edited = Boolean(this.#editing);
    if (edited) this.#endEdit();
    const ready = await server.ready(running.signal);
    if (this.#running !== running) return;
    if (!ready) {
      this.#status("");
      if (edited) this.#edit(turn, asked);
      return this.#end(turn);
    }
    if (!turn && this.#find("#t-prompt").value.trim() === asked) this.#setPrompt(""); // else another is being written
    this.#replaced = { turns: this.#cut(turn ? this.#turns.indexOf(turn) : this.#turns.length), edited };
    const chosen = settings.read();
    const before = this.#turns.flatMap((one) => one.messages);
    const body = chatBody(server.model.id, [...before, { role: "user", content: asked }], chosen);
    const recording = newRecording({ title: "Chat", asked, model: server.model, settings: chosen });
    const next = new Turn(this.#parts(chosen, running), recording, this.#turns.length + 1);
    this.#turns.push(next);
    this.#lock();
    const waits = () => this.#running === running && !recording.steps.length;
    tellOfWaking(server, server.model.id, waits, (line) => this.#status(line));
    await next.run((signal) => server.chat(body, signal), running.signal);
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
      again: (turn) => {
        this.#ask(turn.recording.asked, turn);
        focusButton(this.#find("#t-stop")); // the answer's button is gone, if it was asked
      },
      undo: () => this.#undo(),
      edit: (turn) => {
        this.#edit(turn, turn.recording.asked);
        this.#find("#t-prompt").focus();
      },
      failed: (error) => this.#failed(error),
      done: (turn) => this.#done(turn),
      current: () => this.#running === running,
    };
  }

  #begin(running) {
    this.#running = running;
    delete this.#root.dataset.empty;
    this.#makeRoom();
    this.#page.problem("");
    this.#status(WAITING);
    swap(this.#find("#t-send"), this.#find("#t-stop"));
    this.#lock();
  }

  // Who waited for an answer in the place of `turn`, which stands there still, is led back to it.
  #end(turn = null) {
    const waited = document.activeElement === this.#find("#t-stop");
    this.#page.release(this.#running);
    this.#running = null;
    swap(this.#find("#t-stop"), this.#find("#t-send"));
    if (!this.#turns.length) this.#root.dataset.empty = "";
    this.#lock();
    if (waited) turn?.focusAgain();
  }

  #done(turn) {
    this.#page.shelf.put(turn.recording);
    const replaced = this.#replaced.turns;
    // A new question comes back into the composer, and stays where it is if the next one is in there.
    const stays = !replaced.length && this.#find("#t-prompt").value;
    const nothing = !turn.text && !stays && (turn.failed || (turn.stopped && replaced.length));
    if (nothing) this.#takeBack();
    this.#end(nothing ? replaced[0] : null);
  }

  #failed(error) {
    this.#status("");
    this.#page.failed(error);
  }

  // ---- a turn that is asked anew ----

  #lock() {
    for (const turn of this.#turns) turn.lock(Boolean(this.#running || this.#editing));
    for (const turn of this.#turns) turn.offerUndo(turn === this.#turns.at(-1) && this.#replaced.turns.length > 0);
  }

  // Take the turns from number `first` on off the page.
  #cut(first) {
    const gone = this.#turns.splice(first);
    for (const turn of gone) turn.remove();
    return gone;
  }

  // The live card is about the last answer that stands on the page.
  #showLive() {
    const last = this.#turns.at(-1);
    if (last) return last.showLive();
    this.#ribbon.clear();
    this.#meters.show(rates(newTally()), { insist: true });
    this.#find("[data-badge]").textContent = "no answer yet";
  }

  // Nothing came of the last turn: conversation and composer are as they were before it was asked.
  #takeBack() {
    const { turns, edited } = this.#replaced;
    const asked = this.#bringBack();
    if (edited) this.#edit(turns[0], asked);
    else if (!turns.length) this.#setPrompt(asked);
  }

  // What the last turn took the place of stands there again; gives what that one asked.
  #bringBack() {
    const [{ recording: { asked } }] = this.#cut(-1);
    const { turns } = this.#replaced;
    this.#replaced = NOTHING;
    for (const old of turns) old.show();
    this.#turns.push(...turns);
    this.#showLive();
    return asked;
  }

  #undo() {
    const [first] = this.#replaced.turns;
    this.#bringBack();
    this.#lock();
    this.#status("The conversation is as it was before.");
    first.focusAgain();
  }

  // Write `text` in the place of what `turn` asked.
  #edit(turn, text) {
    this.#editing = { turn, draft: this.#find("#t-prompt").value };
    turn.markEdited(true);
    this.#setPrompt(text);
    swap(this.#find("#t-clear"), this.#find("#t-cancel"));
    this.#status(`Editing question ${turn.place}. Sending it replaces all that follows.`);
    this.#lock();
  }

  #endEdit() {
    const { turn, draft } = this.#editing;
    this.#editing = null;
    turn.markEdited(false);
    this.#setPrompt(draft);
    swap(this.#find("#t-cancel"), this.#find("#t-clear"));
    this.#lock();
  }

  #cancel() {
    const { turn } = this.#editing;
    this.#endEdit();
    this.#status("");
    turn.focusEdit();
  }

  #stop() {
    this.#running?.abort();
    this.focus();
  }

  #clear() {
    this.#running?.abort();
    this.#cut(0);
    this.#replaced = NOTHING;
    this.#end();
    this.#page.problem("");
    this.#status("");
    this.#showLive();
    this.focus();
  }
}
