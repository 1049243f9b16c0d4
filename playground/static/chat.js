// The page: reads the form, asks /v1, and hands what comes back to the drawing parts.

import { Follower, KeptKey } from "./browser.js";
import { Inspector } from "./inspector.js";
import { Meters, Ribbon } from "./meters.js";
import { chatBody, listModels, streamChat } from "./stream.js";
import { newTally, rates } from "./trace.js";
import { Turn } from "./turn.js";

const NARROW = matchMedia("(max-width: 60rem)"); // one column, as in the style sheets
const DRAFTS_NOTE = "They change the speed, never the text.";

class Chat {
  #root;
  #base;
  #key = new KeptKey();
  #follower = new Follower();
  #meters;
  #ribbon;
  #turns = []; // { asked, answered } of the turns that the model is told about
  #running = null; // AbortController of the answer under way
  #models = [];

  constructor(root, base) {
    this.#root = root;
    this.#base = base;
    this.#meters = new Meters(root);
    this.#ribbon = new Ribbon(root.querySelector("[data-ribbon]"));
    new Inspector(this.#find("#t-turns"), this.#find("#t-hint"));
    this.#listen();
    this.#showOutputs();
    this.#showKey();
    this.#findModels();
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  #listen() {
    const prompt = this.#find("#t-prompt");
    prompt.addEventListener("input", () => this.#fitPrompt());
    prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#find("#t-ask").requestSubmit();
    });
    this.#find("#t-ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask(prompt.value);
    });
    this.#find("#t-stop").addEventListener("click", () => this.#stop());
    this.#find("#t-clear").addEventListener("click", () => this.#clear());
    this.#find(".examples").addEventListener("click", (event) => {
      if (event.target.matches("button")) this.#ask(event.target.textContent);
    });
    this.#find("#t-form").addEventListener("submit", (event) => event.preventDefault());
    this.#root.addEventListener("input", () => this.#showOutputs());
    this.#find("#t-key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#useKey(this.#find("#t-key").value.trim());
    });
    this.#find("#t-forget").addEventListener("click", () => this.#useKey(""));
    for (const radio of this.#root.querySelectorAll("[name=t-ghosts]")) {
      radio.addEventListener("change", () => (this.#root.dataset.ghosts = radio.value));
    }
    const marks = this.#find("#t-marks");
    marks.addEventListener("change", () => (this.#root.dataset.marks = marks.checked ? "on" : "off"));
    this.#listenToTheme();
    this.#makeRoom();
  }

  // On a narrow page the cards stand above the conversation: fold them.
  #makeRoom() {
    if (!NARROW.matches) return;
    for (const card of this.#root.querySelectorAll(".side details")) card.open = false;
  }

  #listenToTheme() {
    const button = this.#find("#t-theme");
    const theme = window.tidarTheme;
    const words = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
    const show = () => {
      const [label, spoken] = words[theme.read()];
      button.querySelector("[data-theme-name]").textContent = label;
      button.setAttribute("aria-label", `Colours: ${spoken}`);
    };
    button.addEventListener("click", () => {
      theme.write(theme.names[(theme.names.indexOf(theme.read()) + 1) % theme.names.length]);
      show();
    });
    theme.apply();
    show();
  }

  // ---- the server and its key ----

  async #findModels() {
    const served = this.#find("#t-served");
    try {
      this.#models = await listModels(this.#base, this.#key.value);
      this.#showModels();
      served.dataset.state = this.#models.length ? "up" : "down";
      if (!this.#models.length) this.#say(served, "No model is being served");
    } catch (error) {
      served.dataset.state = "down";
      this.#say(served, error.status === 401 ? "Waiting for an API key" : "No answer from the server");
      if (error.status !== 401 || this.#key.value) this.#problem(error.message);
      if (error.status === 401) this.#wantKey();
    }
  }

  #say(served, text) {
    served.querySelector("[data-served]").textContent = text;
  }

  #showModels() {
    const select = this.#find("#t-model");
    const chosen = select.value;
    select.replaceChildren(...this.#models.map(({ id }) => new Option(id, id, false, id === chosen)));
    select.closest("label").hidden = this.#models.length < 2;
    this.#showModel();
  }

  #model() {
    return this.#models.find(({ id }) => id === this.#find("#t-model").value) ?? this.#models[0];
  }

  #showModel() {
    const model = this.#model();
    if (!model) return;
    const facts = model.tidar ?? {};
    const exact = facts.exact === undefined ? "" : facts.exact ? "exact" : "not bit-exact";
    const dtype = { bfloat16: "bf16", float16: "fp16", float32: "fp32" }[facts.dtype] ?? facts.dtype;
    const shown = [model.id.split("/").at(-1), dtype, facts.device, exact].filter(Boolean);
    this.#say(this.#find("#t-served"), shown.join(" · "));
    const drafter = facts.block_length !== 0;
    for (const choice of this.#root.querySelectorAll("[name=t-drafts]")) choice.disabled = !drafter;
    this.#find("#t-drafts-note").textContent = drafter ? DRAFTS_NOTE : "This model has no drafter.";
    const block = this.#find("#t-block");
    block.disabled = !drafter || this.#drafts() === "off";
    if (facts.block_length > 0) block.max = facts.block_length;
    else block.removeAttribute("max");
    if (model.max_model_len) this.#find("#t-max").max = model.max_model_len;
  }

  #wantKey() {
    this.#key.keep(""); // the one we had, if any, was refused
    this.#showKey();
    this.#find("#t-key-form").hidden = false;
    this.#find("#t-key").focus();
  }

  async #useKey(value) {
    this.#key.keep(value);
    this.#find("#t-key").value = "";
    this.#find("#t-key-form").hidden = true;
    this.#problem("");
    this.#showKey();
    this.#find("#t-prompt").focus();
    await this.#findModels();
  }

  #showKey() {
    this.#find(".kept-key").hidden = !this.#key.value;
  }

  // ---- the form ----

  #showOutputs() {
    for (const output of this.#root.querySelectorAll("[data-output]")) {
      output.value = Number(this.#find(`#${output.dataset.output}`).value).toFixed(2);
    }
    this.#showModel();
  }

  #drafts() {
    return this.#find("[name=t-drafts]:checked").value;
  }

  #settings() {
    const number = (id) => Number(this.#find(id).value);
    return {
      drafts: this.#drafts(),
      maxTokens: number("#t-max"),
      block: number("#t-block"),
      temperature: number("#t-temperature"),
      topP: number("#t-top-p"),
      topK: number("#t-top-k"),
      seed: this.#find("#t-seed").value.trim(),
      system: this.#find("#t-system").value.trim(),
    };
  }

  // The form is inside a closed <details> on a phone: open it, so that the browser can point at the wrong field.
  #settingsHold() {
    const form = this.#find("#t-form");
    if (form.checkValidity()) return true;
    this.#find("#t-settings").open = true;
    form.reportValidity();
    return false;
  }

  #fitPrompt() {
    const prompt = this.#find("#t-prompt");
    prompt.style.height = "auto";
    prompt.style.height = `${prompt.scrollHeight}px`;
  }

  #setPrompt(text) {
    this.#find("#t-prompt").value = text;
    this.#fitPrompt();
  }

  #problem(text) {
    const line = this.#find("#t-problem");
    line.textContent = text;
    line.hidden = !text;
  }

  #status(text) {
    this.#find("#t-status").textContent = text;
  }

  // ---- a turn ----

  async #ask(text) {
    const asked = text.trim();
    if (!asked || this.#running || !this.#settingsHold()) return;
    const running = new AbortController();
    this.#begin(running);
    if (!this.#models.length) await this.#findModels();
    if (this.#running !== running) return;
    if (!this.#models.length) return this.#end();
    this.#setPrompt("");
    const settings = this.#settings();
    await new Turn(this.#parts(settings), asked).run(this.#body(asked, settings), running);
  }

  #parts(settings) {
    return {
      sampled: settings.temperature > 0,
      list: this.#find("#t-turns"),
      meters: this.#meters,
      ribbon: this.#ribbon,
      badge: this.#find("[data-badge]"),
      open: (body, signal) => streamChat(this.#base, body, { key: this.#key.value, signal }),
      follow: (options) => this.#follower.follow(options),
      status: (line) => this.#status(line),
      useSeed: (seed) => (this.#find("#t-seed").value = seed),
      failed: (error, turn) => this.#failed(error, turn),
      done: (turn, running) => this.#done(turn, running),
      current: (running) => this.#running === running,
    };
  }

  #body(asked, settings) {
    const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
    for (const turn of this.#turns) {
      messages.push({ role: "user", content: turn.asked }, { role: "assistant", content: turn.answered });
    }
    messages.push({ role: "user", content: asked });
    return chatBody(this.#model().id, messages, settings);
  }

  #begin(running) {
    this.#running = running;
    delete this.#root.dataset.empty;
    this.#makeRoom();
    this.#problem("");
    this.#status("Waiting for the first token…");
    this.#find("#t-send").hidden = true;
    this.#find("#t-stop").hidden = false;
  }

  #end() {
    this.#running = null;
    this.#find("#t-send").hidden = false;
    this.#find("#t-stop").hidden = true;
    if (!this.#find("#t-turns").childElementCount) this.#root.dataset.empty = "";
  }

  #done(turn, running) {
    if (this.#running !== running) return;
    if (turn.text) this.#turns.push({ asked: turn.asked, answered: turn.text });
    this.#end();
  }

  #failed(error, turn) {
    this.#status("");
    this.#problem(error.message);
    if (turn.text) return;
    turn.remove();
    if (!this.#find("#t-prompt").value) this.#setPrompt(turn.asked);
    if (error.status === 401) this.#wantKey();
  }

  #stop() {
    this.#running?.abort();
    this.#find("#t-prompt").focus();
  }

  #clear() {
    this.#running?.abort();
    this.#end();
    this.#turns = [];
    this.#find("#t-turns").replaceChildren();
    this.#root.dataset.empty = "";
    this.#problem("");
    this.#status("");
    this.#ribbon.clear();
    this.#meters.show(rates(newTally()), { insist: true });
    this.#find("[data-badge]").textContent = "no answer yet";
    this.#find("#t-prompt").focus();
  }
}

/** Bring the page inside `element` to life. The API lies beside the playground: /playground/ and /v1/. */
export function start(element) {
  const root = element.querySelector(".tidar");
  new Chat(root, new URL("../v1/", document.baseURI));
  root.hidden = false;
  root.querySelector("#t-prompt").focus({ preventScroll: true });
}
