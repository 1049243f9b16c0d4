// What the page keeps in the browser, how it scrolls, and how its fields take what is written.

export const NARROW = matchMedia("(max-width: 60rem)"); // one column, as in the style sheets

const ROUNDING = 2; // px

const NO_KEY = "That is no key: a key is made of ASCII letters, digits and signs, without spaces.";

// Whether `text` may be a key: no header carries others.
function isKey(text) {
  return /^[\x21-\x7e]+$/.test(text);
}

/** A key of the visitor's, kept in this browser; where storage is closed it lasts as long as the page. */
export class KeptKey {
  value = "";
  #name;

  constructor(name) {
    this.#name = name;
    try {
      const kept = localStorage.getItem(this.#name) ?? "";
      if (isKey(kept)) this.value = kept;
    } catch {
      // Storage is closed to this page.
    }
  }

  keep(value) {
    const had = this.value;
    this.value = value;
    try {
      if (value) localStorage.setItem(this.#name, value);
      else if (localStorage.getItem(this.#name) === had) localStorage.removeItem(this.#name); // not another tab's new one
    } catch {
      // As above.
    }
  }

  /** Take over what another tab kept or dropped; whether `event` tells of this key. */
  follow({ key, newValue }) {
    if (key === this.#name) this.value = isKey(newValue ?? "") ? newValue : "";
    return key === this.#name;
  }
}

/** Let `form` ask for a key: `take(key)` gets it, `problem(line)` is told where what was given is none. */
export function keyForm(form, take, problem) {
  const field = form.querySelector("input");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const value = field.value.trim();
    field.value = "";
    if (isKey(value)) return take(value);
    problem(NO_KEY);
    field.focus();
  });
}

/** Follows the end of what grows in a box while the reader is there, and leaves readers who scrolled up alone. */
export class Follower {
  #box;
  #top = 0;
  #atEnd = true;

  /** `near`: px, a reader this close to the end of `box` wants to follow it. `here()`: whether the box shows what grows. */
  constructor(box, near, here = () => true) {
    this.#box = box;
    const scrolled = () => {
      if (!here()) return;
      const up = box.scrollTop < this.#top; // by the reader: what grows only goes down
      this.#top = box.scrollTop;
      this.#atEnd = this.#distance() < (up ? ROUNDING : near);
    };
    (box === document.scrollingElement ? document : box).addEventListener("scroll", scrolled, { passive: true });
  }

  #distance() {
    return this.#box.scrollHeight - this.#box.clientHeight - this.#box.scrollTop;
  }

  follow({ insist = false } = {}) {
    if (insist) this.#atEnd = true;
    if (this.#atEnd) this.#box.scrollTop = this.#box.scrollHeight;
  }
}

/** Enter in the text `field` sends its `form`, once however long it is held; Shift and Enter start a new line. */
export function submitOnEnter(field, form) {
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || composes(event)) return;
    event.preventDefault();
    if (!event.repeat) form.requestSubmit();
  });
}

/** Whether a key goes to an input method: Safari calls the Enter that ends a composition 229, and says it is over. */
export function composes(event) {
  return event.isComposing || event.keyCode === 229;
}

/** Make a text field as high as what is written in it. */
export function fitHeight(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}
