// The states of a pool's pages, as a leader writes them down.

/** @typedef {import("./types.js").PoolState} PoolState */

/** In the order of their being told; the letters are those of worker/pool_state.py. */
export const STATES = [
  { letter: "s", name: "shared", means: "held by several sequences" },
  { letter: "w", name: "written", means: "held by one sequence" },
  { letter: "c", name: "cached", means: "held by nobody, still findable" },
  { letter: "f", name: "free", means: "empty" },
  { letter: "x", name: "fenced", means: "given back, a step may still read it" },
];

const NAMES = Object.fromEntries(STATES.map(({ letter, name }) => [letter, name]));

/**
 * @param {string} letter
 * @returns {string}
 */
export function stateName(letter) {
  return NAMES[letter] ?? letter;
}

/**
 * "2f1c" → ["f", "f", "c"]
 * @param {string} runs
 */
export function readPages(runs) {
  /** @type {string[]} */
  const pages = [];
  for (const [, length, letter] of runs.matchAll(/(\d+)([a-z])/g)) {
    for (let left = Number(length); left > 0; left--) pages.push(letter);
  }
  return pages;
}

/**
 * The pages that a table's blocks lie in.
 * @param {[number, number][]} table
 * @param {number} blocksPerPage
 * @returns {Set<number>}
 */
export function pagesOf(table, blocksPerPage) {
  const pages = new Set();
  for (const [first, length] of table) {
    for (let block = first; block < first + length; block++) pages.add(Math.floor(block / blocksPerPage));
  }
  return pages;
}
