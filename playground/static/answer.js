// Draws one answer as it grows. Model text reaches the page through textContent alone.

import { keptTokens, place, rejectedTokens } from "./trace.js";

const FENCE = "```"; // a line that starts so begins or ends code, which is set in a fixed pitch
const GHOST_MS = 1400; // how long a rejected draft stays; the fade in talk.css lasts as long
const GHOSTS_AT_ONCE = 24; // a fast stream lets the oldest go early, so that a frame stays cheap

// Span -> the tokens that it stands for, for the inspector.
const tokensOf = new WeakMap();

export function tokensBehind(element) {
  return tokensOf.get(element) ?? [];
}

// White space before a word carries no mark, unless the token is nothing else.
function pieceOf(text, kind) {
  const piece = document.createElement("span");
  const word = text.trimStart();
  if (!word || word === text) {
    piece.className = `piece ink ${kind}`;
    piece.textContent = text;
    return piece;
  }
  const ink = document.createElement("span");
  ink.className = "ink";
  ink.textContent = word;
  piece.className = `piece ${kind}`;
  piece.append(text.slice(0, text.length - word.length), ink);
  return piece;
}

/** A trace as the drawing code may rely on it, whatever a server left out. */
export function readTrace(chunk) {
  const trace = chunk.tidar;
  if (!trace || typeof trace.step !== "number") return null;
  const drafted = trace.drafted ?? [];
  return { ...trace, drafted, accepted: Math.min(trace.accepted ?? 0, drafted.length), anchor: trace.anchor ?? null };
}

/** The text that a chunk adds to the answer. */
export function readDelta(chunk) {
  return chunk.choices?.[0]?.delta?.content ?? "";
}

/**
 * An answer drawn into `root`. Chunks wait until the next animation frame, so that a frame draws once, however many
 * came. One span a piece of kept text, one block a line: a long answer lays out its last line alone.
 */
export class Answer {
  #root;
  #line = null;
  #lineText = "";
  #inCode = false;
  #lastKind = "plain";
  #chunks = [];
  #waiting = [];
  #ghosts = [];
  #frame = 0;
  #timer = 0;
  #onDraw;

  constructor(root, onDraw = () => {}) {
    this.#root = root;
    this.#onDraw = onDraw;
    root.dataset.busy = "";
  }

  push(chunks) {
    this.#chunks.push(...chunks);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** No more chunks will come: draw what waits now. */
  finish() {
    cancelAnimationFrame(this.#frame);
    this.#draw();
    delete this.#root.dataset.busy;
    this.#releaseGhosts();
  }

  #draw() {
    this.#frame = 0;
    for (const chunk of this.#chunks) this.#drawChunk(readTrace(chunk), readDelta(chunk));
    this.#chunks = [];
    this.#releaseGhosts();
    this.#onDraw();
  }

  #drawChunk(trace, delta) {
    const waiting = trace ? [...this.#waiting, ...keptTokens(trace)] : this.#waiting;
    const placed = place(waiting, delta);
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

  #appendPiece({ text, tokens }) {
    const last = tokens.at(-1);
    this.#lastKind = last?.kind ?? this.#lastKind;
    const span = pieceOf(text, this.#lastKind);
    if (last) tokensOf.set(span, tokens);
    this.#lineToWrite().append(span);
    this.#lineText += text;
    if (this.#lineText.startsWith(FENCE)) this.#line.classList.add("code");
    if (text.endsWith("\n")) this.#endLine();
  }

  #appendGhosts(tokens) {
    const group = document.createElement("span");
    group.className = "ghosts";
    group.setAttribute("aria-hidden", "true");
    for (const token of tokens) {
      const ghost = document.createElement("span");
      ghost.className = "ghost";
      ghost.textContent = token.text.replace(/\r?\n/g, "⏎");
      tokensOf.set(ghost, [token]);
      group.append(ghost);
    }
    this.#lineToWrite().append(group);
    this.#ghosts.push({ group, until: performance.now() + GHOST_MS });
  }

  #lineToWrite() {
    if (!this.#line) {
      this.#line = document.createElement("div");
      this.#line.className = this.#inCode ? "line code" : "line";
      this.#line.dir = "auto";
      this.#root.append(this.#line);
    }
    return this.#line;
  }

  #endLine() {
    if (this.#lineText.startsWith(FENCE)) this.#inCode = !this.#inCode;
    this.#line = null;
    this.#lineText = "";
  }

  #releaseGhosts() {
    clearTimeout(this.#timer);
    const now = performance.now();
    while (this.#ghosts.length && (this.#ghosts[0].until <= now || this.#ghosts.length > GHOSTS_AT_ONCE)) {
      this.#ghosts.shift().group.classList.add("gone");
    }
    if (this.#ghosts.length) {
      this.#timer = setTimeout(() => this.#releaseGhosts(), this.#ghosts[0].until - now + 1);
    }
  }
}
