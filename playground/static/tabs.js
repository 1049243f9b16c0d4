// The tabs, and which of them the address names.

const NAMES = ["chat", "race", "hood", "cluster"];

/** Arrow keys, Home and End move between tabs. `onChange(name)` is called with the tab that is now open. */
export class Tabs {
  #root;
  #onChange;
  #places = {}; // tab -> how far it was scrolled when it was left

  constructor(root, onChange) {
    this.#root = root;
    this.#onChange = onChange;
    const list = root.querySelector("[role=tablist]");
    list.addEventListener("click", (event) => {
      const tab = event.target.closest("[role=tab]");
      if (tab) this.open(tab.dataset.opens);
    });
    list.addEventListener("keydown", (event) => this.#walk(event));
    addEventListener("hashchange", () => this.#show(named()));
    this.#show(named());
  }

  /** `fromTop`: for what is new there; else the reader goes on where the tab was left. */
  open(name, { fromTop = false } = {}) {
    this.#places[this.#root.dataset.tab] = scrollY;
    this.#show(name, fromTop ? 0 : (this.#places[name] ?? 0));
    try {
      history.replaceState(null, "", name === NAMES[0] ? location.pathname + location.search : `#${name}`);
    } catch {
      // Safari lets nobody do so more than some hundred times in half a minute.
    }
  }

  #show(name, place = scrollY) {
    for (const tab of this.#root.querySelectorAll("[role=tab]")) {
      const chosen = tab.dataset.opens === name;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      this.#root.querySelector(`#panel-${tab.dataset.opens}`).hidden = !chosen;
    }
    this.#root.dataset.tab = name;
    scrollTo(0, place);
    this.#onChange(name);
  }

  #walk(event) {
    const here = NAMES.indexOf(this.#root.dataset.tab);
    const targets = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: -1 };
    const target = targets[event.key];
    if (target === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const name = NAMES.at(target % NAMES.length);
    this.open(name);
    this.#root.querySelector(`#tab-${name}`).focus();
  }
}

function named() {
  const name = location.hash.slice(1);
  return NAMES.includes(name) ? name : NAMES[0];
}
