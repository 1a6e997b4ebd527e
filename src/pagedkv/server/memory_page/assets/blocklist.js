// All blocks as a table: the grid for those who would rather read.

import { element, say } from "./dom.js";
import { count, keyOf, number } from "./words.js";

const PAGE = 50;
const EVERY_MS = 1000;

export class BlockList {
  constructor(memory, onSelect) {
    this.memory = memory;
    this.onSelect = onSelect;
    this.details = document.getElementById("block-list");
    this.kind = document.getElementById("list-kind");
    this.place = document.getElementById("list-place");
    this.body = document.getElementById("list");
    this.page = 0;
    this.shownAt = -Infinity;
    const turn = (pages) => () => {
      this.page += pages;
      this.show(performance.now(), true);
    };
    document.getElementById("list-before").addEventListener("click", turn(-1));
    document.getElementById("list-after").addEventListener("click", turn(1));
    this.kind.addEventListener("change", () => {
      this.page = 0;
      this.show(performance.now(), true);
    });
    this.details.addEventListener("toggle", () => this.show(performance.now(), true));
  }

  show(nowMs, isUrgent = false) {
    const { memory } = this;
    if (!this.details.open || !memory.isKnown) return;
    const isRead = this.body.contains(document.activeElement); // a row must not go under one's hands
    if (!isUrgent && (isRead || nowMs - this.shownAt < EVERY_MS)) return;
    this.shownAt = nowMs;
    const wanted = { used: ["used", "shared"], shared: ["shared"], cached: ["cached"] }[this.kind.value];
    const blocks = [];
    for (let block = 0; block < memory.numBlocks; block += 1) {
      if (!wanted || wanted.includes(memory.kindOf(block))) blocks.push(block);
    }
    if (this.kind.value === "cached") blocks.sort((a, b) => memory.order[a] - memory.order[b]);
    this.page = Math.max(0, Math.min(this.page, Math.ceil(blocks.length / PAGE) - 1));
    const first = this.page * PAGE;
    const listed = blocks.slice(first, first + PAGE);
    say(this.place, blocks.length === 0 ? "none"
      : `${number(first + 1)} to ${number(first + listed.length)} of ${count(blocks.length, "block")}`);
    this.body.replaceChildren(...listed.map((block) => this.#row(block)));
  }

  #row(block) {
    const { memory } = this;
    const owners = memory.ownersOf(block).slice(0, 16).flatMap(({ sequence, index }, i) => [
      i ? ", " : "",
      element("button", {
        type: "button", class: "link", text: `${sequence.name}`,
        "aria-label": `Sequence ${sequence.name}`, onclick: () => this.onSelect(sequence.name),
      }),
      ` at ${number(index)}`,
    ]);
    return element("tr", {},
      element("th", { scope: "row", text: number(block) }),
      element("td", { text: memory.kindOf(block) }),
      element("td", { text: number(memory.users[block]) }),
      element("td", { text: keyOf(memory, block) }),
      element("td", { class: "words" }, ...owners));
  }
}
