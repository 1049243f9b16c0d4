// The server as this visitor sees it: its models, and the keys that open it.

import { KeptKey } from "./browser.js";
import { fetchText, listModels, postJson, stream } from "./stream.js";

const FRESH_MS = 60_000; // so long what is known of the models is not asked again

/**
 * Routes lie beside the playground: /playground/ and /v1/. Tells "models" when the list of models is known or could
 * not be had (`failure`) and when one of them was chosen, and "key" when a key was kept or dropped.
 */
export class Server extends EventTarget {
  models = [];
  chosen = "";
  failure = null;
  key;
  metricsKey;
  #root;
  #finding = null;
  #foundAt = -Infinity;

  constructor(root) {
    super();
    this.#root = root;
    const place = root.pathname === "/" ? "" : `:${root.pathname}`; // one host may have several servers
    this.key = new KeptKey(`tidar.api_key${place}`);
    this.metricsKey = new KeptKey(`tidar.metrics_key${place}`);
    addEventListener("storage", (event) => {
      if (![this.key, this.metricsKey].some((kept) => kept.follow(event))) return;
      this.dispatchEvent(new Event("key"));
      this.#askForModels();
    });
  }

  /** Answers come from this model from now on. */
  choose(id) {
    this.chosen = id;
    this.dispatchEvent(new Event("models"));
  }

  get model() {
    return this.models.find(({ id }) => id === this.chosen) ?? this.models[0];
  }

  /** What the model's entry says beyond OpenAI's fields. */
  get facts() {
    return this.model?.tidar ?? {};
  }

  /**
   * Whether there is a model to ask; looks for one where none is known, the last look failed, or was so long ago that
   * another server may have come since. `signal`: ends the wait for that, with no.
   */
  async ready(signal) {
    const known = !this.failure && this.models.length && performance.now() - this.#foundAt < FRESH_MS;
    if (!known) await Promise.race([this.findModels(), aborted(signal)]);
    return !signal.aborted && !this.failure && this.models.length > 0;
  }

  /** A request failed by `error`: where the model is not known any more, or nobody answered, look what is served now. */
  failed({ status }) {
    if (status === 404 || status === 0) this.findModels();
  }

  /** Ask for the models; who asks while somebody does waits for the same answer. */
  findModels() {
    this.#finding ??= this.#askForModels();
    return this.#finding;
  }

  async #askForModels() {
    let key;
    do {
      key = this.key.value;
      this.failure = null;
      try {
        this.models = await listModels(new URL("v1/", this.#root), key);
      } catch (error) {
        this.failure = error;
      }
    } while (key !== this.key.value); // another was given meanwhile: that this one was refused says nothing of it
    this.#finding = null;
    this.#foundAt = performance.now();
    this.dispatchEvent(new Event("models"));
  }

  useKey(value) {
    this.key.keep(value);
    this.dispatchEvent(new Event("key"));
    return this.#askForModels(); // not with those who asked with the key before
  }

  /** The key we had, if any, was refused. */
  dropKey() {
    this.key.keep("");
    this.dispatchEvent(new Event("key"));
  }

  useMetricsKey(value) {
    this.metricsKey.keep(value);
    this.dispatchEvent(new Event("key"));
  }

  forgetKeys() {
    this.metricsKey.keep("");
    return this.useKey("");
  }

  chat(body, signal) {
    return this.#stream("v1/chat/completions", body, signal);
  }

  complete(body, signal) {
    return this.#stream("v1/completions", body, signal);
  }

  #stream(route, body, signal) {
    return stream(new URL(route, this.#root), body, { key: this.key.value, signal });
  }

  async tokenize(data, signal) {
    return postJson(new URL("tokenize", this.#root), data, { key: this.key.value, signal });
  }

  /** Where metrics have no key of their own, the API's opens them. */
  get opensMetrics() {
    return this.metricsKey.value || this.key.value;
  }

  /** The metrics page. */
  metrics() {
    return fetchText(new URL("metrics", this.#root), this.opensMetrics);
  }
}

function aborted(signal) {
  return new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
}
