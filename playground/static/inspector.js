// The hint that tells about the token under the pointer or the keyboard: step, place in the block, time.

import { tokensBehind } from "./answer.js";
import { chances, describe } from "./trace.js";

const GAP = 8;

function paragraph(className, text) {
  const element = document.createElement("p");
  element.className = className;
  element.textContent = text;
  return element;
}

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
    addEventListener("scroll", () => this.#follow(), { passive: true });
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
    if (event.key === "Escape") this.hide();
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    const tokens = [...answer.querySelectorAll(".piece, .ghost")].filter(
      (span) => span.getClientRects().length && tokensBehind(span).length,
    );
    if (!tokens.length) return;
    event.preventDefault();
    const here = tokens.indexOf(event.target);
    const next = here < 0 && step > 0 && step < Infinity ? 0 : here + step;
    const span = tokens[Math.min(Math.max(next, 0), tokens.length - 1)];
    span.tabIndex = -1;
    span.focus({ preventScroll: true });
    span.scrollIntoView({ block: "nearest" });
    this.#show(span);
  }
}

function card(token) {
  const { title, quote, story, where, id } = describe(token);
  const element = document.createElement("div");
  element.className = `hint-card ${token.kind}`;
  const replica = token.trace.replica === undefined ? "" : ` · replica ${token.trace.replica}`;
  element.append(
    paragraph("hint-quote", quote),
    paragraph("hint-title", title),
    paragraph("hint-story", story),
    ...likelihoods(chances(token)),
    paragraph("hint-where", `${where} · token ${id}${replica}`),
  );
  return element;
}

// The token's own probability and its runners-up: a bar each, and the figure.
function likelihoods(found) {
  if (!found.length) return [];
  const list = document.createElement("ul");
  list.className = "hint-chances";
  list.setAttribute("aria-label", "Probability before temperature, and the runners-up");
  for (const { text, share, own } of found) {
    const item = document.createElement("li");
    item.className = own ? "chance own-chance" : "chance";
    item.style.setProperty("--part", String(share));
    item.append(paragraph("chance-text", text), paragraph("chance-share", chance(share)));
    list.append(item);
  }
  return [list];
}

function chance(share) {
  if (share >= 0.9995) return "100 %";
  return share < 0.001 ? "< 0.1 %" : `${(100 * share).toFixed(1)} %`;
}
