// One chart: up to two lines over the last minutes, from nothing up, with gaps where nothing was measured.

import { drawing, element, say } from "./dom.js";

/** @typedef {{name: string, unit: (value: number | null) => string, lines: {name: string, column: number}[],
 *   most?: number}} ChartKind `most`: where the axis ends, if that is known */

const HEIGHT = 120;
const LEFT = 44;
const BOTTOM = 16;
const TOP = 6;
const LONGEST_GAP_S = 20;

export const SPAN_S = 300;

export class Chart {
  /** @type {import("./types.js").Point[]} */
  #points = [];
  /** @type {number | null} where a person points, as a share of the width */
  #pointed = null;

  /** @param {ChartKind} kind */
  constructor(kind) {
    this.kind = kind;
    this.svg = drawing("svg", { role: "img" });
    this.values = kind.lines.map(() => element("b"));
    this.moment = element("span");
    const now = kind.lines.flatMap(({ name }, index) => [
      element("span", { class: index ? "key-line second" : "key-line" }),
      `${name} `,
      this.values[index],
      index < kind.lines.length - 1 ? "   " : "",
    ]);
    this.node = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("span", { class: "name" }, kind.name), element("span", { class: "now" }, ...now, this.moment)),
      this.svg,
    );
    this.node.style.margin = "0";
    this.svg.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.#point(null));
    new ResizeObserver(() => this.#draw()).observe(this.svg);
  }

  /** @param {import("./types.js").Point[]} points */
  update(points) {
    this.#points = points;
    this.#draw();
  }

  /** @param {number | null} x */
  #point(x) {
    this.#pointed = x === null ? null : (x - LEFT) / (this.svg.clientWidth - LEFT);
    this.#draw();
  }

  #draw() {
    const width = this.svg.clientWidth;
    if (!width) return;
    const end = this.#points.at(-1)?.[0] ?? 0;
    const top = this.#top();
    const x = (/** @type {number} */ at) => LEFT + ((width - LEFT) * (at - (end - SPAN_S))) / SPAN_S;
    const y = (/** @type {number} */ value) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - Math.min(1, value / top));
    const parts = [...this.#grid(width, top, y)];
    this.kind.lines.forEach(({ column }, index) => {
      const path = linePath(this.#points, column, x, y);
      if (path) parts.push(drawing("path", { class: index ? "line second" : "line", d: path }));
    });
    parts.push(...this.#cursor(x, y, end));
    this.svg.replaceChildren(...parts);
    this.svg.setAttribute("aria-label", this.#inWords());
  }

  /** The axis ends at a round number above all values. */
  #top() {
    if (this.kind.most) return this.kind.most;
    const values = this.#points.flatMap((point) => this.kind.lines.map(({ column }) => point[column] ?? 0));
    const most = Math.max(...values, 0);
    if (most <= 0) return 1;
    const power = 10 ** Math.floor(Math.log10(most));
    return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((digit) => digit * power).find((round) => round >= most) ?? most;
  }

  /**
   * @param {number} width
   * @param {number} top
   * @param {(value: number) => number} y
   */
  *#grid(width, top, y) {
    const isEmpty = !this.#points.some((point) => this.kind.lines.some(({ column }) => point[column] !== null));
    for (const value of [0, top / 2, top]) {
      yield drawing("line", { class: "grid", x1: LEFT, x2: width, y1: y(value), y2: y(value) });
      if (isEmpty && !this.kind.most) continue;
      const label = value === 0 ? "0" : this.kind.unit(value);
      yield drawing("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, label);
    }
    yield drawing("text", { x: LEFT, y: HEIGHT }, "5 min ago");
    yield drawing("text", { x: width, y: HEIGHT, "text-anchor": "end" }, "now");
    if (isEmpty) {
      yield drawing("text", { x: (LEFT + width) / 2, y: HEIGHT / 2 - 8, "text-anchor": "middle" }, "nothing measured yet");
    }
  }

  /**
   * The values where a person points, else the last ones.
   * @param {(at: number) => number} x
   * @param {(value: number) => number} y
   * @param {number} end
   */
  *#cursor(x, y, end) {
    const wanted = this.#pointed === null ? end : end - SPAN_S * (1 - this.#pointed);
    const point = nearest(this.#points, wanted);
    this.kind.lines.forEach(({ column }, index) => say(this.values[index], this.kind.unit(point?.[column] ?? null)));
    say(this.moment, this.#pointed === null || !point ? "" : `  ${(end - (point[0] ?? 0)).toFixed(0)} s ago`);
    if (!point || point[0] === null) return;
    if (this.#pointed !== null) yield drawing("line", { class: "cursor", x1: x(point[0]), x2: x(point[0]), y1: TOP, y2: HEIGHT - BOTTOM });
    for (const [index, { column }] of this.kind.lines.entries()) {
      const value = point[column];
      if (value !== null) yield drawing("circle", { class: index ? "dot second" : "dot", cx: x(point[0]), cy: y(value), r: 3 });
    }
  }

  #inWords() {
    const last = this.#points.at(-1);
    const said = this.kind.lines.map(({ name, column }) => {
      const values = this.#points.map((point) => point[column]).filter((value) => value !== null);
      if (!values.length) return `${name}: nothing measured`;
      const [least, most] = [Math.min(...values), Math.max(...values)].map(this.kind.unit);
      return `${name}: now ${this.kind.unit(last?.[column] ?? null)}, from ${least} to ${most} in five minutes`;
    });
    return `${this.kind.name}. ${said.join(". ")}.`;
  }
}

/**
 * @param {import("./types.js").Point[]} points
 * @param {number} column
 * @param {(at: number) => number} x
 * @param {(value: number) => number} y
 */
function linePath(points, column, x, y) {
  let path = "";
  let lastAt = -Infinity;
  for (const point of points) {
    const [at, value] = [point[0] ?? 0, point[column]];
    if (value === null) continue;
    path += `${at - lastAt > LONGEST_GAP_S ? "M" : "L"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
    lastAt = at;
  }
  return path;
}

/**
 * @param {import("./types.js").Point[]} points
 * @param {number} at
 */
function nearest(points, at) {
  let best;
  for (const point of points) {
    if (!best || Math.abs((point[0] ?? 0) - at) < Math.abs((best[0] ?? 0) - at)) best = point;
  }
  return best;
}
