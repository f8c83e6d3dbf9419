// Puts the page's parts together: what the gateway says goes to each of them.

import { Chat } from "./chat.js";
import { Curves } from "./curves.js";
import { Decisions } from "./decisions.js";
import { byId, say } from "./dom.js";
import { Flow } from "./flow.js";
import { Groups } from "./groups.js";
import { hasKey, keepKey } from "./key.js";
import { Live } from "./live.js";
import { Summary } from "./summary.js";

const parts = {
  summary: new Summary(),
  flow: new Flow(),
  groups: new Groups(),
  curves: new Curves(),
  decisions: new Decisions(),
  chat: new Chat(),
};
const live = new Live(show, tell);

/** @type {Date | null} */
let shownAt = null;

/** @param {import("./types.js").View} view */
function show(view) {
  shownAt = new Date();
  parts.curves.add(view.points);
  parts.summary.update(view, parts.curves.last);
  parts.flow.update(view);
  parts.groups.update(view.groups, view.num_not_drawn, view.models.length > 1);
  parts.decisions.update(view.decisions);
  void parts.chat.findModels();
}

/** @param {import("./live.js").Connection} connection */
function tell({ state, detail, retry_s: retryS }) {
  const words = { live: "live", away: "disconnected", key: "API key needed" };
  const line = byId("connection");
  line.dataset.state = state;
  say(/** @type {Node} */ (line.firstElementChild), words[state]);
  byId("watch").classList.toggle("stale", state !== "live");
  const notice = byId("notice");
  notice.hidden = state === "live" || (state === "key" && !hasKey());
  if (state === "away") say(notice, away(detail, retryS));
  if (state === "key") say(notice, "The server does not take this API key.");
  if (state === "key") byId("key").hidden = false;
  if (state === "live") byId("key").hidden = true;
}

/**
 * @param {string} detail
 * @param {number} retryS
 */
function away(detail, retryS) {
  const seen = shownAt ? ` What is shown is of ${shownAt.toLocaleTimeString("en-GB")}.` : "";
  const next = retryS > 2 ? `Asking again in ${retryS} s.` : "Asking again.";
  return `The gateway does not answer${detail && `: ${detail}`}.${seen} ${next}`;
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = /** @type {HTMLInputElement} */ (byId("key-input"));
  keepKey(input.value.trim());
  input.value = "";
  void live.ask();
});

void live.ask();
