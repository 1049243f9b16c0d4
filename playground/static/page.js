// The page: its tabs, the server behind it, and what the views share.

import { keyForm, NARROW } from "./browser.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Hood } from "./hood.js";
import { Race } from "./race.js";
import { Server } from "./server.js";
import { Settings } from "./settings.js";
import { Shelf } from "./shelf.js";
import { Tabs } from "./tabs.js";

const STATES = { 0: "No answer from the server", 401: "Waiting for an API key", 503: "The model is not ready" };
// By the field of a request that does not fit the model.
const MAKE_ROOM = {
  max_tokens: "Lower “Max tokens” in the settings: at its maximum it is as many as there is room for.",
  messages: "In a conversation, “Clear” makes room.",
};
const STILL = matchMedia("(prefers-reduced-motion: reduce)"); // a rejected draft that goes would move the words behind it
const LOOK_AGAIN_MS = 3000; // for a server that did not answer, or is starting

class Page {
  #root;
  #server;
  #settings;
  #views = {};
  #tabs = null;
  #asking = null; // AbortController of the one view that asks the server
  #lookingAgain = 0;
  #lookedAgain = false; // nobody asked for that, so nobody is told again that it failed
  #told = ""; // of the server, while it fails

  constructor(root, address) {
    this.#root = root;
    this.#server = new Server(address);
    this.#settings = new Settings(root, this.#server);
    const shelf = new Shelf();
    const shared = {
      root,
      server: this.#server,
      settings: this.#settings,
      shelf,
      problem: (text) => this.#problem(text),
      failed: (error) => this.#failed(error),
      engage: (running) => this.#engage(running),
      release: (running) => this.#release(running),
      lookInside: (recording) => {
        shelf.choose(recording);
        this.#tabs.open("hood", { fromTop: true });
      },
      raceIt: (asked) => {
        this.#tabs.open("race", { fromTop: true });
        this.#views.race.prepare(asked);
      },
    };
    this.#views.chat = new Chat(shared);
    this.#views.race = new Race(shared);
    this.#views.hood = new Hood(shared);
    this.#views.cluster = new Cluster(shared);
    this.#tabs = new Tabs(root, (name) => this.#opened(name));
    this.#listen();
    this.#showKey();
    this.#server.findModels();
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  #opened(name) {
    this.#problem("");
    this.#settings.show();
    for (const [of, view] of Object.entries(this.#views)) view.visible(of === name);
  }

  #listen() {
    keyForm(this.#find("#t-key-form"), (value) => this.#useKey(value), (text) => this.#problem(text));
    this.#find("#t-close").addEventListener("click", () => {
      this.#problem("");
      this.#find("[role=tab][aria-selected=true]").focus({ preventScroll: true }); // the button is gone
    });
    this.#find("#t-forget").addEventListener("click", () => this.#forgetKeys());
    for (const radio of this.#root.querySelectorAll("[name=t-ghosts]")) {
      radio.addEventListener("change", () => (this.#root.dataset.ghosts = radio.value));
      if (STILL.matches && radio.value === "keep") radio.click();
    }
    const marks = this.#find("#t-marks");
    marks.addEventListener("change", () => (this.#root.dataset.marks = marks.checked ? "on" : "off"));
    this.#server.addEventListener("models", () => this.#showServer());
    this.#server.addEventListener("key", () => this.#showKey());
    NARROW.addEventListener("change", () => this.#placeCards());
    this.#placeCards();
    this.#listenToTheme();
  }

  // The keyboard goes as the eye does: the cards stand above the views on a narrow page, else at their right.
  #placeCards() {
    const cards = this.#find(".side");
    const focused = cards.contains(document.activeElement) && document.activeElement;
    if (NARROW.matches) this.#find(".notices").after(cards);
    else [...this.#root.querySelectorAll("[role=tabpanel]")].at(-1).after(cards);
    if (focused) focused.focus({ preventScroll: true }); // what is moved loses it
  }

  #listenToTheme() {
    const button = this.#find("#t-theme");
    const theme = window.tidarTheme;
    const words = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
    const show = () => {
      const [label, spoken] = words[theme.name];
      button.querySelector("[data-theme-name]").textContent = label;
      button.setAttribute("aria-label", `Colours: ${spoken}`);
    };
    button.addEventListener("click", () => {
      theme.next();
      show();
    });
    theme.apply();
    show();
  }

  // ---- the server and its key ----

  #showServer() {
    const { failure, model, facts, key } = this.#server;
    const served = this.#find("#t-served");
    const say = (text) => (served.querySelector("[data-served]").textContent = text);
    served.dataset.state = model && !failure ? "up" : "down";
    clearTimeout(this.#lookingAgain);
    if (failure) {
      say(STATES[failure.status] ?? `The server answered ${failure.status}`);
      const tell = (failure.status !== 401 || key.value) && (this.#asking || !this.#lookedAgain);
      if (tell) this.#problem((this.#told = failure.message));
      this.#lookedAgain = false;
      if (failure.status === 401) this.#wantKey();
      else this.#lookingAgain = setTimeout(() => this.#lookAgain(), LOOK_AGAIN_MS);
      return;
    }
    this.#lookedAgain = false;
    if (this.#told && this.#find("#t-problem").textContent === this.#told) this.#problem("");
    this.#told = "";
    this.#find("#t-key-form").hidden = true; // it wants none, or has ours
    if (!model) return say("No model is being served");
    const exact = facts.exact ? "exact" : "not bit-exact";
    const dtype = { bfloat16: "bf16", float16: "fp16", float32: "fp32" }[facts.dtype] ?? facts.dtype;
    say([model.id.split("/").at(-1), dtype, facts.device, exact].join(" · "));
  }

  #lookAgain() {
    this.#lookedAgain = true;
    this.#server.findModels();
  }

  #wantKey() {
    this.#server.dropKey();
    this.#find("#t-key-form").hidden = false;
    this.#find("#t-key").focus();
  }

  async #useKey(value) {
    this.#problem("");
    this.#views.chat.focus();
    await this.#server.useKey(value);
  }

  async #forgetKeys() {
    this.#problem("");
    this.#views.chat.focus();
    await this.#server.forgetKeys();
  }

  #showKey() {
    const { key, opensMetrics } = this.#server;
    this.#find(".kept-key").hidden = !opensMetrics;
    if (key.value) this.#find("#t-key-form").hidden = true;
  }

  #problem(text) {
    const line = this.#find("#t-problem");
    line.textContent = text;
    line.parentElement.hidden = !text;
  }

  // A request failed by `error`.
  #failed(error) {
    if (error.status === 401 && error.key !== this.#server.key.value) {
      return this.#problem("This was asked with the key that was here before. Ask again.");
    }
    const todo = error.code === "context_length_exceeded" ? MAKE_ROOM[error.param] : "";
    this.#problem(todo ? `${error.message} ${todo}` : error.message);
    if (error.status === 401) this.#wantKey();
    else this.#server.failed(error);
  }

  // Whether nobody asks the server so far: whatever is measured beside an answer shares the engine with it.
  #engage(running) {
    if (this.#asking) this.#problem("An answer, a race or a burst is under way; it would share the engine. Stop it or wait.");
    else this.#asking = running;
    return this.#asking === running;
  }

  #release(running) {
    if (this.#asking === running) this.#asking = null;
  }

  focus() {
    if (this.#root.dataset.tab === "chat") this.#views.chat.focus();
  }
}

/** Bring the page inside `element` to life. The API lies beside the playground: /playground/ and /v1/. */
export function start(element) {
  const root = element.querySelector(".tidar");
  root.hidden = false; // what is hidden has no height to fit a field to
  const page = new Page(root, new URL("../", document.baseURI));
  page.focus();
}
