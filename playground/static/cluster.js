// The cluster, live: what /metrics says, read once a second while somebody looks.

import { keyForm } from "./browser.js";
import { Burst } from "./burst.js";
import { Plot } from "./charts.js";
import { element } from "./dom.js";
import { one, orDash, two, whole } from "./numbers.js";
import { between, byReplica, missing, parseMetrics } from "./prometheus.js";

const EVERY_MS = 1000;
const WITHOUT_KEY_MS = 5000; // while a key is wanted: it may not be for ever
const KEPT = 60; // seconds, and so many readings, of which one comes a second at most
const WINDOW = 5; // readings over which rates are taken
const FORGIVEN = 5; // readings that a replica may miss, as a busy one does, before its card goes
const LONGEST_GAP = 30; // seconds without one, as while the tab was not looked at: what was before is no part of the last minute

const tenthsOfPercent = (share) => `${one.format(100 * share)} %`;

const FIELDS = [
  ["tokensPerSecond", "Tokens per second", (value) => orDash(value, one.format)],
  ["perStep", "Tokens per step", (value) => orDash(value, two.format)],
  ["acceptance", "Acceptance", (value) => orDash(value, tenthsOfPercent)],
  ["running", "Running", (value) => whole.format(value)],
  ["waiting", "Waiting", (value) => whole.format(value)],
  ["cache", "K/V in use", tenthsOfPercent],
  ["rowsPerStep", "Rows per step", (value) => orDash(value, one.format)],
];

const HEROES = ["tokensPerSecond", "perStep"];

export class Cluster {
  #page;
  #root;
  #cards = new Map(); // replica -> what `#newCard` makes
  #visible = false;
  #timer = 0;
  #reading = false;

