// Pointing at blocks, with a mouse, a finger or the keyboard: one block is pointed at, the grid
// has the focus, and a cell that only a screen reader sees says which block it is.

import { blockInWords } from "./words.js";

const STEPS = { ArrowLeft: -1, ArrowRight: 1 };

export class Pointing {
  constructor(grid, map, memory, { onPoint, onSelect }) {
    this.grid = grid;
    this.map = map;
    this.memory = memory;
    this.onPoint = onPoint;
    this.onSelect = onSelect;
    this.focused = 0;
    this.pinned = undefined; // a block that stays when the mouse leaves
    this.cells = [document.getElementById("cell-0"), document.getElementById("cell-1")];
    this.row = document.getElementById("blocks-row");
    grid.addEventListener("pointermove", (event) => this.#hover(event));
    grid.addEventListener("pointerleave", () => this.#show(this.pinned));
    grid.addEventListener("click", (event) => this.#click(event));
    grid.addEventListener("keydown", (event) => this.#press(event));
    grid.addEventListener("focus", () => this.#focus(Math.min(this.focused, memory.numBlocks - 1)));
    grid.addEventListener("blur", () => this.#show(this.pinned));
  }

  layOut() {
    this.grid.setAttribute("aria-rowcount", this.map.geometry.rows);
    this.grid.setAttribute("aria-colcount", this.map.geometry.columns);
  }

  #blockAt(event) {
    const box = this.map.canvas.getBoundingClientRect();
    return this.map.geometry?.at(event.clientX - box.left, event.clientY - box.top);
  }

  #hover(event) {
    const block = this.#blockAt(event);
    if (block !== undefined && event.pointerType === "mouse") this.#show(block);
  }

  #click(event) {
    const block = this.#blockAt(event);
    if (block === undefined) return;
    this.#focus(block);
    this.onSelect(block);
  }

  #press(event) {
    const { geometry } = this.map;
    if (!geometry) return;
    const { columns, rows } = geometry;
    const last = this.memory.numBlocks - 1;
    const rowStart = this.focused - (this.focused % columns);
    let next;
    if (event.key in STEPS) next = this.focused + STEPS[event.key];
    else if (event.key === "ArrowUp") next = this.focused - columns;
    else if (event.key === "ArrowDown") next = this.focused + columns;
    else if (event.key === "PageUp") next = this.focused - columns * Math.min(10, rows);
    else if (event.key === "PageDown") next = this.focused + columns * Math.min(10, rows);
    else if (event.key === "Home") next = event.ctrlKey ? 0 : rowStart;
    else if (event.key === "End") next = event.ctrlKey ? last : Math.min(rowStart + columns - 1, last);
    else if (event.key === "Enter" || event.key === " ") this.onSelect(this.focused);
    else if (event.key === "Escape") {
      this.pinned = undefined;
      this.onSelect(undefined);
    } else return;
    event.preventDefault();
    if (next !== undefined && next >= 0 && next <= last) this.#focus(next);
  }

  /** Point at a block from the keyboard, or by a click: it stays. */
  #focus(block) {
    if (!this.memory.isKnown) return;
    this.focused = this.pinned = block;
    const { columns } = this.map.geometry;
    // Two cells take turns, so that a screen reader hears that another one is active.
    const [cell, other] = this.cells;
    this.cells = [other, cell];
    this.row.setAttribute("aria-rowindex", Math.floor(block / columns) + 1);
    cell.setAttribute("aria-colindex", (block % columns) + 1);
    cell.textContent = blockInWords(this.memory, block);
    other.textContent = "";
    this.grid.setAttribute("aria-activedescendant", cell.id);
    this.#show(block);
  }

  /** Point at a block that is named elsewhere on the page. */
  pin(block) {
    this.focused = this.pinned = block;
    this.#show(block);
  }

  #show(block) {
    this.onPoint(block);
  }
}
