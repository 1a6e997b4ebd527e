// Up close: the block that one points at, and the sequence that is selected.

import { element } from "./dom.js";
import { count, duration, keyOf, number, percent } from "./words.js";

const TABLE_SHOWN = 512;

export class Inspector {
  constructor(memory, colours, { onSelect, onPin }) {
    this.memory = memory;
    this.colours = colours;
    this.onSelect = onSelect;
    this.onPin = onPin;
    this.blockFacts = document.getElementById("block-facts");
    this.sequenceFacts = document.getElementById("sequence-facts");
    this.shownBlock = this.shownSequence = "";
    this.token = 0;
  }

  /** Show a block; what it says is written anew only where it differs. */
  showBlock(block) {
    const { memory } = this;
    if (block === undefined) {
      this.#replaceBlock("none", () => [element("p", {
        class: "summary",
        text: "Point at a block for its key, its references, its owners and its logical index in each.",
      })]);
      return;
    }
    const kind = memory.kindOf(block);
    const owners = memory.ownersOf(block);
    const age = memory.ageOf(block);
    const facts = [["Physical block", number(block)], ["State", this.#stateOf(block, kind, age)]];
    facts.push(["References", number(memory.users[block])], ["Key", keyOf(memory, block)]);
    if (kind === "used" || kind === "shared") {
      facts.push(["Holds", `${memory.tokensIn(block)} of ${count(memory.blockSize, "token")}`]);
    }
    const first = block * memory.blockSize;
    facts.push(["Slots", `${number(first)} to ${number(first + memory.blockSize - 1)}`]);
    const shown = JSON.stringify([facts, owners.map(({ sequence, index }) => [sequence.name, index])]);
    this.#replaceBlock(shown, () => {
      const made = [this.#list(facts)];
      if (owners.length) made.push(this.#owners(owners));
      return made;
    });
  }

  #stateOf(block, kind, age) {
    const { memory } = this;
    if (kind === "free") return "free";
    if (kind === "cached") {
      const before = memory.evictedBefore(block);
      const next = before === 0 ? "evicted next" : `evicted after ${number(before)} others`;
      return `cached ${age === undefined ? "since before you came" : `for ${duration(age)}`}, ${next}`;
    }
    return kind === "shared" ? `shared by ${number(memory.users[block])}` : "used";
  }

  #owners(owners) {
    const list = element("ul", { class: "owners", "aria-label": "Owners" });
    for (const { sequence, index } of owners.slice(0, 24)) {
      const button = this.#sequenceButton(sequence, `sequence ${sequence.name}`);
      list.append(element("li", {}, button, ` logical block ${number(index)}`));
    }
    if (owners.length > 24) list.append(element("li", { text: `and ${owners.length - 24} more` }));
    return list;
  }

  #sequenceButton(sequence, text) {
    const button = element("button", {
      type: "button", class: "name", text, onclick: () => this.onSelect(sequence.name),
    });
    button.style.setProperty("--swatch", this.colours.sequence(sequence.name));
    return button;
  }

  #replaceBlock(shown, make) {
    if (this.shownBlock === shown) return;
    this.shownBlock = shown;
    this.blockFacts.replaceChildren(...make());
  }

  /** Show the sequence of a name, with its block table and a token's translation. */
  showSequence(name) {
    const { memory } = this;
    const sequence = name === undefined ? undefined : memory.byName(name);
    if (!sequence) {
      const text = name === undefined
        ? "Select a sequence, in the grid or in the list, for its block table."
        : `Sequence ${name} has ended.`;
      if (this.shownSequence !== text) {
        this.shownSequence = text;
        this.sequenceFacts.replaceChildren(element("p", { class: "summary", text }));
      }
      return;
    }
    if (this.shownSequence !== `sequence ${name}`) {
      this.shownSequence = `sequence ${name}`;
      this.#begin(sequence);
    }
    this.#update(sequence);
  }

  #begin(sequence) {
    this.title = element("h3", { text: `Sequence ${sequence.name}` });
    this.title.style.setProperty("--swatch", this.colours.sequence(sequence.name));
    this.title.className = "name";
    this.facts = element("div");
    this.tableTitle = element("h4");
    this.table = element("ol", { class: "table", start: "0", tabindex: "0", "aria-label": "Block table" });
    this.shownTable = "";
    this.input = element("input", {
      id: "token", type: "number", min: "0", step: "1", value: String(this.token), inputmode: "numeric",
      oninput: () => this.#translate(true),
    });
    this.spelled = element("output", { class: "spelled", for: "token" });
    this.sequenceFacts.replaceChildren(
      this.title, this.facts, this.tableTitle, this.table,
      element("h4", { text: "Where is a token?" }),
      element("p", { class: "line" }, element("label", { for: "token", text: "token" }), this.input),
      this.spelled,
      element("p", {}, element("button", { type: "button", text: "Let go", onclick: () => this.onSelect(undefined) })),
    );
  }

  #update(sequence) {
    const { memory } = this;
    this.name = sequence.name;
    const table = memory.tableOf(sequence);
    const shared = table.filter((block) => memory.users[block] > 1).length;
    const slots = table.length * memory.blockSize;
    const facts = [
      ["State", sequence.state],
      ["Prompt", count(sequence.promptTokens, "token")],
      ["Answer", `${number(sequence.numTokens - sequence.promptTokens)} of at most ` +
        count(sequence.totalTokens - sequence.promptTokens, "token")],
      ["Blocks", `${number(table.length)}, ${number(shared)} shared`],
    ];
    if (slots) {
      facts.push(["Slots without a token", `${number(slots - sequence.numComputed)} of ${number(slots)} ` +
        `(${percent((slots - sequence.numComputed) / slots)})`]);
    }
    this.facts.replaceChildren(this.#list(facts));
    this.#showTable(table);
    this.input.max = String(Math.max(0, sequence.numComputed - 1));
    this.#translate(false);
  }

  #showTable(table) {
    const shown = table.slice(0, TABLE_SHOWN).join();
    if (shown === this.shownTable) return;
    this.shownTable = shown;
    this.tableTitle.textContent = `Block table, ${count(table.length, "entry", "entries")}`;
    const place = this.table.scrollTop;
    const entries = table.slice(0, TABLE_SHOWN).map((block, index) => element("li", {},
      element("span", { text: index }), element("b", { text: block })));
    if (table.length > TABLE_SHOWN) {
      entries.push(element("li", { text: `… ${number(table.length - TABLE_SHOWN)} more` }));
    }
    this.table.replaceChildren(...entries);
    this.table.scrollTop = place;
  }

  /** Spell out where the token lies that is typed in. */
  #translate(isTyped) {
    const { memory } = this;
    const sequence = memory.byName(this.name);
    const token = this.input.value === "" ? NaN : Number(this.input.value);
    const found = sequence && memory.translate(sequence, token);
    const size = memory.blockSize;
    if (isTyped && Number.isInteger(token)) this.token = token;
    const text = found
      ? [`slot of token ${token}`,
        `= block_table[${token} // ${size}] * ${size} + ${token} % ${size}`,
        `= block_table[${found.index}] * ${size} + ${found.offset}`,
        `= ${found.block} * ${size} + ${found.offset}`,
        `= ${found.slot}`].join("\n")
      : sequence?.numComputed
        ? `its blocks hold tokens 0 to ${sequence.numComputed - 1}`
        : "it has no block now";
    if (this.spelled.textContent !== text) this.spelled.textContent = text;
    if (isTyped && found) this.onPin(found.block);
  }

  #list(facts) {
    const list = element("dl", { class: "facts" });
    for (const [term, description] of facts) {
      list.append(element("dt", { text: term }), element("dd", { text: description }));
    }
    return list;
  }
}