  constructor(page) {
    this.#page = page;
    this.#root = page.root.querySelector("#panel-cluster");
    new Burst(page, this.#root.querySelector(".burst"));
    keyForm(this.#find("#c-key-form"), (value) => page.server.useMetricsKey(value), (text) => this.#problem(text));
    page.server.addEventListener("key", () => {
      if (page.server.opensMetrics) this.#form.hidden = true;
      this.#read();
    });
    document.addEventListener("visibilitychange", () => this.#read());
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  get #form() {
    return this.#find("#c-key-form");
  }

  visible(now) {
    this.#visible = now;
    this.#read();
  }

  async #read() {
    clearTimeout(this.#timer);
    if (!this.#visible || document.hidden || this.#reading) return;
    this.#reading = true;
    const { server } = this.#page;
    const key = server.opensMetrics;
    try {
      this.#take(parseMetrics(await server.metrics()), performance.now() / 1000);
      this.#problem("");
      this.#form.hidden = true;
    } catch (error) {
      if (server.opensMetrics === key) this.#failed(error); // else the next reading has another key
    }
    this.#reading = false;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#read(), this.#form.hidden ? EVERY_MS : WITHOUT_KEY_MS);
  }

  #problem(text) {
    const line = this.#find("#c-state");
    if (line.textContent !== text) line.textContent = text;
    line.hidden = !text;
  }

  #failed(error) {
    if (error.status !== 401) return this.#problem(`${error.message} The figures below stand still.`);
    const { server } = this.#page;
    const had = server.metricsKey.value;
    if (had) server.useMetricsKey("");
    if (had) this.#problem("That key does not open the metrics.");
    else if (this.#form.hidden) this.#problem(this.#cards.size ? "The figures below stand still." : "");
    this.#form.hidden = false;
    // Whoever gave that key is led back to the field, and nobody away from where they are.
    if (had && document.activeElement === document.body) this.#find("#c-key").focus();
  }

  #take(samples, now) {
    const replicas = byReplica(samples);
    for (const [name, values] of replicas) {
      if (!this.#cards.has(name)) this.#cards.set(name, this.#newCard());
      const card = this.#cards.get(name);
      const known = card.readings.at(-1)?.now > now - LONGEST_GAP ? card.readings : [];
      card.readings = [...known, { now, values }].slice(-KEPT - WINDOW);
      card.missed = 0;
      this.#showCard(card);
    }
    for (const [name, card] of this.#cards) if (!replicas.has(name)) this.#miss(name, card);
    const models = [...this.#cards.values()].map(({ readings }) => readings.at(-1).values.model);
    this.#showTitles(new Set(models).size > 1);
    this.#showEmpty(missing(samples, models));
    this.#showTotals();
  }

  // Its figures stand still meanwhile.
  #miss(name, card) {
    card.missed += 1;
    card.silent.hidden = false;
    if (card.missed <= FORGIVEN) return;
    card.root.remove();
    card.plot.close();
    this.#cards.delete(name);
  }

  #showTitles(severalModels) {
    for (const [name, { root, title, readings }] of this.#cards) {
      title.textContent = severalModels ? `${readings.at(-1).values.model}, replica ${name}` : `Replica ${name}`;
      root.setAttribute("aria-label", title.textContent);
    }
  }

  // `without`: names that have no card, each with whether it sleeps and how many requests wait for it.
  #showEmpty(without) {
    const lines = [...without].map(([model, { sleeps, waiting }]) => {
      const wait = waiting ? `: ${waiting === 1 ? "1 request waits" : `${waiting} requests wait`} for it` : "";
      if (!sleeps) return `${model} has no replica that answers${wait}.`;
      return waiting ? `${model} is woken${wait}.` : `${model} sleeps: the next request wakes it.`;
    });
    const line = this.#find(".replicas-empty");
    line.textContent = lines.join(" ") || "No replica has answered yet.";
    line.hidden = !lines.length && this.#cards.size > 0;
  }

  #newCard() {
    const fields = new Map();
    const list = element("dl", "meters");
    for (const [field, label] of FIELDS) {
      const value = element("dd", "", "–");
      fields.set(field, value);
      list.append(element("div", HEROES.includes(field) ? "meter hero" : "meter", element("dt", "", label), value));
    }
    const chart = element("div", "spark");
    const since = element("p", "note");
    const title = element("h3", "");
    const silent = element("span", "badge", "did not answer just now");
    const root = element("section", "card replica", element("div", "card-head", title, silent), list, chart, since);
    this.#find(".replicas").append(root);
    return { root, title, silent, fields, since, plot: new Plot(chart, 96), readings: [], missed: 0 };
  }

  #showCard(card) {
    const { readings, fields } = card;
    const { values } = readings.at(-1);
    const facts = { ...values, ...recent(readings, readings.length - 1) };
    card.facts = facts;
    card.silent.hidden = true;
    for (const [field, , format] of FIELDS) fields.get(field).textContent = format(facts[field]);
    const held = values.drafted ? `, ${tenthsOfPercent(values.accepted / values.drafted)} of drafts held` : "";
    const steps = values.steps ? `, ${two.format(values.stepTokens / values.steps)} a step` : "";
    card.since.textContent = `Since it started: ${whole.format(values.tokens)} tokens${steps}${held}. ${whole.format(values.pages)} K/V pages.`;
    const last = readings.at(-1).now;
    const points = readings.map(({ now }, i) => ({ x: now - last + KEPT, y: recent(readings, i).tokensPerSecond ?? 0 }));
    const line = points.filter(({ x }) => x >= 0); // fewer than were kept, where the server is slow to answer
    card.plot.show((canvas) => {
      const most = Math.max(...line.map(({ y }) => y), 1);
      canvas.axes({ xEnd: KEPT, xTicks: [], yEnd: most, xLabel: "the last minute", yLabel: "tokens/s" });
      canvas.line(line, "plain");
    });
  }

  #showTotals() {
    this.#find(".totals").hidden = this.#cards.size < 2;
    const cards = [...this.#cards.values()].filter(({ missed }) => !missed);
    const sum = (field) => cards.reduce((total, { facts }) => total + (facts[field] ?? 0), 0);
    const say = (name, text) => (this.#find(`[data-total=${name}]`).textContent = text);
    say("replicas", whole.format(cards.length));
    say("tokensPerSecond", one.format(sum("tokensPerSecond")));
    say("running", whole.format(sum("running")));
    say("waiting", whole.format(sum("waiting")));
  }
}

// The rates of reading `i`, over the last few seconds before it.
function recent(readings, i) {
  const before = readings[Math.max(0, i - WINDOW)];
  return between(before.values, readings[i].values, readings[i].now - before.now);
}
