// The memory as the server tells it: blocks, block tables, sequences. Nothing is drawn here.

const PUBLISHED = 2;
export const STATES = ["expected", "waiting", "running", "finished"];
const ADMISSION = 0, FORK = 1, COPY = 2, PREEMPTION = 3;

const BLOCK_FIELDS = 6, TABLE_FIELDS = 3, SEQUENCE_FIELDS = 9, HAPPENING_FIELDS = 4, REGION_FIELDS = 3;
const NOBODY = -1;

export class Memory {
  constructor() {
    this.isKnown = false;
  }

  /** Take in one message; returns what changed: {isWhole, blocks, happenings}. */
  apply(message) {
    const isWhole = message.kind === "whole";
    if (isWhole) this.#begin(message.memory);
    this.nowMs = message.now_s * 1000;
    this.counters = message.counters;
    this.changed = new Set();
    const { blocks, tables, sequences, happenings } = message.arrays;
    const gaveWay = this.#gaveWay(happenings);
    const evicted = this.#takeBlocks(blocks, isWhole);
    this.#takeSequences(sequences);
    this.#takeTables(tables);
    this.#noteTails();
    for (const [name, twin] of Object.entries(message.twins)) {
      this.twins[name] = {
        regions: message.arrays[`regions_${name}`] ?? this.twins[name]?.regions ?? new Int32Array(0),
        waiting: twin.waiting,
        isBlocked: twin.is_blocked,
      };
    }
    return {
      isWhole,
      blocks: this.changed,
      happenings: this.#told(happenings, gaveWay, evicted),
    };
  }

