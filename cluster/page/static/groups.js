// The worker groups, each with its block pool and what runs on it.

import { byId, element, keyed, say } from "./dom.js";
import { count, counted, share } from "./format.js";
import { STATES, pagesOf } from "./pages.js";
import { PoolCanvas } from "./pool_canvas.js";
import { Sequences } from "./sequences.js";

/** @typedef {import("./types.js").Group} Group */
/** @typedef {import("./types.js").PoolState} PoolState */

const SLOW_READERS_MS = 10_000;

export class Groups {
  /** @type {Map<string, {node: HTMLElement, part: GroupCard}>} */
  #cards = new Map();

  constructor() {
    this.node = byId("groups");
    this.empty = element("p", { class: "empty" }, "Asking the gateway …");
    byId("legend").replaceChildren(
      ...STATES.map(({ name, means }) =>
        element("li", {}, element("span", { class: `swatch ${name}` }), `${name}: ${means}`),
      ),
    );
    this.node.replaceChildren(this.empty);
  }

  /**
   * @param {Group[]} groups
   * @param {number} numNotDrawn
   * @param {boolean} hasModels there are several
   */
  update(groups, numNotDrawn, hasModels) {
    const drawn = groups.filter((group) => group.pool !== null || group.numbers !== null).slice(0, 16);
    const cards = keyed(this.node, this.#cards, drawn, (group) => group.group, (group) => {
      const card = new GroupCard(group.group);
      return { node: card.node, part: card };
    });
    cards.forEach((card, index) => card.update(drawn[index], hasModels));
    this.node.append(this.empty);
    this.empty.hidden = drawn.length > 0 && numNotDrawn <= 0;
    say(this.empty, drawn.length ? `${counted(numNotDrawn, "more group")}, not drawn.` : NO_GROUP);
  }
}

const NO_GROUP = "No worker group is up. Its pages show here as soon as one is.";

class GroupCard {
  /** @type {PoolState | null} */
  #pool = null;
  #describedAt = -Infinity;

  /** @param {string} name */
  constructor(name) {
    this.name = name;
    this.about = element("span", { class: "aside" });
    this.canvas = /** @type {HTMLCanvasElement} */ (element("canvas", { role: "img" }));
    this.hint = element("span");
    this.unit = element("span");
    this.counts = element("ul", { class: "counts" });
    this.node = element(
      "article",
      { class: "group", "aria-label": name },
      element("header", {}, element("h3", {}, name), this.about),
      this.canvas,
      element("p", { class: "readout aside", "aria-hidden": "true" }, this.unit, this.hint),
      this.counts,
    );
    this.drawing = new PoolCanvas(this.canvas);
    this.sequences = new Sequences(this.node, (sequence) => this.#mark(sequence?.table ?? null));
    this.numbers = STATES.map((state) => {
      const number = element("b");
      const item = element("li", {}, element("span", { class: `swatch ${state.name}` }), number, state.name);
      this.counts.append(item);
      return { letter: state.letter, number, item };
    });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => say(this.hint, ""));
  }

  /**
   * @param {Group} group
   * @param {boolean} hasModels
   */
  update({ numbers, pool }, hasModels) {
    const running = pool?.num_running ?? numbers?.num_running ?? 0;
    const waiting = pool?.num_waiting ?? numbers?.num_waiting ?? 0;
    const hits = numbers?.hit_rate == null ? "" : ` · ${share(numbers.hit_rate)} hits`;
    const model = hasModels && numbers ? `${numbers.model} · ` : "";
    say(this.about, `${model}${count(running)} running · ${count(waiting)} waiting${hits}`);
    if (pool === null) say(this.unit, "Its pool is not drawn: the group has not answered.");
    else this.#show(pool);
  }

  /** @param {PoolState} pool */
  #show(pool) {
    this.#pool = pool;
    this.drawing.show(pool.pages);
    const { num_blocks: blocks, blocks_per_page: each, block_size: size } = pool;
    const unit = each > 1 ? `a page is ${each} blocks of ${size} tokens` : `a page is ${size} tokens`;
    say(this.unit, `${counted(blocks, each > 1 ? "block" : "page")}, ${unit}`);
    for (const { letter, number, item } of this.numbers) {
      say(number, count(pool.num_blocks_by_state[letter]));
      item.hidden = letter === "x" && pool.num_blocks_by_state[letter] === 0;
    }
    this.sequences.update(pool.sequences, pool.num_running, size);
    this.#describe(pool);
  }

  /**
   * In words, now and then: a label that changes every second cannot be read.
   * @param {PoolState} pool
   */
  #describe(pool) {
    if (performance.now() - this.#describedAt < SLOW_READERS_MS) return;
    this.#describedAt = performance.now();
    const parts = STATES.map(({ letter, name }) => `${count(pool.num_blocks_by_state[letter])} ${name}`);
    this.canvas.setAttribute("aria-label", `Block pool of ${this.name}: ${parts.join(", ")}.`);
  }

  /** @param {[number, number][] | null} table */
  #mark(table) {
    this.drawing.mark(table === null ? null : pagesOf(table, this.#pool?.blocks_per_page ?? 1));
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const page = this.drawing.pageAt(event.offsetX, event.offsetY);
    if (page === null || this.#pool === null) return say(this.hint, "");
    const each = this.#pool.blocks_per_page;
    const holders = this.#pool.sequences.filter((sequence) => pagesOf(sequence.table, each).has(page)).length;
    const held = holders ? `, in ${counted(holders, "sequence")} below` : "";
    say(this.hint, `block ${count(page * each)}: ${this.drawing.stateOf(page)}${held}`);
  }
}
