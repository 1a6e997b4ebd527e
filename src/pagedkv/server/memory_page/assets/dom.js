// Making elements: text is always text, never markup.

/** An element with attributes and children; `text`, `class` and listeners as `onclick` may be given. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "text") made.textContent = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Change a text only where it differs, so that selections and screen readers are left in peace. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** A legend's entry; `colour` is the name of a custom property. */
export function legendEntry(colour, label, shape = "") {
  const swatch = element("span", { class: `swatch ${shape}`, "aria-hidden": "true" });
  swatch.style.setProperty("--swatch", `var(--${colour})`);
  return element("li", {}, swatch, label);
}
