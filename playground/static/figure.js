// The figure of one step, as in the paper: columns are positions, rows are what one forward pass computed there.

import { element } from "./dom.js";
import { plural } from "./stats.js";
import { quoted } from "./trace.js";

const MOST_COLUMNS = 64; // of a file: a block far beyond any drafter's would only make the figure unreadable

/**
 * Draw the step `trace` into `table`. `before` is the trace of the step before it (its own token is the anchor here)
 * and `after` of the step behind it (its drafts are what the proposal that came true brought).
 */
export function drawStep(table, trace, before, after) {
  const { drafted, block } = trace;
  const outcomes = trace.proposals.map(({ a }) => a);
  const last = Math.max(drafted.length + 1, ...outcomes.map((a) => a + block - 1));
  const columns = Math.min(last + 1, MOST_COLUMNS);
  const row = (kind, name, cells, note = "") => {
    const head = element("th", "", name, ...(note ? [element("small", "", note)] : []));
    head.scope = "row";
    return element("tr", kind, head, ...Array.from({ length: columns }, (_, at) => cells(at)));
  };
  table.replaceChildren(
    element("thead", "", row("positions", "Position", positionHead)),
    element(
      "tbody",
      "",
      row("verify", "Verify rows", (at) => verifyCell(at, trace, before), "what was guessed"),
      row("says", "The model says", (at) => saysCell(at, trace), "the true tokens"),
    ),
    element("tbody", "", ...outcomes.map((a) => proposalRow(row, a, trace, after))),
  );
}

function positionHead(at) {
  const head = element("th", "", at ? `p+${at}` : "p");
  head.scope = "col";
  return head;
}

function cell(kind, text, title = "") {
  const made = element("td", kind);
  const shown = element("span", "token-cell", text);
  shown.dir = "auto";
  if (title) shown.title = title;
  made.append(shown);
  return made;
}

function verifyCell(at, { step, drafted, accepted, anchor }, before) {
  if (at === 0) return cell("anchor", before?.anchor ? short(before.anchor.text) : step ? "anchor" : "prompt");
  const draft = drafted[at - 1];
  if (!draft) return element("td", "none");
  if (at <= accepted) return cell("held", short(draft.text), `draft ${at}: it held`);
  if (!anchor) return cell("unjudged", short(draft.text), `draft ${at}: behind the end of the answer`);
  return cell("rejected", short(draft.text), `draft ${at}: ${at === accepted + 1 ? "the model said something else" : "it built on a rejected draft"}`);
}

function saysCell(at, { drafted, accepted, anchor }) {
  if (at === 0) return element("td", "none");
  if (at <= accepted) return cell("held", short(drafted[at - 1].text));
  if (at === accepted + 1 && anchor) return cell("own", short(anchor.text), "the model's own token: the next anchor");
  return element("td", "none");
}

function proposalRow(row, a, { block, used, drafted }, after) {
  const came = a === used;
  const name = a === 1 ? "If none holds" : a === drafted.length + 1 ? "If all hold" : `If ${a - 1} hold${a === 2 ? "s" : ""}`;
  const found = came && after ? after.drafted : [];
  const cells = (at) => {
    const slot = at - a;
    if (slot < 0 || slot >= block) return element("td", "none");
    if (!came) return cell("slot", "·");
    if (slot === 0) return cell("slot used", "·", "slot 0 guessed what the model then said itself");
    const draft = found[slot - 1];
    return draft ? cell("slot used", short(draft.text), `slot ${slot}: draft ${slot} of the next step`) : cell("slot used", "·");
  };
  return row(came ? "proposal used" : "proposal", drafted.length ? name : "Proposal", cells, came ? "came true" : "");
}

function short(text) {
  const letters = Array.from(text.replace(/\n/g, "⏎").replace(/\t/g, "⇥"));
  if (!letters.join("").trim()) return "␣".repeat(Math.min(letters.length, 4)) || "∅";
  return letters.length > 12 ? `${letters.slice(0, 11).join("")}…` : letters.join("");
}

/** The step in one or two sentences. */
export function tellStep(trace) {
  const { step, drafted, accepted, anchor, proposals, used, rows, block } = trace;
  const said = anchor ? `the model said ${quoted(anchor.text)} itself` : "the answer ended there";
  const first =
    step === 0
      ? `Step 0 read the prompt: ${said}.`
      : drafted.length
        ? `Step ${step} verified ${plural(drafted.length, "draft")}: ${accepted || "none"} held, and ${said}.`
        : `Step ${step} had no drafts to verify: ${said}.`;
  if (!proposals.length) return `${first} It drafted nothing ahead.`;
  const ahead = `${plural(rows.mask, "mask row")} drafted ahead, for ${plural(proposals.length, "outcome")} × ${plural(block, "slot")}`;
  const came = used === null ? "none of them came true" : proposals.length === 1 ? "it came true" : "one of them came true";
  return `${first} In the same pass ${ahead}: ${came}.`;
}
