// Why a request went where it went, as a person would say it. The words are those of router/decision.py.

import { count, duration } from "./format.js";

/** @typedef {import("./types.js").Decision} Decision */

/** @type {Record<string, (decision: Decision) => string>} */
const WHY = {
  prefix: () => "it holds the most of the prompt",
  load: (decision) => `another holds more, and would cost ${by(decision)}more`,
  cold: () => "no group holds any of it: the cheapest",
  even: () => "several hold as much of it: the cheapest",
  preferred: () => "the request or its session prefers it",
  only: () => "the only group to choose from",
  policy: () => "by a policy that does not look at costs",
  unknown_model: () => "no group serves the model",
  no_group: () => "every group is draining, left out or gone",
  not_allowed: () => "none of the allowed groups is there",
  queued: () => "no group has room: it waits in the router",
  queue_full: () => "refused: the queue is full",
  tenant_limit: () => "refused: its tenant has enough waiting",
  deadline: () => "refused: it could not begin in time",
  queue_timeout: () => "it has waited for too long",
};

/** @param {Decision} decision */
export function why(decision) {
  const waited = decision.queued_s > 0.001 ? `, after ${duration(decision.queued_s)} in the queue` : "";
  return (WHY[decision.reason]?.(decision) ?? decision.detail) + waited;
}

/** @param {Decision} decision */
function by(decision) {
  const chosen = decision.candidates[0];
  const fuller = decision.candidates.find((each) => chosen && each.cached_tokens > chosen.cached_tokens);
  return chosen && fuller ? `${duration(fuller.cost.total_s - chosen.cost.total_s)} ` : "";
}

/** @param {Decision} decision */
export function cachedTokens(decision) {
  return decision.actual_cached_tokens ?? decision.expected_cached_tokens;
}

/** @param {Decision} decision */
export function promptInWords(decision) {
  const cached = cachedTokens(decision);
  const known = decision.actual_cached_tokens === null ? "expected" : "cached";
  return `${count(cached)} of ${count(decision.num_prompt_tokens)} ${known}`;
}