  #begin(facts) {
    this.isKnown = true;
    this.numBlocks = facts.num_blocks;
    this.blockSize = facts.block_size;
    this.facts = facts;
    this.users = new Uint32Array(this.numBlocks);
    this.keyState = new Uint8Array(this.numBlocks);
    this.key = new Uint32Array(this.numBlocks);
    this.order = new Uint32Array(this.numBlocks);
    this.sinceMs = new Uint32Array(this.numBlocks);
    // Of those who use a block, the one that it is drawn for, and the logical index in its table.
    this.ownerRow = new Int32Array(this.numBlocks).fill(NOBODY);
    this.ownerIndex = new Int32Array(this.numBlocks);
    this.tables = new Map();
    this.sequences = new Map();
    this.columnOfRow = new Map();
    this.twins = {};
    this.tails = new Set();
  }

  #takeBlocks(rows, isWhole) {
    const evicted = [];
    for (let i = 0; i < rows.length; i += BLOCK_FIELDS) {
      const block = rows[i];
      const wasCached = this.isCached(block);
      const key = rows[i + 3];
      if (!isWhole && wasCached && key !== this.key[block] && (rows[i + 1] > 0 || key !== 0)) {
        evicted.push(block);
      }
      this.users[block] = rows[i + 1];
      this.keyState[block] = rows[i + 2];
      this.key[block] = key;
      this.order[block] = rows[i + 4];
      this.sinceMs[block] = rows[i + 5];
      this.changed.add(block);
    }
    return evicted;
  }

  #takeSequences(rows) {
    for (let i = 0; i < rows.length; i += SEQUENCE_FIELDS) {
      const column = rows[i];
      const before = this.sequences.get(column);
      if (before && this.columnOfRow.get(before.row) === column) this.columnOfRow.delete(before.row);
      if (rows[i + 1] === 0) {
        this.sequences.delete(column);
        continue;
      }
      this.sequences.set(column, {
        column,
        name: rows[i + 1],
        state: STATES[rows[i + 2]],
        row: rows[i + 3],
        promptTokens: rows[i + 4],
        numTokens: rows[i + 5],
        numComputed: rows[i + 6],
        totalTokens: rows[i + 7],
        numAdmissions: rows[i + 8],
      });
    }
    for (const sequence of this.sequences.values()) {
      if (sequence.row >= 0) this.columnOfRow.set(sequence.row, sequence.column);
    }
  }

  #takeTables(rows) {
    const lost = new Set();
    for (let i = 0; i < rows.length; i += TABLE_FIELDS) {
      const row = rows[i], index = rows[i + 1], block = rows[i + 2];
      let table = this.tables.get(row);
      if (!table) this.tables.set(row, table = []);
      const before = table[index] ?? NOBODY;
      if (before !== NOBODY && this.ownerRow[before] === row) {
        this.ownerRow[before] = NOBODY;
        lost.add(before);
      }
      table[index] = block;
      if (block !== NOBODY) this.#own(row, index, block);
    }
    for (const table of this.tables.values()) {
      while (table.length && table.at(-1) === NOBODY) table.pop();
    }
    this.#findOwners(lost);
  }

  #own(row, index, block) {
    if (this.ownerRow[block] === NOBODY) {
      this.ownerRow[block] = row;
      this.ownerIndex[block] = index;
      this.changed.add(block);
    }
  }

  /** Blocks that were drawn for a sequence that left them are drawn for another of their users. */
  #findOwners(lost) {
    for (const block of lost) {
      this.changed.add(block);
      if (this.users[block] === 0 || this.ownerRow[block] !== NOBODY) lost.delete(block);
    }
    if (lost.size === 0) return;
    for (const [row, table] of this.tables) {
      for (let index = 0; index < table.length; index += 1) {
        if (lost.has(table[index])) this.#own(row, index, table[index]);
      }
    }
  }

  /** The last block of each sequence is drawn as full as it is. */
  #noteTails() {
    for (const block of this.tails) this.changed.add(block);
    this.tails = new Set();
    for (const sequence of this.sequences.values()) {
      const block = this.tableOf(sequence).at(-1);
      if (block !== undefined) {
        this.tails.add(block);
        this.changed.add(block);
      }
    }
  }

  #gaveWay(rows) {
    const blocks = new Map();
    if (!this.isKnown) return blocks;
    for (let i = 0; i < rows.length; i += HAPPENING_FIELDS) {
      const sequence = this.sequences.get(rows[i + 1]);
      if (rows[i] === PREEMPTION && sequence?.name === rows[i + 2]) {
        blocks.set(sequence.name, [...this.tableOf(sequence)]);
      }
    }
    return blocks;
  }

  #told(rows, gaveWay, evicted) {
    const told = [];
    for (let i = 0; i < rows.length; i += HAPPENING_FIELDS) {
      const [kind, column, name, what] = rows.subarray(i, i + HAPPENING_FIELDS);
      const sequence = this.sequences.get(column);
      const table = sequence?.name === name ? this.tableOf(sequence) : [];
      if (kind === ADMISSION && what > 0) {
        told.push({ kind: "hit", name, tokens: what, blocks: table.slice(0, what / this.blockSize) });
      } else if (kind === FORK) {
        told.push({ kind: "fork", name, blocks: table.filter((block) => this.users[block] > 1) });
      } else if (kind === COPY) {
        told.push({ kind: "copy", from: column, to: name, blocks: [column, name] });
      } else if (kind === PREEMPTION) {
        told.push({ kind: "preemption", name, blocks: gaveWay.get(name) ?? [] });
      }
    }
    if (evicted.length) told.push({ kind: "eviction", blocks: evicted });
    return told;
  }

  isCached(block) {
    return this.users[block] === 0 && this.keyState[block] === PUBLISHED;
  }

  kindOf(block) {
    if (this.users[block] > 1) return "shared";
    if (this.users[block] === 1) return "used";
    return this.isCached(block) ? "cached" : "free";
  }

  keyStateOf(block) {
    return ["none", "pending", "published"][this.keyState[block]];
  }

  tableOf(sequence) {
    return (sequence.row >= 0 && this.tables.get(sequence.row)) || [];
  }

  /** The sequence that a block is drawn for. */
  ownerOf(block) {
    const row = this.ownerRow[block];
    return row === NOBODY ? undefined : this.sequences.get(this.columnOfRow.get(row));
  }

  /** All who use a block: [{sequence, index}], index being the logical one in its table. */
  ownersOf(block) {
    const owners = [];
    if (this.users[block] === 0) return owners;
    for (const sequence of this.sequences.values()) {
      const index = this.tableOf(sequence).indexOf(block);
      if (index >= 0) owners.push({ sequence, index });
    }
    return owners.sort((a, b) => a.sequence.name - b.sequence.name);
  }

  /** Tokens in a used block, by the sequence that it is drawn for. */
  tokensIn(block) {
    const owner = this.ownerOf(block);
    if (!owner) return 0;
    const tokens = owner.numComputed - this.ownerIndex[block] * this.blockSize;
    return Math.max(0, Math.min(tokens, this.blockSize));
  }

  /** How many cached blocks are evicted before this one. */
  evictedBefore(block) {
    let count = 0;
    for (let other = 0; other < this.numBlocks; other += 1) {
      if (this.isCached(other) && this.order[other] < this.order[block]) count += 1;
    }
    return count;
  }

  /** Seconds since a block came to be as it is; undefined where nobody was looking then. */
  ageOf(block) {
    const since = this.sinceMs[block];
    return since ? Math.max(0, this.nowMs - since) / 1000 : undefined;
  }

  byName(name) {
    for (const sequence of this.sequences.values()) if (sequence.name === name) return sequence;
    return undefined;
  }

  /** Regions of a twin: [{start, size, sequence}], by address. */
  regionsOf(twinName) {
    const rows = this.twins[twinName].regions;
    const found = [];
    for (let i = 0; i < rows.length; i += REGION_FIELDS) {
      found.push({ start: rows[i], size: rows[i + 1], sequence: this.sequences.get(rows[i + 2]) });
    }
    return found;
  }

  /** Where a token lies, spelled out; undefined where the sequence has no such token. */
  translate(sequence, token) {
    const table = this.tableOf(sequence);
    const index = Math.floor(token / this.blockSize);
    if (!Number.isInteger(token) || token < 0 || token >= sequence.numComputed) return undefined;
    if (index >= table.length) return undefined;
    const offset = token % this.blockSize;
    return { index, offset, block: table[index], slot: table[index] * this.blockSize + offset };
  }
}
