// What is drawn over the blocks: flashes, the way through the selected sequence, the ring around
// the block that one points at.

import { FLASHES } from "./colours.js";

const FLASH_MS = 1100;
const MOST_FLASHES = 3000;
const LONGEST_WAY = 96;
export const MARGIN = 8; // flashes reach over the edge

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Overlay {
  constructor(canvas, map, memory, colours) {
    this.canvas = canvas;
    this.map = map;
    this.memory = memory;
    this.colours = colours;
    this.flashes = [];
    this.pointed = undefined; // a block
  }

  layOut() {
    this.context = this.map.geometry.fit(this.canvas, MARGIN);
  }

  /** Happenings flash from now on. */
  flash(happenings, nowMs) {
    for (const { kind, blocks } of happenings) {
      for (const block of blocks) this.flashes.push({ kind, block, endMs: nowMs + FLASH_MS });
    }
    this.flashes.splice(0, this.flashes.length - MOST_FLASHES);
  }

  get isMoving() {
    return this.flashes.length > 0;
  }

  draw(nowMs) {
    const { context } = this;
    if (!context) return;
    const { width, height } = this.map.geometry;
    context.clearRect(-MARGIN, -MARGIN, width + 2 * MARGIN, height + 2 * MARGIN);
    this.#drawWay();
    this.flashes = this.flashes.filter(({ endMs }) => endMs > nowMs);
    const { cell } = this.map.geometry;
    const farthest = Math.min(MARGIN - 2, Math.max(2, cell / 4));
    const thickness = cell < 8 ? 1.5 : 2;
    for (const { kind, block, endMs } of this.flashes) {
      const left = (endMs - nowMs) / FLASH_MS;
      this.#ring(block, this.colours[FLASHES[kind].colour], still.matches ? 1 : left,
        still.matches ? 1 : farthest * (1 - left), thickness);
    }
    if (this.pointed !== undefined) this.#ring(this.pointed, this.colours.ink, 1, 1, 2);
    context.globalAlpha = 1;
  }

  #ring(block, colour, alpha, distance, thickness) {
    const { context } = this;
    const { geometry } = this.map;
    const size = geometry.cell - geometry.gap;
    context.globalAlpha = alpha;
    context.strokeStyle = colour;
    context.lineWidth = thickness;
    context.strokeRect(geometry.x(block) - distance, geometry.y(block) - distance,
      size + 2 * distance, size + 2 * distance);
  }

  /** A line from each block of the selected sequence to its next. */
  #drawWay() {
    const sequence = this.map.selected === undefined ? undefined : this.memory.byName(this.map.selected);
    const table = sequence ? this.memory.tableOf(sequence) : [];
    if (table.length < 2 || table.length > LONGEST_WAY) return;
    const { context } = this;
    const { geometry } = this.map;
    const middle = (geometry.cell - geometry.gap) / 2;
    context.globalAlpha = 0.55;
    context.strokeStyle = this.colours.ink;
    context.lineWidth = 1.25;
    context.lineJoin = "round";
    context.beginPath();
    for (const block of table) context.lineTo(geometry.x(block) + middle, geometry.y(block) + middle);
    context.stroke();
  }
}
