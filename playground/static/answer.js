// Draws one answer as it grows. Model text reaches the page through textContent alone.

import { element } from "./dom.js";
import { keptTokens, place, rejectedTokens } from "./trace.js";

const FENCE = "```"; // a line that starts so begins or ends code, which is set in a fixed pitch
const GHOST_MS = 1400; // how long a rejected draft stays
const STEADY_MS = 200; // and fades then, as talk.css has it: an animation is a layer, dear where ghosts come and go
const PAUSE_MS = 400; // the cursor blinks where no text came for so long: another layer
const GHOSTS_AT_ONCE = 8; // a fast stream lets the oldest go early, so that a frame stays cheap
const LINES_TOGETHER = 16; // lines in a block, which is laid out and painted apart from the others
const PIECES_TOGETHER = 512; // pieces and ghosts in a line, before it goes on in another block
const PIECES_LOOKED_AT = 128; // for a row to go on with: a few rows of the widest page

// Span -> the tokens that it stands for, for the inspector.
const tokensOf = new WeakMap();

export function tokensBehind(element) {
  return tokensOf.get(element) ?? [];
}

/** A piece of an answer (`place` in trace.js) as a marked span that the inspector can tell about. */
export function keep({ text, tokens }, lastKind = "plain") {
  const span = pieceOf(text, tokens.at(-1)?.kind ?? lastKind);
  if (tokens.length) tokensOf.set(span, tokens);
  return span;
}

/** Go through the steps of a whole answer: `each(step, pieces)`. */
export function layOut(steps, each) {
  let waiting = [];
  for (const step of steps) {
    if (step.trace) waiting.push(...keptTokens(step.trace, step.logprobs));
    const placed = place(waiting, step.text);
    waiting = placed.waiting;
    each(step, placed.pieces);
  }
}

// White space before a word carries no mark, unless the token is nothing else.
function pieceOf(text, kind) {
  const word = text.trimStart();
  if (!word || word === text) return element("span", `piece ink ${kind}`, text);
  return element("span", `piece ${kind}`, text.slice(0, text.length - word.length), element("span", "ink", word));
}

/** An element for an `Answer`: one stop for the Tab key, walked through with the arrow keys (`Inspector`). */
export function answerText(label) {
  const made = element("div", "answer-text");
  made.tabIndex = 0;
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", `${label}; arrow keys walk through its tokens`);
  made.addEventListener("copy", copyExactly);
  return made;
}

// Every line is a block and ends with its line end: a browser would copy that end twice, and the ghosts too.
function copyExactly(event) {
  const selection = getSelection();
  const range = selection.rangeCount ? selection.getRangeAt(0) : null;
  if (!range || !event.currentTarget.contains(range.commonAncestorContainer)) return;
  const copied = range.cloneContents();
  for (const ghosts of copied.querySelectorAll(".ghosts")) ghosts.remove();
  event.clipboardData.setData("text/plain", copied.textContent);
  event.preventDefault();
}

/** The lines of an answer in `root`, one block each: a long answer lays out its last line alone, and paints its last lines. */
export class Lines {
  #root;
  #block = null;
  #line = null;
  #lineText = "";
  #inCode = false;

  constructor(root) {
    this.#root = root;
  }

