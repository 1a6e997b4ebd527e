// Where each cell of a map is. Both maps of the page have the same one, so that they compare.

const LARGEST = 26, SMALL = 3, SMALLEST = 2;

export class Geometry {
  /** Cells as large as `count` of them can be in `width` pixels and about `height`. */
  constructor(count, width, height) {
    const heightOf = (cell) => Math.ceil(count / this.#columns(width, cell)) * cell;
    let cell = LARGEST;
    while (cell > SMALL && heightOf(cell) > height) cell -= 1;
    // Smaller ones are hard to tell apart, but a map of several screens is no map.
    while (cell > SMALLEST && heightOf(cell) > 2 * height) cell -= 1;
    this.count = count;
    this.cell = cell;
    this.columns = Math.min(this.#columns(width, cell), count);
    this.rows = Math.ceil(count / this.columns);
    this.gap = cell >= 10 ? 2 : cell >= 4 ? 1 : 0;
    this.width = this.columns * cell;
    this.height = this.rows * cell;
  }

  #columns(width, cell) {
    const fit = Math.max(1, Math.floor(width / cell));
    return fit - (fit % (fit >= 32 ? 8 : fit >= 16 ? 4 : 1));
  }

  x(index) {
    return (index % this.columns) * this.cell;
  }

  y(index) {
    return Math.floor(index / this.columns) * this.cell;
  }

  /** The cell at a place of the map; undefined where there is none. */
  at(x, y) {
    const column = Math.floor(x / this.cell), row = Math.floor(y / this.cell);
    const index = row * this.columns + column;
    return column >= 0 && column < this.columns && row >= 0 && index < this.count ? index : undefined;
  }

  /** Give a canvas this size, sharp on any screen; returns its context. */
  fit(canvas, margin = 0) {
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.round((this.width + 2 * margin) * ratio);
    canvas.height = Math.round((this.height + 2 * margin) * ratio);
    canvas.style.width = `${this.width + 2 * margin}px`;
    canvas.style.height = `${this.height + 2 * margin}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, margin * ratio, margin * ratio);
    return context;
  }
}
