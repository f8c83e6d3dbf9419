// A block pool drawn as pages, in the order of their ids. What changes is turned over, not swapped.

import { calm } from "./dom.js";
import { readPages, stateName } from "./pages.js";

const MOST_HEIGHT = 290;
const MARGIN = 3;
const TURN_MS = 450;
const WIDTHS = [15, 13, 11, 10, 9, 8, 7, 6, 5, 4, 3];

/** @typedef {{columns: number, width: number, height: number, gap: number}} Grid */

/**
 * The largest pages with which all of them are not too high.
 * @param {number} numPages
 * @param {number} available
 * @returns {Grid}
 */
export function gridFor(numPages, available) {
  let grid = { columns: 1, width: 3, height: 4, gap: 1 };
  for (const width of WIDTHS) {
    const gap = width >= 10 ? 4 : width >= 7 ? 3 : width >= 5 ? 2 : 1;
    const height = Math.round(width * 1.35);
    const columns = Math.max(1, Math.floor((available + gap) / (width + gap)));
    grid = { columns, width, height, gap };
    if (Math.ceil(numPages / columns) * (height + gap) <= MOST_HEIGHT) break;
  }
  return grid;
}

export class PoolCanvas {
  /** @type {string[]} */
  #pages = [];
  /** @type {string[]} */
  #before = [];
  #turnedAt = 0;
  /** @type {Set<number> | null} */
  #marked = null;
  #grid = gridFor(1, 1);
  #frame = 0;
  /** @type {Record<string, string>} */
  #colours = {};

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    new ResizeObserver(() => this.#lay()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#lay());
  }

  /** @param {string} runs */
  show(runs) {
    const pages = readPages(runs);
    const isNew = pages.length !== this.#pages.length;
    this.#before = isNew || calm.matches ? pages : this.#pages;
    this.#pages = pages;
    this.#turnedAt = performance.now();
    if (isNew) this.#lay();
    else this.#draw();
  }

  /**
   * Draw these pages out of the others; null: none.
   * @param {Set<number> | null} pages
   */
  mark(pages) {
    this.#marked = pages;
    this.#draw();
  }

  /**
   * The page under a point of the canvas.
   * @param {number} x
   * @param {number} y
   */
  pageAt(x, y) {
    const { columns, width, height, gap } = this.#grid;
    const column = Math.floor((x - MARGIN) / (width + gap));
    const page = Math.floor((y - MARGIN) / (height + gap)) * columns + column;
    return column >= 0 && column < columns && page >= 0 && page < this.#pages.length ? page : null;
  }

  /**
   * The name of a page's state.
   * @param {number} page
   */
  stateOf(page) {
    return stateName(this.#pages[page]);
  }

  #lay() {
    const width = this.canvas.clientWidth;
    if (!width || !this.#pages.length) return;
    this.#grid = gridFor(this.#pages.length, width - 2 * MARGIN);
    const height = Math.ceil(this.#pages.length / this.#grid.columns) * (this.#grid.height + this.#grid.gap) + MARGIN;
    const scale = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const style = getComputedStyle(this.canvas);
    const names = ["sheet", "free", "cached", "cached-edge", "written", "shared", "fenced", "ink"];
    this.#colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.#draw();
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    const context = this.canvas.getContext("2d");
    if (!context || !this.#pages.length || !this.#colours.sheet) return;
    const scale = devicePixelRatio || 1;
    const turned = Math.min(1, (performance.now() - this.#turnedAt) / TURN_MS);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    let isTurning = false;
    for (let page = 0; page < this.#pages.length; page++) {
      const isTurned = this.#before[page] === this.#pages[page];
      isTurning ||= !isTurned;
      const letter = isTurned || turned >= 0.5 ? this.#pages[page] : this.#before[page];
      this.#drawPage(context, page, letter, isTurned ? 1 : Math.abs(1 - 2 * turned));
    }
    context.globalAlpha = 1;
    if (isTurning && turned < 1) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {number} page
   * @param {string} letter
   * @param {number} open how far it is open, 0 to 1, as it is turned
   */
  #drawPage(context, page, letter, open) {
    const { columns, width, height, gap } = this.#grid;
    const drawn = Math.max(1, width * open);
    const x = (page % columns) * (width + gap) + (width - drawn) / 2 + MARGIN;
    const y = Math.floor(page / columns) * (height + gap) + MARGIN;
    const isMarked = this.#marked?.has(page) ?? false;
    context.globalAlpha = this.#marked === null || isMarked ? 1 : 0.25;
    this.#fill(context, letter, x, y, drawn, height, width >= 6);
    if (isMarked) {
      context.strokeStyle = this.#colours.ink;
      context.lineWidth = 1.5;
      context.strokeRect(x - 0.75, y - 0.75, drawn + 1.5, height + 1.5);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {string} letter
   * @param {number} x
   * @param {number} y
   * @param {number} width
   * @param {number} height
   * @param {boolean} isLarge enough for edges
   */
  #fill(context, letter, x, y, width, height, isLarge) {
    const name = stateName(letter);
    const edge = name === "cached" ? this.#colours["cached-edge"] : this.#colours[name];
    context.lineWidth = 1;
    context.setLineDash(name === "fenced" ? [1.5, 1.5] : []);
    context.strokeStyle = edge;
    context.fillStyle = name === "free" || name === "fenced" ? this.#colours.sheet : this.#colours[name];
    if (name === "shared" && isLarge) {
      context.strokeRect(x + 2, y - 2, width - 0.5, height - 0.5); // a second sheet behind the first
      context.clearRect(x - 0.5, y - 0.5, width + 1, height + 1);
    }
    context.fillRect(x, y, width, height);
    if (isLarge && width > 2) context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
    else if (name === "free" || name === "fenced") {
      context.globalAlpha /= 2;
      context.fillStyle = edge;
      context.fillRect(x, y, width, height);
    }
    context.setLineDash([]);
  }
}
