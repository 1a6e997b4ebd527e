// How numbers and facts are said.

const whole = new Intl.NumberFormat("en");

export const number = (value) => whole.format(Math.round(value));

export const percent = (share) => {
  const value = share * 100;
  const isNearAnEnd = (value > 0 && value < 9.95) || (value > 99 && value < 99.95);
  return `${isNearAnEnd ? value.toFixed(1) : Math.round(value)} %`;
};

export const count = (value, one, many = `${one}s`) => `${number(value)} ${value === 1 ? one : many}`;

export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

export function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || Number.isInteger(value) ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** The beginning of a key, as far as the server tells it. */
export const key = (value) => value.toString(16).padStart(8, "0");

export function keyOf(memory, block) {
  switch (memory.keyStateOf(block)) {
    case "published": return `${key(memory.key[block])}…`;
    case "pending": return `${key(memory.key[block])}…, when it is computed`;
    default: return "none";
  }
}

/** One line about a block, for a screen reader. */
export function blockInWords(memory, block) {
  const kind = memory.kindOf(block);
  if (kind === "free") return `Block ${block}, free`;
  if (kind === "cached") {
    const age = memory.ageOf(block);
    return `Block ${block}, cached${age === undefined ? "" : ` for ${duration(age)}`}, ` +
      `key ${keyOf(memory, block)}`;
  }
  const owners = memory.ownersOf(block);
  const named = owners.slice(0, 4).map(({ sequence, index }) => `sequence ${sequence.name} at ${index}`);
  const more = owners.length > 4 ? ` and ${owners.length - 4} more` : "";
  return `Block ${block}, ${kind === "shared" ? `shared by ${memory.users[block]}` : "used"}: ` +
    `${named.join(", ")}${more}`;
}

const KINDS = {
  hit: ({ name, tokens, blocks }) =>
    `Sequence ${name} found ${count(tokens, "token")} in the cache` +
    (blocks.length ? `: ${count(blocks.length, "block")} it need not compute` : ""),
  fork: ({ name, blocks }) =>
    `Sequence ${name} was forked` + (blocks.length ? ` and shares ${count(blocks.length, "block")}` : ""),
  copy: ({ from, to }) => `Block ${from} was shared and is copied to ${to}, to be written to`,
  preemption: ({ name, blocks }) =>
    `Sequence ${name} gave way` + (blocks.length ? ` and gave back ${count(blocks.length, "block")}` : ""),
  eviction: ({ blocks }) => `${count(blocks.length, "cached block was", "cached blocks were")} evicted`,
};

export const happeningInWords = (happening) => KINDS[happening.kind](happening);
