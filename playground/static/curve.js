// The machine's step time against rows, as the engine measured it at start-up, and where an answer's steps lie on it.

import { one } from "./numbers.js";
import { draftingStep, median, plainStep } from "./stats.js";

const MOST_DOTS = 600;
const rowCount = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

// Where the steps of an answer lie: the median of rows and of milliseconds; null where there is no step.
function operatingPoint(times) {
  if (!times.length) return null;
  return { rows: median(times.map(({ rows }) => rows)), ms: median(times.map(({ ms }) => ms)) };
}

/** Paint the curve, the steps of an answer (`stepTimes`) as dots, and their median. */
export function drawCurve(canvas, cost, times, blockLength) {
  const point = operatingPoint(times);
  const end = times.reduce((found, { rows }) => Math.max(found, rows), cost.rows.at(-1));
  const rows = [1, ...cost.rows.filter((row) => row > 1), ...(end > cost.rows.at(-1) ? [end] : [])];
  const plain = rows.map((x) => ({ x, y: plainStep(cost, x) }));
  const drafting = rows.map((x) => ({ x, y: draftingStep(cost, x, Math.max(1, (blockLength || 1) - 1)) }));
  // A step that waited for something else may take ten times as long: it shall not flatten the curve.
  const highest = Math.max(...plain.map(({ y }) => y), ...drafting.map(({ y }) => y), point ? 1.3 * point.ms : 0);
  canvas.axes({ xEnd: end, yEnd: highest, xLabel: "rows in one step", yLabel: "ms" });
  canvas.line(plain, "plain");
  if (blockLength) canvas.line(drafting, "drafting");
  const stride = Math.ceil(times.length / MOST_DOTS);
  const shown = times.filter(({ ms }, i) => i % stride === 0 && ms <= highest);
  canvas.dots(shown.map(({ rows: x, ms: y }) => ({ x, y })), "step", 2.5);
  if (point) canvas.dots([{ x: point.rows, y: point.ms }], "median", 6);
}

/** The curve in words. It was measured while nothing else ran: no answer's times are held against it. */
export function tellCurve(cost, times) {
  const single = plainStep(cost, 1);
  const base = `As the engine started, a plain step of one row took ${one.format(single)} ms.`;
  const point = operatingPoint(times);
  if (!point) {
    const last = cost.rows.at(-1);
    const ratio = plainStep(cost, last) / single;
    return `${base} One of ${last} rows took ${one.format(ratio)} times as long, not ${last} times: where the curve is flat, drafts are free.`;
  }
  const token = times.reduce((sum, { ms }) => sum + ms, 0) / times.reduce((sum, { tokens }) => sum + tokens, 0);
  const where = `The middle step of this answer ran ${rowCount.format(point.rows)} rows in ${one.format(point.ms)} ms.`;
  if (point.rows <= 1) return `${base} The middle step of this answer was one: ${one.format(point.ms)} ms.`;
  return `${base} ${where} Over all steps a token took ${one.format(token)} ms; whether drafts pay, a race tells.`;
}
