// The same load in contiguous regions, cell by cell as the blocks are: a cell is as many slots as a
// block has, and shows what most of them hold.

const FREE = 0, TOKENS = 1, RESERVED = 2, UNUSABLE = 3;

export class RegionMap {
  constructor(canvas, memory, colours) {
    this.canvas = canvas;
    this.memory = memory;
    this.colours = colours;
    this.twin = "longest";
    this.colourBy = "sequence";
    this.selected = undefined; // the name of a sequence
    this.isAllStale = true;
  }

  layOut(geometry) {
    this.geometry = geometry;
    this.context = geometry.fit(this.canvas);
    this.kinds = new Uint8Array(this.memory.numBlocks);
    this.names = new Int32Array(this.memory.numBlocks);
    this.begins = new Uint8Array(this.memory.numBlocks);
    this.isAllStale = true;
  }

  touch() {
    this.isAllStale = true;
  }

  draw() {
    if (!this.geometry) return;
    const { kinds, names, begins } = this;
    const isFaded = this.#hasRegion(this.selected);
    if (isFaded !== this.isFaded) this.isAllStale = true;
    this.isFaded = isFaded;
    this.#fill();
    for (let cell = 0; cell < kinds.length; cell += 1) {
      if (this.isAllStale || kinds[cell] !== this.kinds[cell] || names[cell] !== this.names[cell] ||
          begins[cell] !== this.begins[cell]) {
        this.#drawCell(cell);
      }
    }
    this.isAllStale = false;
  }

  #hasRegion(name) {
    return name !== undefined &&
      this.memory.regionsOf(this.twin).some(({ sequence }) => sequence?.name === name);
  }

  #fill() {
    const { memory } = this;
    const twin = memory.twins[this.twin];
    this.kinds = new Uint8Array(memory.numBlocks).fill(twin.isBlocked ? UNUSABLE : FREE);
    this.names = new Int32Array(memory.numBlocks);
    this.begins = new Uint8Array(memory.numBlocks);
    const cellAt = (slot) => Math.min(Math.round(slot / memory.blockSize), memory.numBlocks);
    for (const { start, size, sequence } of memory.regionsOf(this.twin)) {
      const first = cellAt(start), end = cellAt(start + size);
      const tokens = cellAt(start + Math.min(sequence?.numComputed ?? 0, size));
      this.kinds.fill(RESERVED, first, end);
      this.kinds.fill(TOKENS, first, tokens);
      this.names.fill(sequence?.name ?? 0, first, end);
      if (first < end) this.begins[first] = 1;
    }
  }

  #drawCell(cell) {
    const { context, geometry, colours } = this;
    const size = geometry.cell - geometry.gap;
    const x = geometry.x(cell), y = geometry.y(cell);
    const name = this.names[cell], kind = this.kinds[cell];
    context.clearRect(x, y, geometry.cell, geometry.cell);
    context.globalAlpha = this.isFaded && name !== this.selected ? 0.22 : 1;
    context.fillStyle = colours.free;
    context.fillRect(x, y, size, size);
    if (kind === TOKENS) {
      context.fillStyle = this.colourBy === "sequence" ? colours.sequence(name) : colours.token_states;
      context.fillRect(x, y, size, size);
    } else if (kind !== FREE) {
      context.globalAlpha *= kind === RESERVED ? 0.62 : 0.4;
      context.fillStyle = kind === RESERVED ? colours.never_used : colours.unusable;
      context.fillRect(x, y, size, size);
    }
    if (this.begins[cell] && size >= 3) {
      context.globalAlpha = 1;
      context.fillStyle = colours.ink;
      context.fillRect(x, y, size >= 8 ? 2 : 1, size);
    }
    context.globalAlpha = 1;
  }
}
