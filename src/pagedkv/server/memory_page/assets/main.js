// Puts the page together: messages come in, what changed is drawn once a frame.

import { Announcer } from "./announcer.js";
import { BlockList } from "./blocklist.js";
import { BlockMap } from "./blockmap.js";
import { Charts } from "./charts.js";
import { Colours, FLASHES, dark } from "./colours.js";
import { legendEntry, say } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Log } from "./log.js";
import { Memory } from "./memory.js";
import { MARGIN, Overlay } from "./overlay.js";
import { Pointing } from "./pointing.js";
import { RegionMap } from "./regionmap.js";
import { SequenceList } from "./sequences.js";
import { KeyNeeded, messages } from "./stream.js";
import { Summary } from "./summary.js";

const find = (id) => document.getElementById(id);
const memory = new Memory();
const colours = new Colours();
const map = new BlockMap(find("blocks-canvas"), memory, colours);
const overlay = new Overlay(find("blocks-overlay"), map, memory, colours);
const regions = new RegionMap(find("regions-canvas"), memory, colours);
const summary = new Summary(memory);
const charts = new Charts(find("charts"), colours);
const log = new Log(find("log"));
const announcer = new Announcer(find("announcer"));
const inspector = new Inspector(memory, colours, { onSelect: select, onPin: (block) => pointing.pin(block) });
const sequences = new SequenceList(memory, colours, select);
const list = new BlockList(memory, select);
const pointing = new Pointing(find("blocks"), map, memory, {
  onPoint(block) {
    overlay.pointed = block;
    requestDrawing();
  },
  onSelect(block) {
    const owners = block === undefined ? [] : memory.ownersOf(block).map(({ sequence }) => sequence.name);
    // Of a shared block, its owners take turns.
    const next = owners[(owners.indexOf(map.selected) + 1) % owners.length];
    select(owners.length === 1 && owners[0] === map.selected ? undefined : next);
  },
});

function select(name) {
  map.selected = regions.selected = map.selected === name ? undefined : name;
  map.touch();
  regions.touch();
  if (memory.isKnown) sequences.show(performance.now(), map.selected, regions.twin, true);
  requestDrawing();
}

let isDrawingRequested = false;
function requestDrawing() {
  if (isDrawingRequested) return;
  isDrawingRequested = true;
  requestAnimationFrame((nowMs) => {
    isDrawingRequested = false;
    if (memory.isKnown) draw(nowMs);
  });
}

function draw(nowMs) {
  map.draw(nowMs);
  overlay.draw(nowMs);
  regions.draw();
  inspector.showBlock(overlay.pointed);
  inspector.showSequence(map.selected);
  sequences.show(nowMs, map.selected, regions.twin);
  list.show(nowMs);
  if (overlay.isMoving) requestDrawing();
}

function layOut() {
  if (!memory.isKnown) return;
  const { clientWidth } = find("blocks");
  map.layOut(clientWidth - 2 * MARGIN, Math.max(360, innerHeight * 0.5));
  overlay.layOut();
  regions.layOut(map.geometry);
  pointing.layOut();
  charts.draw();
  draw(performance.now()); // at once: a canvas of another size is empty
}

function take(message) {
  const { isWhole, blocks, happenings } = memory.apply(message);
  if (isWhole) {
    summary.begin();
    layOut();
  }
  map.touch(blocks);
  overlay.flash(happenings, performance.now());
  log.add(happenings);
  charts.take(message.arrays.samples, message.now_s, isWhole);
  summary.show(regions.twin);
  announcer.note(memory.counters, performance.now());
  requestDrawing();
}

function choose(attribute, take) {
  const buttons = [...document.querySelectorAll(`[data-${attribute}]`)];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", other === button);
      take(button.dataset[attribute]);
      map.touch();
      regions.touch();
      if (memory.isKnown) summary.show(regions.twin);
      requestDrawing();
    });
  }
}

choose("colour", (by) => {
  map.colourBy = regions.colourBy = by;
});
choose("twin", (name) => {
  regions.twin = name;
});

find("legend").append(
  legendEntry("token_states", "used, by one"), legendEntry("shared", "shared, by how many"),
  legendEntry("cached", "cached, paler the sooner it goes", "small"), legendEntry("free", "free"));
find("regions-legend").append(
  legendEntry("token_states", "holds a token"), legendEntry("never_used", "reserved, empty", "pale"),
  legendEntry("unusable", "free, but the next does not fit", "paler"), legendEntry("free", "free"));
find("flash-legend").append(
  ...Object.values(FLASHES).map(({ colour, label }) => legendEntry(colour, label, "ring")));

dark.addEventListener("change", () => {
  colours.read();
  sequences.recolour();
  inspector.shownBlock = inspector.shownSequence = "";
  map.touch();
  regions.touch();
  charts.draw();
  requestDrawing();
});
new ResizeObserver(layOut).observe(find("blocks"));

function state(text, isLive) {
  say(find("state"), text);
  find("state").classList.toggle("live", isLive);
}

/** A key that a person gives; it is kept in this variable alone. */
function askForKey(problem) {
  const form = find("key-form");
  form.hidden = false;
  say(find("key-problem"), problem);
  state("needs a key", false);
  find("key").focus();
  return new Promise((resolve) => {
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const key = find("key").value;
      find("key").value = "";
      form.hidden = true;
      resolve(key);
    }, { once: true });
  });
}

async function watch() {
  let key = "";
  let waitMs = 500;
  while (true) {
    try {
      state("connecting", false);
      for await (const message of messages(key)) {
        waitMs = 500;
        take(message);
        state("live", true);
        document.documentElement.dataset.memory = "live";
      }
      state("the server ended the stream", false);
    } catch (error) {
      document.documentElement.dataset.memory = "waiting";
      if (error instanceof KeyNeeded) {
        key = await askForKey(key ? "That is not the key." : "");
        continue;
      }
      console.info(error);
      state(error instanceof TypeError ? "no connection, trying again" : error.message, false);
    }
    await new Promise((resolve) => { setTimeout(resolve, waitMs); });
    waitMs = Math.min(waitMs * 2, 10_000);
  }
}

watch();
