// The settings card: what the next answer is asked for with.

export class Settings {
  #root;
  #form;
  #server;
  #outputs;
  #choices; // of drafts, in the chat and in the race

  constructor(root, server) {
    this.#root = root;
    this.#server = server;
    this.#form = this.#find("#t-form");
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    this.#outputs = this.#form.querySelectorAll("output");
    this.#choices = root.querySelectorAll("[name=t-drafts], [name=r-drafts]");
    for (const part of [this.#form, ...this.#choices]) part.addEventListener("input", () => this.show());
    this.#find("#t-model").addEventListener("change", (event) => server.choose(event.target.value));
    server.addEventListener("models", () => this.#showModels());
    this.show();
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  /** How the chat drafts: "auto", "full" or "off". */
  get drafts() {
    return this.#find("[name=t-drafts]:checked").value;
  }

  /**
   * All that is set, once there is a model. An empty top-k is what the model's makers want. The most tokens are as many
   * as there is room for: the prompt takes some of them, so that number itself would be refused.
   */
  read() {
    const number = (id) => Number(this.#find(id).value);
    return {
      drafts: this.drafts,
      maxTokens: number("#t-max") < this.#server.model.max_model_len ? number("#t-max") : undefined,
      block: number("#t-block"),
      temperature: number("#t-temperature"),
      topP: number("#t-top-p"),
      topK: this.#find("#t-top-k").value === "" ? this.#server.facts.sampling_defaults.top_k : number("#t-top-k"),
      seed: this.#find("#t-seed").value.trim(),
      system: this.#find("#t-system").value.trim(),
      logprobs: this.#find("#t-logprobs").checked,
    };
  }

  useSeed(seed) {
    this.#find("#t-seed").value = seed;
  }

  /** Whether every field holds what it may. The form is folded on a phone: open it, so that a fault can be shown. */
  hold() {
    if (this.#form.checkValidity()) return true;
    this.#find("#t-settings").open = true;
    this.#form.reportValidity();
    return false;
  }

  #showModels() {
    const select = this.#find("#t-model");
    const { models, model } = this.#server;
    select.replaceChildren(...models.map((one) => new Option(one.id, one.id, false, one === model)));
    select.closest("label").hidden = models.length < 2;
    this.show();
  }

  /** Bring outputs and limits up to date. */
  show() {
    for (const output of this.#outputs) output.value = Number(this.#find(`#${output.htmlFor}`).value).toFixed(2);
    const { model, facts } = this.#server;
    if (!model) return;
    const drafter = facts.block_length > 0;
    for (const choice of this.#choices) choice.disabled = !drafter;
    this.#find("#t-drafts-note").textContent = drafter ? draftsChange(facts) : "This model has no drafter.";
    const block = this.#find("#t-block");
    block.disabled = !drafter || (this.drafts === "off" && this.#root.dataset.tab === "chat");
    if (drafter) block.max = facts.block_length;
    else block.removeAttribute("max");
    const { top_k, min_p, repetition_penalty } = facts.sampling_defaults;
    this.#find("#t-top-k").placeholder = top_k > 0 ? top_k : "off";
    const unsaid = [min_p > 0 && `min-p ${min_p}`, repetition_penalty !== 1 && `repetition penalty ${repetition_penalty}`];
    const note = this.#find("#t-makers");
    note.textContent = `Also as the model's makers want it: ${unsaid.filter(Boolean).join(", ")}.`;
    note.hidden = !unsaid.some(Boolean);
    this.#find("#t-max").max = model.max_model_len;
  }
}

// What a server that is exact, or is not, promises of drafts.
function draftsChange({ exact }) {
  return exact ? "They change the speed, never the text." : "They change the speed; the text only where two scores nearly tie.";
}
