// The blocks, drawn: one cell each, and only those that changed are drawn anew.

import { Geometry } from "./geometry.js";

const AGES = 6;
const AGE_EVERY_MS = 1000;

export class BlockMap {
  constructor(canvas, memory, colours) {
    this.canvas = canvas;
    this.memory = memory;
    this.colours = colours;
    this.colourBy = "sequence";
    this.selected = undefined; // the name of a sequence
    this.stale = new Set();
    this.isAllStale = true;
    this.agedAt = -Infinity;
  }

  /** Lay the cells out anew. */
  layOut(width, height) {
    this.geometry = new Geometry(this.memory.numBlocks, width, height);
    this.context = this.geometry.fit(this.canvas);
    this.ages = new Uint8Array(this.memory.numBlocks);
    this.agedAt = -Infinity;
    this.isAllStale = true;
  }

  /** These blocks are to be drawn anew; all of them where none are given. */
  touch(blocks) {
    if (blocks === undefined) this.isAllStale = true;
    else for (const block of blocks) this.stale.add(block);
  }

  draw(nowMs) {
    if (!this.geometry) return;
    if (nowMs - this.agedAt > AGE_EVERY_MS) {
      this.agedAt = nowMs;
      this.#age();
    }
    const order = this.#selectedOrder();
    if ((order === undefined) !== this.isWhole) this.isAllStale = true; // the selected one ended
    this.isWhole = order === undefined;
    if (this.isAllStale) {
      this.context.clearRect(0, 0, this.geometry.width, this.geometry.height);
      for (let block = 0; block < this.memory.numBlocks; block += 1) this.#drawCell(block, order);
    } else {
      for (const block of this.stale) this.#drawCell(block, order);
    }
    this.isAllStale = false;
    this.stale.clear();
  }

  /** Logical index of each block of the selected sequence; undefined where none is. */
  #selectedOrder() {
    const sequence = this.selected === undefined ? undefined : this.memory.byName(this.selected);
    if (!sequence) return undefined;
    return new Map(this.memory.tableOf(sequence).map((block, index) => [block, index]));
  }

  /** Sort cached blocks into classes of age, by the order in which they will be evicted. */
  #age() {
    const { memory } = this;
    const cached = [];
    for (let block = 0; block < memory.numBlocks; block += 1) {
      if (memory.isCached(block)) cached.push(block);
    }
    cached.sort((a, b) => memory.order[a] - memory.order[b]);
    cached.forEach((block, rank) => {
      const age = AGES - 1 - Math.floor((rank * AGES) / cached.length);
      if (this.ages[block] !== age) {
        this.ages[block] = age;
        this.stale.add(block);
      }
    });
  }

  #drawCell(block, order) {
    const { context, geometry, memory, colours } = this;
    const size = geometry.cell - geometry.gap;
    const x = geometry.x(block), y = geometry.y(block);
    context.globalAlpha = 1;
    context.clearRect(x, y, geometry.cell, geometry.cell);
    const kind = memory.kindOf(block);
    const index = order?.get(block);
    const faded = order !== undefined && index === undefined ? 0.22 : 1;
    if (kind === "free" || kind === "cached") {
      context.globalAlpha = faded;
      context.fillStyle = colours.free;
      context.fillRect(x, y, size, size);
      if (kind === "cached") this.#drawCached(x, y, size, this.ages[block], faded);
      return;
    }
    const owner = memory.ownerOf(block);
    let colour = colours.token_states;
    if (kind === "shared") colour = colours.shared;
    else if (this.colourBy === "sequence" && owner) colour = colours.sequence(owner.name);
    context.fillStyle = colour;
    const filled = memory.tokensIn(block) / memory.blockSize;
    if (size >= 6 && filled < 1) {
      context.globalAlpha = 0.35 * faded;
      context.fillRect(x, y, size, size);
      context.globalAlpha = faded;
      context.fillRect(x, y, Math.round(size * filled), size);
    } else {
      context.globalAlpha = faded;
      context.fillRect(x, y, size, size);
    }
    if (index !== undefined) this.#label(x, y, size, index, colours.card);
    else if (kind === "shared") this.#label(x, y, size, memory.users[block], colours.card);
  }

  /** A smaller square, paler the sooner it goes. */
  #drawCached(x, y, size, age, faded) {
    const { context, colours } = this;
    const inset = size >= 8 ? Math.max(2, Math.round(size * 0.2)) : 0;
    context.globalAlpha = faded * (1 - (0.72 * age) / (AGES - 1));
    context.fillStyle = colours.cached;
    context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
  }

  #label(x, y, size, value, colour) {
    const text = String(value);
    if (size < 12 || text.length * 6.2 > size + 2) {
      return;
    }
    const { context } = this;
    context.fillStyle = colour;
    context.font = `600 ${Math.min(12, size - 4)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + size / 2, y + size / 2 + 0.5);
  }
}
