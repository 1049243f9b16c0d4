// Charts of the page's own: bars as a list that can be read aloud, and drawings with axes. No library, no colour alone.

import { element, svg } from "./dom.js";

const ROOM = { top: 10, right: 14, bottom: 38, left: 46 };
const THIN = 3.5; // px from column to column

/** Rows of `{ label, share, value }` (share of the longest bar, 0…1) as a list into `root`. */
export function drawBars(root, rows) {
  root.replaceChildren(
    ...rows.map(({ label, share, value }) => {
      const bar = element("span", "bar");
      bar.style.setProperty("--part", String(share));
      return element("li", "", element("span", "bar-label", label), bar, element("span", "bar-value", value));
    }),
  );
}

/** About `most` round steps from 0 up to at least `end`. */
export function ticks(end, most = 5) {
  if (!(end > 0)) return [0, 1];
  const rough = end / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const count = Math.ceil(end / step - 1e-9);
  return Array.from({ length: count + 1 }, (_, i) => Number((i * step).toPrecision(12)));
}

/** A drawing with two axes that fills `root`'s width, and is drawn again when that changes. */
export class Plot {
  #root;
  #height;
  #draw = () => {};
  #width = 0;
  #canvas = null;
  #marked = null;
  #observer = new ResizeObserver(() => this.#render());

  constructor(root, height) {
    this.#root = root;
    this.#height = height;
    this.#observer.observe(root);
  }

  /** What it draws in is gone. */
  close() {
    this.#observer.disconnect();
  }

  /** `paint(canvas)` draws into what `canvas` offers: see `Canvas`. */
  show(paint) {
    this.#draw = paint;
    this.#width = 0;
    this.#marked = null;
    this.#render();
  }

  /** Put the marker at `x`; all else stays as it was drawn. */
  mark(x) {
    this.#marked = x;
    this.#canvas?.mark(x);
  }

  #render() {
    const width = this.#root.clientWidth;
    if (!width || width === this.#width) return;
    this.#width = width;
    const drawing = svg("svg", { width, height: this.#height, viewBox: `0 0 ${width} ${this.#height}` });
    drawing.setAttribute("aria-hidden", "true"); // the caption beside it says what it shows
    this.#canvas = new Canvas(drawing, width, this.#height);
    this.#draw(this.#canvas);
    if (this.#marked !== null) this.#canvas.mark(this.#marked);
    this.#root.replaceChildren(drawing);
  }
}

/** Scales and shapes for one drawing. Call `axes` first: it fixes the scales. */
class Canvas {
  #drawing;
  #width;
  #height;
  #ends = { x: 1, y: 1 };
  #start = 0;
  #marker = null;

  constructor(drawing, width, height) {
    this.#drawing = drawing;
    this.#width = width;
    this.#height = height;
  }

  axes({ xEnd, yEnd, xLabel, yLabel, xTicks = ticks(xEnd, this.#width < 420 ? 4 : 8), xStart = 0 }) {
    const yTicks = ticks(yEnd, 4);
    this.#start = xStart;
    this.#ends = { x: Math.max(xEnd, xStart + 1e-9), y: yTicks.at(-1) };
    for (const tick of yTicks) {
      const y = this.y(tick);
      this.#add("line", { class: "grid", x1: ROOM.left, x2: this.#width - ROOM.right, y1: y, y2: y });
      this.#text({ x: ROOM.left - 6, y: y + 4, "text-anchor": "end", class: "tick" }, String(tick));
    }
    for (const tick of xTicks.filter((one) => one >= xStart && one <= xEnd)) {
      this.#text({ x: this.x(tick), y: this.#height - ROOM.bottom + 16, "text-anchor": "middle", class: "tick" }, String(tick));
    }
    this.#text({ x: this.#width - ROOM.right, y: this.#height - 4, "text-anchor": "end", class: "tick axis" }, xLabel);
    const middle = (this.#height - ROOM.bottom + ROOM.top) / 2;
    const turned = `rotate(-90 12 ${middle})`;
    this.#text({ x: 12, y: middle, "text-anchor": "middle", transform: turned, class: "tick axis" }, yLabel);
  }

  x(value) {
    const span = this.#width - ROOM.left - ROOM.right;
    return ROOM.left + ((value - this.#start) / (this.#ends.x - this.#start)) * span;
  }

  /** The highest value that there is room for. */
  get top() {
    return this.#ends.y;
  }

  y(value) {
    return this.#height - ROOM.bottom - (value / this.#ends.y) * (this.#height - ROOM.top - ROOM.bottom);
  }

  line(points, kind) {
    const path = points.map(({ x, y }, i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`);
    this.#add("path", { class: `line-${kind}`, d: path.join("") });
  }

  dots(points, kind, r = 3.5) {
    for (const { x, y } of points) this.#add("circle", { class: `dot-${kind}`, cx: this.x(x), cy: this.y(y), r });
  }

  /** Columns from `{ x, from, to }`, each one unit of x wide. Where they are thin, a line around each would fill it. */
  columns(items, kind) {
    const thin = this.x(1) - this.x(0) < THIN ? " thin" : "";
    const path = items.map(({ x, from, to }) => {
      const [left, right] = [this.x(x - 0.42), this.x(x + 0.42)].map((at) => at.toFixed(2));
      const [top, bottom] = [this.y(to), this.y(from)].map((at) => at.toFixed(2));
      return `M${left} ${bottom}V${top}H${right}V${bottom}Z`;
    });
    this.#add("path", { class: `column-${kind}${thin}`, d: path.join("") });
  }

  /** The one marker, a line from bottom to top, at `x`. */
  mark(x) {
    this.#marker?.remove();
    const at = this.x(x);
    this.#marker = svg("line", { class: "marker", x1: at, x2: at, y1: ROOM.top, y2: this.#height - ROOM.bottom });
    this.#drawing.append(this.#marker);
  }

  #add(tag, attributes) {
    this.#drawing.append(svg(tag, attributes));
  }

  #text(attributes, text) {
    this.#drawing.append(svg("text", attributes, text));
  }
}
