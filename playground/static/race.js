// The race: the same prompt and seed without drafts and with them, one run after the other, both measured.
//
// Both runs at once would share one engine's steps and slow each other down, so they take turns. Each run has a cache
// salt of its own: the second would otherwise find the first one's prompt in the cache and start sooner.

import { fitHeight, submitOnEnter } from "./browser.js";
import { focusButton, swap } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Lane } from "./lane.js";
import { formatTime } from "./meters.js";
import { orDash, two } from "./numbers.js";
import { newRecording } from "./recording.js";
import { firstDifference, plural, tokenIds } from "./stats.js";
import { chatBody } from "./stream.js";
import { quoted } from "./trace.js";

const OTHER = { off: "drafts", drafts: "off" };

export class Race {
  #page;
  #root;
  #lanes;
  #running = null; // AbortController of the race or replay under way

  constructor(page) {
    this.#page = page;
    this.#root = page.root.querySelector("#panel-race");
    this.#lanes = {
      off: new Lane(this.#root.querySelector("[data-lane=off]"), page.lookInside),
      drafts: new Lane(this.#root.querySelector("[data-lane=drafts]"), page.lookInside),
    };
    new Inspector(this.#root.querySelector(".lanes"), page.root.querySelector("#t-hint"));
    const prompt = this.#find("#r-prompt");
    prompt.addEventListener("input", () => fitHeight(prompt));
    const form = this.#find("#r-ask");
    submitOnEnter(prompt, form);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#race(prompt.value.trim());
    });
    this.#find("#r-stop").addEventListener("click", () => this.#running?.abort());
    this.#find("#r-replay").addEventListener("click", () => (this.#running ? this.#running.abort() : this.#replay()));
  }

