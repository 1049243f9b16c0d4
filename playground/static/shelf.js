// The recordings that this page holds: its own answers and those opened from files. They last as long as the page.

const MOST = 24;

/** Tells "change" when a recording was put on, or another one chosen. */
export class Shelf extends EventTarget {
  recordings = []; // newest first
  chosen = null;
  studied = false; // somebody looks at the chosen one

  /** Keep `recording`, and choose it: one that somebody studies gives way only to one that was opened. */
  put(recording) {
    if (!recording.steps.length) return;
    this.recordings = [recording, ...this.recordings];
    this.choose(this.studied && this.chosen && !recording.opened ? this.chosen : recording);
  }

  /** Choose `recording`, however old; where there are too many, the oldest of the others are dropped. */
  choose(recording) {
    this.chosen = recording;
    const newest = this.recordings.slice(0, MOST);
    this.recordings = newest.includes(recording) ? newest : [...newest.slice(0, MOST - 1), recording];
    this.dispatchEvent(new Event("change"));
  }
}
