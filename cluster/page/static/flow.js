// Requests on their way: gateways, router, groups, and a sheet for each request that was just placed.

import { byId, calm, drawing, element, keyed, say } from "./dom.js";
import { decisionKey } from "./decisions.js";
import { count, counted, rate } from "./format.js";
import { cachedTokens } from "./reasons.js";

/** @typedef {import("./types.js").View} View */
/** @typedef {import("./types.js").Decision} Decision */
/** @typedef {import("./types.js").Group} Group */

const MOST_STATIONS = 8;
const MOST_SHEETS = 16;
const TRAVEL_MS = 1400;

/** @typedef {{node: HTMLElement, says: HTMLElement, more: HTMLElement}} Station */

/** @returns {Station} */
function station(name = "") {
  const says = element("span");
  const more = element("span");
  return { node: element("div", { class: "station" }, element("b", {}, name), says, more), says, more };
}

export class Flow {
  /** @type {Map<string, {node: HTMLElement, part: Station}>} */
  #stations = new Map();
  /** @type {Set<string>} */
  #seen = new Set();
  #isFirst = true;

  constructor() {
    this.node = byId("flow");
    this.lines = drawing("svg", { "aria-hidden": "true" });
    this.gateway = station("Gateway");
    this.router = station("Router");
    this.groups = element("div", { class: "stations" });
    this.node.replaceChildren(this.lines, this.gateway.node, this.router.node, this.groups);
    new ResizeObserver(() => this.#drawLines()).observe(this.node);
  }

  /** @param {View} view */
  update(view) {
    const sum = (/** @type {(model: import("./types.js").Model) => number} */ of) =>
      view.models.reduce((total, model) => total + of(model), 0);
    const decided = Object.values(view.decisions_per_s).reduce((total, each) => total + each, 0);
    say(this.gateway.says, `${count(sum((model) => model.num_in_flight))} under way`);
    say(this.gateway.more, `${rate(sum((model) => model.requests_per_s))}/s ended`);
    say(this.router.says, `${count(sum((model) => model.num_queued))} waiting`);
    say(this.router.more, `${rate(decided)}/s decided`);
    this.#updateGroups(view.groups);
    this.#send(view.decisions ?? []);
  }

  /** @param {Group[]} groups */
  #updateGroups(groups) {
    const before = [...this.#stations.keys()].join();
    const shown = groups.slice(0, MOST_STATIONS);
    const parts = keyed(this.groups, this.#stations, shown, (group) => group.group, (group) => {
      const part = station(group.group);
      return { node: part.node, part };
    });
    parts.forEach((part, index) => {
      const { running, waiting } = loadOf(shown[index]);
      say(part.says, running);
      say(part.more, waiting);
    });
    if (before !== [...this.#stations.keys()].join()) this.#drawLines();
  }

  #drawLines() {
    const from = this.#edges(this.gateway.node);
    const router = this.#edges(this.router.node);
    const paths = [line(from.right, from.middle, router.left, router.middle)];
    for (const { node } of this.#stations.values()) {
      const group = this.#edges(node);
      paths.push(line(router.right, router.middle, group.left, group.middle));
    }
    this.lines.replaceChildren(...paths.map((path) => drawing("path", { d: path })));
  }

  /** @param {HTMLElement} node */
  #edges(node) {
    const frame = this.node.getBoundingClientRect();
    const box = node.getBoundingClientRect();
    return { left: box.left - frame.left, right: box.right - frame.left, middle: (box.top + box.bottom) / 2 - frame.top };
  }

  /** @param {Decision[]} decisions the newest first */
  #send(decisions) {
    const placed = decisions.filter((decision) => decision.group !== null);
    const fresh = placed.filter((decision) => !this.#seen.has(decisionKey(decision)));
    this.#seen = new Set(placed.map(decisionKey));
    if (!this.#isFirst && !calm.matches && !document.hidden) {
      fresh.slice(0, MOST_SHEETS).reverse().forEach((decision, index, all) => {
        this.#sendSheet(decision, (index / all.length) * 900);
      });
    }
    this.#isFirst = false;
  }

  /**
   * @param {Decision} decision
   * @param {number} delay
   */
  #sendSheet(decision, delay) {
    const target = this.#stations.get(decision.group ?? "");
    if (!target) return;
    const part = element("i");
    part.style.height = `${(cachedTokens(decision) / Math.max(1, decision.num_prompt_tokens)) * 100}%`;
    const sheet = element("span", { class: "moving", "aria-hidden": "true" }, part);
    const from = this.#edges(this.gateway.node);
    const router = this.#edges(this.router.node);
    const group = this.#edges(target.node);
    this.node.append(sheet);
    const stops = [
      [from.right, from.middle, 0],
      [router.left, router.middle, 0.3],
      [router.right, router.middle, 0.45],
      [(router.right + group.left) / 2, (router.middle + group.middle) / 2, 0.72],
      [group.left, group.middle, 1],
    ];
    const frames = stops.map(([x, y, offset]) => ({ transform: `translate(${x}px, ${y}px)`, offset }));
    const travel = sheet.animate(frames, { duration: TRAVEL_MS, delay, easing: "ease-in-out", fill: "backwards" });
    travel.onfinish = travel.oncancel = () => sheet.remove();
  }
}

/** @param {Group} group */
function loadOf({ pool, numbers }) {
  if (pool === null && numbers === null) return { running: "does not answer", waiting: "" };
  const running = count(pool?.num_running ?? numbers?.num_running ?? 0);
  const waiting = `${count(pool?.num_waiting ?? numbers?.num_waiting ?? 0)} waiting`;
  return { running: pool ? `${running} of ${counted(pool.max_num_seqs, "slot")}` : `${running} running`, waiting };
}

/**
 * @param {number} x
 * @param {number} y
 * @param {number} toX
 * @param {number} toY
 */
function line(x, y, toX, toY) {
  return `M ${x} ${y} L ${toX} ${toY}`;
}
