// The list of sequences.

import { element, say } from "./dom.js";
import { count, number } from "./words.js";

const MOST = 120;
const RANKS = { running: 0, waiting: 1, expected: 2 };
const EVERY_MS = 300;

export class SequenceList {
  constructor(memory, colours, onSelect) {
    this.memory = memory;
    this.colours = colours;
    this.onSelect = onSelect;
    this.body = document.getElementById("sequences");
    this.summary = document.getElementById("sequences-summary");
    this.rows = new Map(); // by name
    this.shownAt = -Infinity;
  }

  /** Bring the list up to date; rows stay the same elements, so that the focus stays. */
  show(nowMs, selected, twinName, isUrgent = false) {
    if (!isUrgent && nowMs - this.shownAt < EVERY_MS) return;
    this.shownAt = nowMs;
    const all = [...this.memory.sequences.values()].sort(
      (a, b) => RANKS[a.state] - RANKS[b.state] || a.name - b.name);
    const listed = all.slice(0, MOST);
    const waiting = new Set(this.memory.twins[twinName].waiting);
    const names = new Set(listed.map(({ name }) => name));
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.element.remove();
        this.rows.delete(name);
      }
    }
    listed.forEach((sequence, place) => {
      const row = this.rows.get(sequence.name) ?? this.#make(sequence);
      this.#update(row, sequence, selected, waiting.has(sequence.column));
      if (this.body.children[place] !== row.element) {
        this.body.insertBefore(row.element, this.body.children[place] ?? null);
      }
    });
    const more = all.length - listed.length;
    say(this.summary, all.length === 0
      ? "Nobody generates now."
      : "Choose one to light up its blocks in logical order." + (more > 0 ? ` ${number(more)} more are not listed.` : ""));
  }

  #make(sequence) {
    const button = element("button", {
      type: "button", class: "name", text: number(sequence.name),
      "aria-label": `Sequence ${sequence.name}`,
      onclick: () => this.onSelect(sequence.name),
    });
    button.style.setProperty("--swatch", this.colours.sequence(sequence.name));
    const cells = Array.from({ length: 7 }, () => element("td"));
    const made = element("tr", {}, element("th", { scope: "row" }, button), ...cells);
    const row = { element: made, button, cells };
    this.rows.set(sequence.name, row);
    return row;
  }

  #update(row, sequence, selected, waitsInTwin) {
    const table = this.memory.tableOf(sequence);
    const shared = table.filter((block) => this.memory.users[block] > 1).length;
    const isSelected = sequence.name === selected;
    if (row.element.classList.contains("here") !== isSelected) row.element.classList.toggle("here", isSelected);
    row.button.setAttribute("aria-pressed", isSelected);
    const again = sequence.numAdmissions > 1 ? `, begun ${count(sequence.numAdmissions, "time")}` : "";
    const texts = [
      sequence.state + again, number(sequence.promptTokens),
      number(sequence.numTokens - sequence.promptTokens), number(sequence.numComputed),
      number(table.length), number(shared), waitsInTwin ? "would wait" : "yes",
    ];
    texts.forEach((text, i) => say(row.cells[i], text));
  }

  /** Colours changed. */
  recolour() {
    for (const [name, { button }] of this.rows) {
      button.style.setProperty("--swatch", this.colours.sequence(name));
    }
  }
}
