// The colours of the page, read from its style sheets, so that light and dark are told once.

const NAMES = [
  "page", "card", "ink", "muted", "line", "grid", "accent", "token_states", "reserved",
  "never_used", "unusable", "cached", "free", "shared", "sequence-light",
];
const GOLDEN = 0.6180339887498949; // its multiples are spread evenly over 0 to 1
const FIRST_HUE = 205, HUES = 120; // blue to purple: green, pink and orange mean something else

export const dark = matchMedia("(prefers-color-scheme: dark)");

export class Colours {
  constructor() {
    this.read();
  }

  /** Read them anew, after a change of scheme. */
  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of NAMES) this[name] = style.getPropertyValue(`--${name}`).trim();
    this.ofSequences = new Map();
  }

  /** The colour of a sequence: neighbours in time differ, in hue and in lightness. */
  sequence(name) {
    let colour = this.ofSequences.get(name);
    if (colour === undefined) {
      const hue = FIRST_HUE + HUES * ((name * GOLDEN) % 1);
      const lightness = Number(this["sequence-light"]) + 0.13 * ((name % 3) - 1);
      colour = `oklch(${lightness.toFixed(2)} 0.13 ${hue.toFixed(0)})`;
      this.ofSequences.set(name, colour);
      if (this.ofSequences.size > 10_000) this.ofSequences.clear();
    }
    return colour;
  }
}

export const FLASHES = {
  hit: { colour: "cached", label: "prefix found in the cache" },
  fork: { colour: "shared", label: "fork" },
  copy: { colour: "ink", label: "copy on write" },
  preemption: { colour: "unusable", label: "gave way" },
  eviction: { colour: "never_used", label: "evicted" },
};
