// The recordings that this page holds: its own answers and those opened from files. They last as long as the page.

const MOST = 24;

/** Tells "change" when a recording was put on, or another one chosen. */
export class Shelf extends EventTarget {
  recordings = []; // newest first
  chosen = null;

  /** Keep `recording`, drop the oldest where there are too many, and choose the new one. */
  put(recording) {
    if (!recording.steps.length) return;
    this.recordings = [recording, ...this.recordings].slice(0, MOST);
    this.choose(recording);
  }

  choose(recording) {
    this.chosen = recording;
    this.dispatchEvent(new Event("change"));
  }
}
