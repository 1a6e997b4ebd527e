// What happened, in words, the newest first.

import { element } from "./dom.js";
import { FLASHES } from "./colours.js";
import { happeningInWords } from "./words.js";

const KEPT = 60;
const AT_ONCE = 12;

export class Log {
  constructor(target) {
    this.target = target;
  }

  add(happenings) {
    const shown = happenings.slice(-AT_ONCE).map((happening) => {
      const mark = element("span", { class: "swatch ring", "aria-hidden": "true" });
      mark.style.setProperty("--swatch", `var(--${FLASHES[happening.kind].colour})`);
      return element("li", {}, mark, element("time", { text: clock() }), happeningInWords(happening));
    });
    if (happenings.length > AT_ONCE) {
      shown.push(element("li", { class: "more", text: `and ${happenings.length - AT_ONCE} more at once` }));
    }
    this.target.prepend(...shown.reverse());
    while (this.target.children.length > KEPT) this.target.lastElementChild.remove();
  }
}

function clock() {
  return new Date().toLocaleTimeString("en-GB");
}
