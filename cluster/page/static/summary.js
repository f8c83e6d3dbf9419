// The cluster in five numbers.

import { byId, element, say } from "./dom.js";
import { count, duration, rate, share } from "./format.js";

/** @typedef {import("./types.js").View} View */
/** @typedef {import("./types.js").Point} Point */

export class Summary {
  constructor() {
    const names = ["Requests under way", "Tokens per second", "First token", "Next tokens", "Prompt found cached"];
    this.parts = names.map((name) => ({
      name,
      value: element("dd", { class: "value" }, "–"),
      more: element("dd", { class: "more" }, "\u00a0"), // its line is there before its text is
    }));
    byId("summary").replaceChildren(
      ...this.parts.map(({ name, value, more }) => element("div", {}, element("dt", {}, name), value, more)),
    );
  }

  /**
   * @param {View} view
   * @param {Point | undefined} last
   */
  update(view, last) {
    const sum = (/** @type {(model: import("./types.js").Model) => number} */ of) =>
      view.models.reduce((total, model) => total + of(model), 0);
    const [, ttft50, ttft99, tpot50, tpot99, computed, generated, , hits] = last ?? [];
    const queued = sum((model) => model.num_queued);
    this.#say(0, count(sum((model) => model.num_in_flight)), queued ? `${count(queued)} wait for a group` : "none waits for a group");
    this.#say(1, rate(generated ?? 0), `and ${rate(computed ?? 0)} of prompts`);
    this.#say(2, duration(ttft50 ?? null), ttft99 == null ? "" : `99th percentile ${duration(ttft99)}`);
    this.#say(3, duration(tpot50 ?? null), tpot99 == null ? "" : `99th percentile ${duration(tpot99)}`);
    this.#say(4, share(hits ?? null), hits == null ? "no prompt of late" : "of its tokens, in all groups");
  }

  /**
   * @param {number} index
   * @param {string} value
   * @param {string} more
   */
  #say(index, value, more) {
    say(this.parts[index].value, value);
    say(this.parts[index].more, more || "\u00a0");
  }
}
