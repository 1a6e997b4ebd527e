// Tells a screen reader now and then what changed, and no more often than one can listen to.

import { headline } from "./summary.js";
import { count } from "./words.js";

const EVERY_MS = 15_000;

export class Announcer {
  constructor(target) {
    this.target = target;
    this.saidAt = -Infinity;
    this.preemptions = undefined;
  }

  note(counters, nowMs) {
    if (nowMs - this.saidAt < EVERY_MS) return;
    this.saidAt = nowMs;
    const gaveWay = counters.preemptions - (this.preemptions ?? counters.preemptions);
    this.preemptions = counters.preemptions;
    const text = headline(counters) + (gaveWay ? `. A sequence gave way ${count(gaveWay, "time")}` : "");
    if (this.target.textContent !== text) this.target.textContent = text;
  }
}
