// The list of the router's last decisions, newest first; each opens to show what else there was to choose from.

import { byId, element, keyed, say } from "./dom.js";
import { ago, count, duration, shortId } from "./format.js";
import { cachedTokens, promptInWords, why } from "./reasons.js";

/** @typedef {import("./types.js").Decision} Decision */
/** @typedef {{update: (decision: Decision) => void}} Row */

const MOST_SHOWN = 12;
const LONGEST_BAR_TOKENS = 2048;

export class Decisions {
  /** @type {Map<string, {node: HTMLElement, part: Row}>} */
  #rows = new Map();

  constructor() {
    this.list = byId("decision-list");
    this.empty = byId("decisions-empty");
    this.nothingYet = this.empty.textContent ?? "";
  }

  /** @param {Decision[] | null} decisions null: no router answers */
  update(decisions) {
    this.empty.hidden = decisions !== null && decisions.length > 0;
    say(this.empty, decisions === null ? "No router answers. Gateways place requests by themselves." : this.nothingYet);
    if (decisions === null) return;
    const shown = decisions.slice(0, MOST_SHOWN);
    const rows = keyed(this.list, this.#rows, shown, decisionKey, makeRow);
    rows.forEach((row, index) => row.update(shown[index]));
  }
}

/** @param {Decision} decision */
export function decisionKey(decision) {
  return `${decision.request_id} ${decision.reason} ${decision.made_at_s}`;
}

/** @param {Decision} decision */
function makeRow(decision) {
  const age = element("span", { class: "age" });
  const bar = element("i");
  const length = element("span", { class: "bar" }, bar);
  const says = element("span", { class: "bar-says" });
  const reason = element("b");
  const because = element("span");
  const table = element("div", { class: "scroll", role: "region", "aria-label": "What there was to choose from", tabindex: 0 });
  length.style.width = `${Math.min(100, (decision.num_prompt_tokens / LONGEST_BAR_TOKENS) ** 0.5 * 100)}%`;
  const summary = element(
    "summary",
    {},
    age,
    element("span", { class: "id mono" }, shortId(decision.request_id)),
    element("span", { class: "to" }, decision.group ?? "nowhere"),
    element("span", { class: "why" }, reason, because),
    element("span", { class: "length" }, length, says),
  );
  const details = element("details", { class: "decision" }, summary, table);
  let latest = decision;
  const update = (/** @type {Decision} */ now) => {
    const isNews = now.actual_ttft_s !== latest.actual_ttft_s;
    latest = now;
    say(age, ago(now.age_s));
    say(says, promptInWords(now));
    bar.style.width = `${(cachedTokens(now) / Math.max(1, now.num_prompt_tokens)) * 100}%`;
    say(reason, now.reason.replace("_", " "));
    say(because, ` ${why(now)}`);
    if (isNews && details.hasAttribute("open")) table.replaceChildren(candidates(now));
  };
  details.addEventListener("toggle", () => table.replaceChildren(candidates(latest)));
  return { node: element("li", {}, details), part: { update } };
}

/** @param {Decision} decision */
function candidates(decision) {
  if (!decision.candidates.length) return element("p", { class: "aside" }, decision.detail || "There was no choice.");
  const head = ["group", "holds of the prompt", "sequences", "first token in", "cost"];
  const rows = decision.candidates.map((each) =>
    row("td", each.group, count(each.cached_tokens), count(each.num_sequences), duration(each.expected_ttft_s), duration(each.cost.total_s)),
  );
  const took = decision.actual_ttft_s === null ? "" : ` The first token came after ${duration(decision.actual_ttft_s)}.`;
  const left = decision.num_candidates - decision.candidates.length;
  const more = left > 0 ? ` ${count(left)} more could have taken it.` : "";
  return element(
    "div",
    {},
    element("table", {}, element("thead", {}, row("th", ...head)), element("tbody", {}, ...rows)),
    element("p", { class: "aside" }, `The cost is in seconds; the first one was chosen.${more}${took}`),
  );
}

/**
 * @param {string} tag
 * @param {string[]} cells
 */
function row(tag, ...cells) {
  return element("tr", {}, ...cells.map((text) => element(tag, tag === "th" ? { scope: "col" } : {}, text)));
}
