// Small makers of elements, and hands for buttons. Text goes in as textContent alone.

const asNode = (item) => (item instanceof Node ? item : String(item));

/** An element with a class, and texts or elements in it. */
export function element(tag, className, ...content) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...content.map(asNode));
  return made;
}

/** A button that submits nothing. */
export function button(className, text, onClick) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** Take the keyboard to `button`. The Enter that pressed another one may still be held: it shall not press this one. */
export function focusButton(button, options) {
  button.onkeydown = (event) => {
    if (event.repeat && event.key === "Enter") event.preventDefault();
  };
  button.focus(options);
}

/** Show the button `come` in the place of `gone`, for the keyboard too. */
export function swap(gone, come) {
  const focused = document.activeElement === gone;
  gone.hidden = true;
  come.hidden = false;
  if (focused) focusButton(come, { preventScroll: true });
}

/** An element of a drawing. */
export function svg(tag, attributes = {}, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}
