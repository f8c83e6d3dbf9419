// The sequences that run in a group: each with its own pages in the order of its text, wherever they lie.

import { drawing, element, keyed, say } from "./dom.js";
import { count, counted, shortId } from "./format.js";

/** @typedef {import("./types.js").SequencePages} SequencePages */
/** @typedef {{update: (sequence: SequencePages) => void}} Row */

const MOST_CELLS = 96;
const UNIT = 10;

export class Sequences {
  /** @type {Map<string, {node: HTMLElement, part: Row}>} */
  #rows = new Map();
  /** @type {Map<string, SequencePages>} */
  #shown = new Map();

  /**
   * @param {HTMLElement} parent
   * @param {(sequence: SequencePages | null) => void} onMark a person looks at one, or at none any more
   */
  constructor(parent, onMark) {
    this.title = element("h4");
    this.list = element("ul");
    this.node = element("div", { class: "sequences", hidden: true }, this.title, this.list);
    this.onMark = onMark;
    parent.append(this.node);
  }

  /**
   * @param {SequencePages[]} sequences
   * @param {number} numRunning
   * @param {number} blockSize
   */
  update(sequences, numRunning, blockSize) {
    this.node.hidden = !sequences.length;
    this.#shown = new Map(sequences.map((sequence) => [keyOf(sequence), sequence]));
    const more = numRunning > sequences.length ? `, ${sequences.length} of them here` : "";
    say(this.title, `${counted(numRunning, "running sequence")}${more}: point at one to find its pages`);
    const rows = keyed(this.list, this.#rows, sequences, keyOf, (sequence) => this.#row(keyOf(sequence), blockSize));
    rows.forEach((row, index) => row.update(sequences[index]));
  }

  /**
   * @param {string} key
   * @param {number} blockSize
   */
  #row(key, blockSize) {
    const id = element("span", { class: "mono" });
    const says = element("span");
    const strip = drawing("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
    const button = element(
      "button",
      { type: "button", class: "sequence" },
      element("span", { class: "says" }, id, says),
      strip,
    );
    for (const name of ["pointerenter", "focus"]) {
      button.addEventListener(name, () => this.onMark(this.#shown.get(key) ?? null));
    }
    for (const name of ["pointerleave", "blur"]) button.addEventListener(name, () => this.onMark(null));
    const update = (/** @type {SequencePages} */ sequence) => {
      say(id, shortId(sequence.request_id) + (sequence.branch ? ` · ${sequence.branch}` : ""));
      say(says, inWords(sequence));
      drawStrip(strip, sequence, blockSize);
    };
    return { node: element("li", {}, button), part: { update } };
  }
}

/** @param {SequencePages} sequence */
function keyOf(sequence) {
  return `${sequence.request_id}/${sequence.branch}`;
}

/** @param {SequencePages} sequence */
function inWords(sequence) {
  const { num_prompt_tokens: prompt, num_cached_tokens: cached, num_tokens: tokens, num_blocks: blocks } = sequence;
  return `${count(cached)} of ${count(prompt)} cached · ${count(tokens - prompt)} out · ${counted(blocks, "page")}`;
}

/**
 * Pages in the order of the text; the last one is as full as it is.
 * @param {SVGElement} strip
 * @param {SequencePages} sequence
 * @param {number} blockSize
 */
function drawStrip(strip, sequence, blockSize) {
  const perCell = Math.max(1, Math.ceil(sequence.num_blocks / MOST_CELLS)) * blockSize;
  const numCells = Math.max(1, Math.ceil(sequence.num_tokens / perCell));
  const cells = [];
  for (let cell = 0; cell < numCells; cell++) {
    const end = Math.min((cell + 1) * perCell, sequence.num_tokens);
    const full = (Math.min(end, sequence.num_computed_tokens) - cell * perCell) / perCell;
    const x = cell * UNIT + 0.75;
    if (full < 1) cells.push(drawing("rect", { class: "strip-blank", x, y: 0.75, width: UNIT - 2.5, height: 11.5 }));
    if (full > 0) {
      const height = 11.5 * full;
      const part = partOf(sequence, cell * perCell);
      cells.push(drawing("rect", { class: part, x, y: 12.25 - height, width: UNIT - 2.5, height }));
    }
  }
  strip.setAttribute("viewBox", `0 0 ${Math.max(40, numCells) * UNIT} 13`);
  strip.replaceChildren(...cells);
}

/**
 * @param {SequencePages} sequence
 * @param {number} token the first of the page
 */
function partOf(sequence, token) {
  if (token < sequence.num_cached_tokens) return "strip-cached";
  return token < sequence.num_prompt_tokens ? "strip-prompt" : "strip-output";
}
