// Lines over the last minutes, one sample a second.

import { element, say } from "./dom.js";
import { number, percent } from "./words.js";

const FIELDS = 6;
const SPAN_S = 300;
const LONGEST_S = 30;
const HEIGHT = 120;
const LEFT = 46, BOTTOM = 20, TOP = 8;

const CHARTS = [
  { title: "Tokens a second", lines: [{ field: 1, colour: "accent" }], text: number },
  { title: "Hit rate of prompts", lines: [{ field: 2, colour: "cached", isSparse: true }], text: percent, top: 1 },
  {
    title: "Blocks used, and cached",
    lines: [{ field: 3, colour: "token_states" }, { field: 4, colour: "cached", isDashed: true }],
    text: percent,
    top: 1,
  },
  { title: "Fill of used blocks", lines: [{ field: 5, colour: "shared" }], text: percent, top: 1 },
];

export class Charts {
  constructor(target, colours) {
    this.colours = colours;
    this.samples = [];
    this.views = CHARTS.map((chart) => {
      const value = element("b");
      const canvas = element("canvas", { role: "img" });
      target.append(element("figure", {},
        element("figcaption", {}, element("span", { text: chart.title }), value), canvas));
      return { chart, value, canvas };
    });
  }

  /** All samples that there are, or more of them; each begins with its age. */
  take(rows, nowS, isWhole) {
    if (isWhole) this.samples = [];
    else if (rows.length === 0) return;
    for (let i = 0; i < rows.length; i += FIELDS) {
      const [ageS, ...figures] = rows.subarray(i, i + FIELDS);
      this.samples.push([nowS - ageS, ...figures]);
    }
    const end = this.samples.at(-1)?.[0] ?? 0;
    this.samples = this.samples.filter((sample) => sample[0] >= end - SPAN_S);
    this.draw();
  }

  draw() {
    for (const view of this.views) this.#draw(view);
  }

  #draw({ chart, value, canvas }) {
    const ratio = devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth;
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = HEIGHT * ratio;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${HEIGHT}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, HEIGHT);
    const now = this.samples.at(-1)?.[0] ?? 0;
    const largest = Math.max(0, ...this.samples.flatMap((sample) => chart.lines.map(({ field }) => sample[field])));
    const top = chart.top ?? rounded(largest);
    const x = (s) => LEFT + ((s - now + SPAN_S) / SPAN_S) * (width - LEFT - 4);
    const y = (part) => TOP + (1 - part / top) * (HEIGHT - TOP - BOTTOM);
    this.#frame(context, width, top, y, chart.text);
    for (const line of chart.lines) this.#line(context, line, x, y);
    const said = chart.lines.map(({ field }) => this.samples.findLast((sample) => sample[field] >= 0)?.[field]);
    const text = said.map((last) => (last === undefined ? "–" : chart.text(last))).join(", ");
    say(value, text);
    canvas.setAttribute("aria-label", `${chart.title} over the last five minutes, now ${text}`);
  }

  #frame(context, width, top, y, text) {
    const { colours } = this;
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colours.muted;
    context.strokeStyle = colours.grid;
    context.lineWidth = 1;
    context.setLineDash([]);
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const part of [0, top / 2, top]) {
      context.beginPath();
      context.moveTo(LEFT, Math.round(y(part)) + 0.5);
      context.lineTo(width - 4, Math.round(y(part)) + 0.5);
      context.stroke();
      if (part !== top / 2) context.fillText(text(part), LEFT - 6, y(part));
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText("5 min ago", LEFT, HEIGHT - 3);
    context.textAlign = "right";
    context.fillText("now", width - 4, HEIGHT - 3);
  }

  /** Connect samples, but not over a time in which there was none. */
  #line(context, { field, colour, isDashed, isSparse }, x, y) {
    context.strokeStyle = context.fillStyle = this.colours[colour];
    context.lineWidth = 2;
    context.setLineDash(isDashed ? [5, 3] : []);
    context.beginPath();
    let before;
    for (const sample of this.samples) {
      if (sample[field] < 0) {
        if (!isSparse) before = undefined;
        continue;
      }
      if (before !== undefined && sample[0] - before < LONGEST_S) {
        context.lineTo(x(sample[0]), y(sample[field]));
      } else {
        context.moveTo(x(sample[0]), y(sample[field]));
        context.fillRect(x(sample[0]) - 1, y(sample[field]) - 1, 2, 2);
      }
      before = sample[0];
    }
    context.stroke();
  }
}

/** The next number upwards that is easy to read. */
function rounded(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 5, 10].map((step) => step * power).find((step) => step >= value);
}
