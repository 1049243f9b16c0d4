// Small makers of elements. Text goes in as textContent alone.

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

/** An element of a drawing. */
export function svg(tag, attributes = {}, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...content);
  return made;
}
