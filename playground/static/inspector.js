// The hint that tells about the token under the pointer or the keyboard: step, place in the block, time.

import { tokensBehind } from "./answer.js";
import { element } from "./dom.js";
import { chances, describe } from "./trace.js";

const GAP = 8;
const BACK = ["ArrowLeft", "ArrowUp", "End"];
const WAYS = new Set([...BACK, "ArrowRight", "ArrowDown", "Home"]);

/**
 * Shows `hint` for the tokens inside `area`. The pointer hovers or taps; on the keyboard an answer is one tab stop,
 * and the arrow keys, Home and End walk through its tokens.
 */
export class Inspector {
  #area;
  #hint;
  #shown = null;

  constructor(area, hint) {
    this.#area = area;
    this.#hint = hint;
    area.addEventListener("pointerover", (event) => this.#show(this.#tokenAt(event.target)));
    area.addEventListener("pointerleave", () => this.hide());
    area.addEventListener("click", (event) => this.#show(this.#tokenAt(event.target)));
    area.addEventListener("focusin", (event) => this.#show(this.#tokenAt(event.target)));
    area.addEventListener("focusout", () => this.hide());
    area.addEventListener("keydown", (event) => this.#walk(event));
    addEventListener("scroll", () => this.#follow(), { capture: true, passive: true }); // of boxes in the page too
    addEventListener("keydown", ({ key }) => key === "Escape" && this.#shown && this.hide()); // wherever the focus is
  }

  hide() {
    this.#shown?.classList.remove("inspected");
    this.#shown?.removeAttribute("aria-describedby");
    this.#shown = null;
    this.#hint.hidden = true;
  }

  #tokenAt(target) {
    const span = target.closest?.(".piece, .ghost");
    return span && this.#area.contains(span) && tokensBehind(span).length ? span : null;
  }

  #show(span) {
    if (span === this.#shown) return;
    this.hide();
    if (!span) return;
    this.#hint.replaceChildren(...tokensBehind(span).map(card));
    this.#hint.hidden = false;
    this.#shown = span;
    span.classList.add("inspected");
    span.setAttribute("aria-describedby", this.#hint.id);
    this.#place(span);
  }

  #follow() {
    if (this.#shown) this.#place(this.#shown);
  }

  #place(span) {
    const at = span.getClientRects()[0];
    if (!at) return this.hide();
    const { offsetWidth: width, offsetHeight: height } = this.#hint;
    const left = Math.min(Math.max(GAP, at.left), Math.max(GAP, document.documentElement.clientWidth - width - GAP));
    const above = at.top - height - GAP;
    this.#hint.style.left = `${left}px`;
    this.#hint.style.top = `${above > GAP ? above : at.bottom + GAP}px`;
  }

  #walk(event) {
    const answer = event.target.closest(".answer-text");
    if (!answer) return;
    if (!WAYS.has(event.key) || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const span = tokenAfter(answer, event.target, event.key);
    if (!span) return;
    span.tabIndex = -1;
    span.focus({ preventScroll: true });
    tellWhileFocused(span); // behind that, by which another draft beside it lost the focus
    span.scrollIntoView({ block: "nearest" });
    this.#show(span);
  }
}

// A rejected draft is told to nobody who listens to the answer, but to whoever walks to it.
function tellWhileFocused(span) {
  const hidden = span.closest("[aria-hidden]");
  if (!hidden) return;
  hidden.removeAttribute("aria-hidden");
  span.addEventListener("focusout", () => hidden.setAttribute("aria-hidden", "true"), { once: true });
}

// Where `key` leads from the token `here`, or from the answer itself: to the next token that can be seen, if there is
// one. A long answer has thousands, so no more of them are looked at than are passed.
function tokenAfter(answer, here, key) {
  const isToken = (span) => (span.matches(".piece, .ghost") ? NodeFilter.FILTER_ACCEPT : NodeFilter.FILTER_SKIP);
  const walker = document.createTreeWalker(answer, NodeFilter.SHOW_ELEMENT, isToken);
  const inside = here !== answer && key !== "Home" && key !== "End";
  const back = BACK.includes(key) && (inside || key === "End");
  const next = () => (back ? walker.previousNode() : walker.nextNode());
  if (inside) walker.currentNode = here;
  let span = key === "End" ? walker.lastChild() : next();
  while (span && !(span.getClientRects().length && tokensBehind(span).length)) span = next();
  return span;
}

function card(token) {
  const { title, quote, story, where, id } = describe(token);
  const replica = token.trace.replica === undefined ? "" : ` · replica ${token.trace.replica}`;
  return element(
    "div",
    `hint-card ${token.kind}`,
    element("p", "hint-quote", quote),
    element("p", "hint-title", title),
    element("p", "hint-story", story),
    ...likelihoods(chances(token)),
    element("p", "hint-where", `${where} · token ${id}${replica}`),
  );
}

// The token's own probability and its runners-up: a bar each, and the figure.
function likelihoods(found) {
  if (!found.length) return [];
  const items = found.map(({ text, share, own }) => {
    const words = [element("p", "chance-text", text), element("p", "chance-share", chance(share))];
    const item = element("li", own ? "chance own-chance" : "chance", ...words);
    item.style.setProperty("--part", String(share));
    return item;
  });
  const list = element("ul", "hint-chances", ...items);
  list.setAttribute("aria-label", "Probability before temperature, and the runners-up");
  return [list];
}

function chance(share) {
  if (share >= 0.9995) return "100 %";
  return share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
}
