// Asks the gateway what the cluster does, for as long as somebody looks at the page.

import { keyHeaders } from "./key.js";

/** @typedef {import("./types.js").View} View */
/** @typedef {{state: "live" | "away" | "key", detail: string, retry_s: number}} Connection */

const PATIENCE_MS = 10_000;
const FIRST_RETRY_S = 1;
const LAST_RETRY_S = 15;

export class Live {
  #since = 0;
  #retryS = FIRST_RETRY_S;
  /** @type {number | undefined} */
  #timer;
  #isAsking = false;

  /**
   * @param {(view: View) => void} onView
   * @param {(connection: Connection) => void} onConnection
   */
  constructor(onView, onConnection) {
    this.onView = onView;
    this.onConnection = onConnection;
    document.addEventListener("visibilitychange", () => this.ask());
  }

  /** Ask now: at first, with another key, when the page is seen again. */
  async ask() {
    clearTimeout(this.#timer);
    if (document.hidden || this.#isAsking) return;
    this.#isAsking = true;
    const nextS = await this.#ask();
    this.#isAsking = false;
    if (nextS !== null) this.#timer = setTimeout(() => this.ask(), nextS * 1000);
  }

  /** @returns {Promise<number | null>} seconds until it is worth asking again; null: not by itself */
  async #ask() {
    try {
      const answer = await fetch(`page/live?since=${this.#since}`, {
        headers: keyHeaders(),
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      if (answer.status === 401) {
        this.onConnection({ state: "key", detail: "", retry_s: 0 });
        return null;
      }
      if (!answer.ok) throw new Error(`it says HTTP ${answer.status}`);
      return this.#take(await answer.json());
    } catch (error) {
      return this.#away(error);
    }
  }

  /** @param {View} view */
  #take(view) {
    this.#since = view.points.at(-1)?.[0] ?? this.#since;
    this.#retryS = FIRST_RETRY_S;
    this.onConnection({ state: "live", detail: "", retry_s: 0 });
    this.onView(view);
    return view.next_s;
  }

  /** @param {unknown} error */
  #away(error) {
    const wait = this.#retryS;
    this.#retryS = Math.min(LAST_RETRY_S, wait * 2);
    const detail = error instanceof Error && error.message.startsWith("it says") ? error.message : "";
    this.onConnection({ state: "away", detail, retry_s: wait });
    return wait;
  }
}
