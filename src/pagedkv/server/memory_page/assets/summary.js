// The page's sentences and its figures: what both memories hold, and how much of it for nothing.

import { element, say } from "./dom.js";
import { bytes, count, number, percent } from "./words.js";

const TILES = [
  ["tokens", "tokens a second"],
  ["hits", "of prompt tokens were cached, since the start"],
  ["fill", "of the slots in used blocks hold a token"],
  ["sequences", "sequences run"],
  ["gaveWay", "times a sequence gave way"],
];

export class Summary {
  constructor(memory) {
    this.memory = memory;
    this.tiles = {};
    const list = document.getElementById("tiles");
    for (const [name, what] of TILES) {
      const tile = { number: element("div", { class: "number", text: "–" }), what: element("div", { class: "what", text: what }) };
      list.append(element("li", {}, tile.number, tile.what));
      this.tiles[name] = tile;
    }
    this.rates = [];
  }

  /** What the whole memory is. */
  begin() {
    const { facts } = this.memory;
    say(document.getElementById("model"), facts.model);
    say(document.getElementById("size"),
      `${number(facts.num_blocks)} blocks of ${count(facts.block_size, "token")}, ` +
      `${bytes(facts.block_bytes)} each: ${bytes(facts.block_bytes * facts.num_blocks)} of keys and values`);
    this.rates = [];
  }

  show(twinName) {
    this.#showTiles();
    const { memory } = this;
    const { counters } = memory;
    say(document.getElementById("headline"), headline(counters));
    const slots = counters.used_blocks * memory.blockSize;
    const entries = counters.table_entries;
    say(document.getElementById("blocks-summary"), slots === 0 ? "No block is used." :
      `${number(slots)} slots held for ${count(counters.held_tokens, "token")}: ` +
      `${percent(1 - counters.held_tokens / slots)} empty.` +
      (entries > counters.used_blocks
        ? ` Sharing saves ${count(entries - counters.used_blocks, "block")}.` : ""));
    say(document.getElementById("regions-summary"), this.#inRegions(twinName));
  }

  #inRegions(twinName) {
    const { memory } = this;
    const twin = memory.twins[twinName];
    const regions = memory.regionsOf(twinName);
    const reserved = regions.reduce((sum, { size }) => sum + size, 0);
    const tokens = regions.reduce((sum, { size, sequence }) => sum + Math.min(size, sequence?.numComputed ?? 0), 0);
    const waiting = twin.waiting.filter((column) => memory.sequences.get(column)?.state === "running").length;
    const wait = waiting === 0 ? "" :
      ` ${count(waiting, "sequence that runs", "sequences that run")} in the blocks would wait here.`;
    if (reserved === 0) return `No region is held.${wait}`;
    return `${number(reserved)} slots reserved for ${count(tokens, "token")}: ` +
      `${percent(1 - tokens / reserved)} empty.${wait}`;
  }

  #showTiles() {
    const { counters, nowMs } = this.memory;
    this.rates.push([nowMs, counters.output_tokens]);
    while (this.rates.length > 2 && nowMs - this.rates[0][0] > 2000) this.rates.shift();
    const [thenMs, then] = this.rates[0];
    const rate = nowMs > thenMs ? (counters.output_tokens - then) / ((nowMs - thenMs) / 1000) : 0;
    const { tiles, memory } = this;
    const slots = counters.used_blocks * memory.blockSize;
    say(tiles.tokens.number, number(rate));
    say(tiles.hits.number, counters.query_tokens ? percent(counters.hit_tokens / counters.query_tokens) : "–");
    say(tiles.fill.number, slots ? percent(counters.held_tokens / slots) : "–");
    say(tiles.sequences.number, number(counters.num_running));
    say(tiles.sequences.what, counters.num_waiting
      ? `sequences run, ${number(counters.num_waiting)} wait` : "sequences run, none waits");
    say(tiles.gaveWay.number, number(counters.preemptions));
    say(tiles.gaveWay.what, `times a sequence gave way; ${count(counters.evicted_blocks, "block")} evicted`);
  }
}

export function headline(counters) {
  const { num_blocks, used_blocks, shared_blocks, cached_blocks, num_running } = counters;
  if (used_blocks === 0) {
    return `All ${number(num_blocks)} blocks are free, ${number(cached_blocks)} of them cached`;
  }
  const shared = shared_blocks ? `, ${number(shared_blocks)} of them shared` : "";
  return `${count(num_running, "sequence uses", "sequences use")} ${number(used_blocks)} of ` +
    `${number(num_blocks)} blocks${shared}; ${number(cached_blocks)} are cached`;
}