  /** Append `node`, by which the text of the answer grows by `text`. */
  write(node, text = "") {
    this.#lineToWrite().append(node);
    this.#lineText += text;
    if (this.#lineText.startsWith(FENCE)) this.#line.classList.add("code");
    if (text.endsWith("\n")) this.#endLine();
  }

  /**
   * Once all is written that a frame shows: a line that has grown long goes on in another block from its last row on,
   * so that what is laid out in a frame stays small in a text without line ends, and looks the same.
   */
  bound() {
    const long = this.#line?.childElementCount > PIECES_TOGETHER;
    if (!long || this.#line.contains(document.activeElement)) return; // a token that is moved loses the keyboard
    const row = lastRow(this.#line);
    if (!row.length) return;
    const rest = this.#line.cloneNode();
    rest.classList.add("goes-on");
    rest.dir = getComputedStyle(this.#line).direction;
    rest.append(...row);
    this.#line = rest;
    this.#block = null;
    this.#blockToWrite().append(rest);
  }

  #lineToWrite() {
    if (!this.#line) {
      this.#line = element("div", this.#inCode ? "line code" : "line");
      this.#line.dir = "auto";
      this.#blockToWrite().append(this.#line);
    }
    return this.#line;
  }

  #blockToWrite() {
    if (!this.#block || this.#block.childElementCount === LINES_TOGETHER) {
      this.#block = element("div", "lines");
      this.#root.append(this.#block);
    }
    return this.#block;
  }

  #endLine() {
    if (this.#lineText.startsWith(FENCE)) this.#inCode = !this.#inCode;
    this.#line = null;
    this.#lineText = "";
  }
}

// The last row of `line` that begins with a token, and what stands behind it; nothing where there is none near the end.
// Ghosts that are still to go would move the rows behind them.
function lastRow(line) {
  const all = [...line.children];
  const shown = all.filter((one) => one.getClientRects().length);
  const ghost = shown.findIndex((one) => one.matches(".ghosts:not(.gone)"));
  const settled = ghost < 0 ? shown.length : ghost;
  for (let at = settled - 1; at > Math.max(0, settled - PIECES_LOOKED_AT); at--) {
    const [before, first] = [shown[at - 1], shown[at]];
    if (!first.matches(".piece") || first.textContent.includes("\n")) continue;
    const word = first.querySelector(".ink") ?? first;
    const below = word.getClientRects()[0].top >= [...before.getClientRects()].at(-1).bottom;
    if (below) return all.slice(all.indexOf(first));
  }
  return [];
}

/**
 * An answer drawn into `root`. Steps wait until the next animation frame, so that a frame draws once, however many
 * came. One span a piece of kept text.
 */
export class Answer {
  #root;
  #lines;
  #lastKind = "plain";
  #steps = [];
  #waiting = [];
  #ghosts = [];
  #frame = 0;
  #timer = 0;
  #pauseTimer = 0;
  #onDraw;

  constructor(root, onDraw) {
    this.#root = root;
    this.#lines = new Lines(root);
    this.#onDraw = onDraw;
    root.dataset.busy = "";
  }

  push(steps) {
    this.#steps.push(...steps);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** No more steps will come: draw what waits now. */
  finish() {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    clearTimeout(this.#pauseTimer);
    delete this.#root.dataset.busy;
    this.#releaseGhosts();
  }

  #draw() {
    this.#frame = 0;
    this.#holdCursor();
    for (const step of this.#steps) this.#drawStep(step);
    this.#steps = [];
    this.#releaseGhosts();
    this.#lines.bound();
    this.#onDraw();
  }

  #holdCursor() {
    clearTimeout(this.#pauseTimer);
    if (this.#root.dataset.busy) this.#root.dataset.busy = "";
    this.#pauseTimer = setTimeout(() => (this.#root.dataset.busy = "waiting"), PAUSE_MS);
  }

  #drawStep({ trace, text, logprobs }) {
    if (trace) this.#waiting.push(...keptTokens(trace, logprobs));
    const placed = place(this.#waiting, text);
    this.#waiting = placed.waiting;
    let ghosts = trace ? rejectedTokens(trace) : [];
    for (const piece of placed.pieces) {
      if (ghosts.length && piece.tokens.some((token) => token.kind === "own" && token.trace === trace)) {
        this.#appendGhosts(ghosts);
        ghosts = [];
      }
      this.#appendPiece(piece);
    }
    if (ghosts.length) this.#appendGhosts(ghosts);
  }

  #appendPiece(piece) {
    const { text, tokens } = piece;
    this.#lastKind = tokens.at(-1)?.kind ?? this.#lastKind;
    this.#lines.write(keep(piece, this.#lastKind), text);
  }

  #appendGhosts(tokens) {
    const ghosts = tokens.map((token) => {
      const ghost = element("span", "ghost", token.text.replace(/\r?\n/g, "⏎"));
      tokensOf.set(ghost, [token]);
      return ghost;
    });
    const group = element("span", "ghosts", ...ghosts);
    group.setAttribute("aria-hidden", "true");
    group.dir = "auto"; // of its own: the line's direction is that of what was said
    this.#lines.write(group);
    this.#ghosts.push({ group, since: performance.now() });
  }

  #releaseGhosts() {
    clearTimeout(this.#timer);
    const now = performance.now();
    const early = this.#ghosts.length - GHOSTS_AT_ONCE;
    this.#ghosts = this.#ghosts.filter(({ group, since }, i) => {
      const gone = i < early || now >= since + GHOST_MS;
      if (gone) group.classList.add("gone");
      else if (now >= since + STEADY_MS) group.classList.add("fading");
      return !gone;
    });
    if (!this.#ghosts.length) return;
    const next = this.#ghosts.map(({ since }) => since + (now < since + STEADY_MS ? STEADY_MS : GHOST_MS));
    this.#timer = setTimeout(() => this.#releaseGhosts(), Math.min(...next) - now + 1);
  }
}
