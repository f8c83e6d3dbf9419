// The curves of the last five minutes, and the same numbers as a table.

import { Chart, SPAN_S } from "./chart.js";
import { byId, element } from "./dom.js";
import { duration, rate, share } from "./format.js";

/** @typedef {import("./types.js").Point} Point */

const LINES = [{ name: "median", column: 1 }, { name: "99 %", column: 2 }];

const KINDS = [
  { name: "Time to first token", unit: duration, lines: LINES },
  { name: "Time per output token", unit: duration, lines: LINES.map(({ name, column }) => ({ name, column: column + 2 })) },
  {
    name: "Tokens per second",
    unit: (/** @type {number | null} */ value) => (value === null ? "–" : rate(value)),
    lines: [{ name: "generated", column: 6 }, { name: "prompts computed", column: 5 }],
  },
  { name: "Prompt tokens found cached", unit: share, lines: [{ name: "hits", column: 8 }], most: 1 },
];
const TABLE_STEP_S = 15;

export class Curves {
  /** @type {Point[]} */
  #points = [];

  constructor() {
    this.charts = KINDS.map((kind) => new Chart(kind));
    byId("charts").replaceChildren(...this.charts.map((chart) => chart.node));
    this.figures = byId("figures");
    this.figures.parentElement?.addEventListener("toggle", () => this.#fillTable());
  }

  /** @returns {Point | undefined} */
  get last() {
    return this.#points.at(-1);
  }

  /** @param {Point[]} points those that are new; several gateways may give them out of order */
  add(points) {
    const known = new Map([...this.#points, ...points].map((point) => [point[0], point]));
    const all = [...known.values()].sort((one, other) => (one[0] ?? 0) - (other[0] ?? 0));
    const begin = (all.at(-1)?.[0] ?? 0) - SPAN_S;
    this.#points = all.filter((point) => (point[0] ?? 0) >= begin);
    for (const chart of this.charts) chart.update(this.#points);
  }

  /** As it is when it is opened: a table that changes cannot be read. */
  #fillTable() {
    const heads = ["ago", "first token", "99 %", "per token", "99 %", "prompts/s", "generated/s", "requests/s", "hits"];
    const formats = [duration, duration, duration, duration, orNothing, orNothing, orNothing, share];
    const rows = thinned(this.#points).map((point) => {
      const cells = formats.map((format, index) => element("td", {}, format(point[index + 1])));
      const ago = `${((this.last?.[0] ?? 0) - (point[0] ?? 0)).toFixed(0)} s`;
      return element("tr", {}, element("td", {}, ago), ...cells);
    });
    const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
    this.figures.replaceChildren(
      rows.length
        ? element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows))
        : element("p", { class: "aside" }, "Nothing measured yet."),
    );
  }
}

/** @param {number | null} value */
function orNothing(value) {
  return value === null ? "–" : rate(value);
}

/**
 * The newest first, one for each step of time.
 * @param {Point[]} points
 */
function thinned(points) {
  /** @type {Point[]} */
  const kept = [];
  for (const point of [...points].reverse()) {
    const before = kept.at(-1)?.[0] ?? Infinity;
    if (before - (point[0] ?? 0) >= TABLE_STEP_S || !kept.length) kept.push(point);
  }
  return kept;
}