  #find(selector) {
    return this.#root.querySelector(selector);
  }

  visible(now) {
    if (now) fitHeight(this.#find("#r-prompt"));
  }

  /** Ready to race with the question `asked` on Auto, as soon as it is started. */
  prepare(asked) {
    const prompt = this.#find("#r-prompt");
    prompt.value = asked;
    fitHeight(prompt);
    this.#find("[name=r-drafts][value=auto]").checked = true;
    const start = this.#find("#r-start");
    focusButton(start.hidden ? this.#find("#r-stop") : start);
  }

  #status(text) {
    this.#find("#r-status").textContent = text;
  }

  #begin(running) {
    this.#running = running;
    swap(this.#find("#r-start"), this.#find("#r-stop"));
  }

  #end() {
    this.#page.release(this.#running);
    this.#running = null;
    swap(this.#find("#r-stop"), this.#find("#r-start"));
  }

  async #race(asked) {
    const { server, settings, problem, engage } = this.#page;
    if (!asked || this.#running || !settings.hold()) return;
    const running = new AbortController();
    if (!engage(running)) return;
    problem("");
    this.#begin(running);
    if (await server.ready(running.signal)) await this.#run(asked, running);
    this.#end();
  }

  async #run(asked, running) {
    const mode = this.#find("[name=r-drafts]:checked").value;
    const rounds = Number(this.#find("[name=r-rounds]:checked").value);
    const common = this.#page.settings.read();
    const { model } = this.#page.server; // of all runs, whatever is chosen meanwhile
    if (common.temperature > 0 && !common.seed) common.seed = drawSeed();
    this.#find(".verdict").hidden = true;
    for (const lane of Object.values(this.#lanes)) lane.clear();
    this.#lanes.drafts.name(`With drafts: ${mode}`);
    const salt = drawSeed();
    for (let round = 0; round < rounds; round++) {
      // Whoever starts takes turns too, so that a machine that slows down or speeds up favours neither.
      const first = round % 2 ? "drafts" : "off";
      for (const name of [first, OTHER[first]]) {
        const drafts = name === "off" ? "off" : mode;
        const count = rounds > 1 ? `, round ${round + 1} of ${rounds}` : "";
        this.#status(`Measuring ${name === "off" ? "without" : "with"} drafts${count}…`);
        const settings = { ...common, drafts, cacheSalt: `race-${salt}-${round}-${name}` };
        await this.#measure(name, model, asked, settings, running);
        const { failure } = this.#lanes[name].latest;
        if (failure) {
          this.#status(`Broken off: ${failure.message}`);
          return this.#page.failed(failure);
        }
        if (running.signal.aborted) return this.#status("Stopped: nothing to compare.");
      }
    }
    this.#judge(rounds, model, common);
  }

  async #measure(name, model, asked, settings, running) {
    const { server, shelf } = this.#page;
    const lane = this.#lanes[name];
    const body = chatBody(model.id, [{ role: "user", content: asked }], settings);
    const title = name === "off" ? "Race, without drafts" : "Race, with drafts";
    const recording = newRecording({ title, asked, model, settings });
    await lane.measure(recording, (signal) => server.chat(body, signal), running.signal);
    shelf.put(recording);
  }

  // ---- what came out ----

  #judge(rounds, model, settings) {
    const { off, drafts } = this.#lanes;
    const speeds = [off.speed(), drafts.speed()];
    const ratio = speeds[0] && speeds[1] ? speeds[1] / speeds[0] : null;
    this.#find(".verdict").hidden = false;
    for (const lane of [off, drafts]) lane.toTop();
    this.#find("[data-speed-up]").textContent = ratio === null ? "–" : `${two.format(ratio)}×`;
    this.#find("[data-speed-words]").textContent = speedWords(ratio, drafts);
    const same = this.#compare([...off.runs, ...drafts.runs], model);
    this.#find("[data-same]").textContent = same.line;
    this.#find("[data-same]").dataset.state = same.state;
    this.#find("[data-how]").textContent = how(rounds, off, drafts, settings);
    this.#status(`Done. ${same.line}`);
    this.#find(".verdict").scrollIntoView({ block: "nearest" });
  }

  #compare(runs, model) {
    const [reference] = runs;
    const answers = runs.map(({ text, recording }) => ({ text, steps: recording.steps }));
    const parted = answers.map((answer) => firstDifference(answers[0], answer)).find(Boolean);
    if (runs.some((run) => !run.complete)) return { state: "unknown", line: "Not compared: a run did not finish." };
    if (!parted) {
      const tokens = tokenIds(reference.recording.steps).length;
      return { state: "same", line: `Same text: all ${plural(tokens, "token")} are equal.` };
    }
    const [one, other] = parted.said.map(quoted);
    const where = parted.kind === "text" ? `character ${parted.at + 1}` : `token ${parted.at + 1}`;
    const why = model.tidar.exact
      ? "This server says that it is exact, so this should not be: please report it."
      : "This server does not claim to be exact: where two scores nearly tie, a token may fall either way.";
    return { state: "different", line: `The texts differ from ${where} on: ${one} and ${other}. ${why}` };
  }

  async #replay() {
    const running = new AbortController();
    this.#begin(running);
    const watch = this.#find("#r-replay");
    const words = watch.textContent;
    watch.textContent = "Stop the replay";
    this.#status("A replay at the recorded times: nothing is measured.");
    const over = Promise.all(Object.values(this.#lanes).map((lane) => lane.replay(running.signal)));
    watch.scrollIntoView(); // the lanes stand below it
    await over;
    watch.textContent = words;
    this.#status("The replay is over.");
    this.#end();
  }
}

// As many bits as a JavaScript number holds exactly.
function drawSeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return String((high >>> 11) * 2 ** 32 + low);
}

function speedWords(ratio, drafts) {
  if (ratio === null) return "The answer is too short to measure a speed.";
  const verified = drafts.runs.some(({ recording }) => recording.steps.some(({ trace }) => trace?.drafted.length));
  if (!verified) return "as many tokens per second: no draft was verified, and what is left is the spread of the measurement.";
  if (ratio >= 1.005) return "as many tokens per second with drafts as without.";
  if (ratio >= 0.995) return "as many tokens per second with drafts as without: no difference.";
  return "as many tokens per second: on this machine the drafts of this answer cost more time than they saved.";
}

function how(rounds, off, drafts, { temperature }) {
  const turns = rounds === 1 ? "One run each, one after the other" : `${rounds} runs each, taking turns`;
  const waits = [off, drafts].map((lane) => orDash(lane.firstToken(), formatTime)).join(" and ");
  const seed = temperature > 0 ? `, the same seed (${off.runs[0].recording.seed})` : "";
  return `${turns}: both at once would slow each other down. The same prompt${seed}, nothing cached from run to run. First token after ${waits}. Times are this browser's.`;
}
