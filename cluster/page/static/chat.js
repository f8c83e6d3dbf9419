// The chat box: a conversation with the model, and beside each answer what serving it took.

import { answer, Refused } from "./chat_stream.js";
import { byId, element, say } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { keyHeaders } from "./key.js";

/** @typedef {import("./chat_stream.js").Message} Message */

export class Chat {
  /** @type {Message[]} */
  #messages = [];
  /** @type {AbortController | null} */
  #running = null;
  #hasModels = false;

  constructor() {
    this.log = byId("chat-log");
    this.empty = byId("chat-empty");
    this.status = byId("chat-status");
    this.input = /** @type {HTMLTextAreaElement} */ (byId("chat-input"));
    this.model = /** @type {HTMLSelectElement} */ (byId("chat-model"));
    this.sendButton = byId("chat-send");
    this.stopButton = byId("chat-stop");
    this.newButton = byId("chat-new");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      void this.#send();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      void this.#send();
    });
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop();
    });
    this.stopButton.addEventListener("click", () => this.#stop());
    this.newButton.addEventListener("click", () => this.#begin());
  }

  /** Once the gateway answers: which models there are. */
  async findModels() {
    if (this.#hasModels) return;
    const answered = await fetch("v1/models", { headers: keyHeaders() }).catch(() => null);
    if (!answered?.ok) return;
    const names = (await answered.json()).data.map((/** @type {{id: string}} */ model) => model.id);
    this.model.replaceChildren(...names.map((/** @type {string} */ name) => element("option", { value: name }, name)));
    byId("chat-model-label").hidden = names.length < 2;
    this.#hasModels = true;
  }

  #begin() {
    this.#stop();
    this.#messages = [];
    this.log.replaceChildren(this.empty);
    this.newButton.hidden = true;
    say(this.status, "");
    this.input.focus();
  }

  #stop() {
    this.#running?.abort();
  }

  async #send() {
    const text = this.input.value.trim();
    if (!text || this.#running) return;
    await this.findModels();
    this.#messages.push({ role: "user", content: text });
    this.empty.remove();
    this.log.append(element("div", { class: "message user" }, element("span", { class: "hidden" }, "You: "), text));
    this.input.value = "";
    await this.#answer(new AbortController());
  }

  /** @param {AbortController} running */
  async #answer(running) {
    this.#setRunning(running);
    const shown = new Answer(this.log);
    try {
      await shown.follow(this.#question(), running.signal);
      say(this.status, "The answer is complete.");
    } catch (error) {
      say(this.status, running.signal.aborted ? "Stopped." : "");
      if (!running.signal.aborted) shown.fail(error instanceof Refused ? error.message : "The connection was lost.");
    }
    shown.end();
    if (shown.text) this.#messages.push({ role: "assistant", content: shown.text });
    else this.#messages.pop();
    this.#setRunning(null);
  }

  #question() {
    const system = /** @type {HTMLTextAreaElement} */ (byId("chat-system")).value.trim();
    const temperature = /** @type {HTMLInputElement} */ (byId("chat-temperature")).valueAsNumber;
    const most = /** @type {HTMLInputElement} */ (byId("chat-max-tokens")).valueAsNumber;
    return {
      model: this.model.value,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.#messages],
      ...(Number.isNaN(temperature) ? {} : { temperature }),
      ...(Number.isNaN(most) ? {} : { max_completion_tokens: most }),
    };
  }

  /** @param {AbortController | null} running */
  #setRunning(running) {
    const hadFocus = [this.sendButton, this.stopButton].includes(/** @type {HTMLElement} */ (document.activeElement));
    this.#running = running;
    this.sendButton.hidden = running !== null;
    this.stopButton.hidden = running === null;
    this.newButton.hidden = false;
    if (running) say(this.status, "The model answers; Escape stops it.");
    if (hadFocus) (running ? this.stopButton : this.input).focus();
  }
}

/** An answer in the log. */
class Answer {
  text = "";
  #thought = "";
  /** @type {import("./chat_stream.js").Route} */
  #route = { group: null, reason: null };
  #askedAt = performance.now();
  #firstAt = 0;
  #lastAt = 0;
  /** @type {any} */
  #usage = null;
  /** @type {string | null} */
  #finish = null;

  /** @param {HTMLElement} log */
  constructor(log) {
    this.log = log;
    this.thought = element("span", { class: "thought", hidden: true });
    this.said = element("span", { class: "said" });
    this.facts = element("span", { class: "facts" });
    const who = element("span", { class: "hidden" }, "Model: ");
    this.node = element("div", { class: "message running" }, who, this.thought, this.said, this.facts);
    log.append(this.node);
    this.#scroll(true);
  }

  /**
   * @param {import("./chat_stream.js").Question} question
   * @param {AbortSignal} signal
   */
  async follow(question, signal) {
    for await (const delta of answer(question, signal, (route) => (this.#route = route))) {
      this.#usage = delta.usage ?? this.#usage;
      this.#finish = delta.finish ?? this.#finish;
      if (delta.text || delta.thought) this.#add(delta);
    }
  }

  /** @param {import("./chat_stream.js").Delta} delta */
  #add(delta) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    this.#lastAt = performance.now();
    this.#firstAt ||= this.#lastAt;
    this.text += delta.text;
    this.#thought += delta.thought;
    this.thought.hidden = !this.#thought;
    this.thought.textContent = this.#thought;
    this.said.textContent = this.text;
    this.#scroll(isAtEnd);
  }

  /** @param {boolean} isWanted a person who reads further up is left there */
  #scroll(isWanted) {
    if (isWanted) this.log.scrollTop = this.log.scrollHeight;
  }

  /** @param {string} message */
  fail(message) {
    this.node.insertBefore(element("span", { class: "failed", role: "alert" }, message), this.facts);
  }

  end() {
    this.node.classList.remove("running");
    if (this.#firstAt) this.facts.textContent = this.#inWords();
    this.#scroll(true);
  }

  #inWords() {
    const facts = [`first token after ${duration((this.#firstAt - this.#askedAt) / 1000)}`];
    const usage = this.#usage;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(`${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens cached`);
      const seconds = (this.#lastAt - this.#firstAt) / 1000;
      if (seconds > 0.05) facts.push(`${rate((usage.completion_tokens - 1) / seconds)} tokens/s`);
    }
    if (this.#route.group) facts.push(`by ${this.#route.group} (${this.#route.reason})`);
    if (this.#finish === "length") facts.push("ended at the most tokens");
    return facts.join(" · ");
  }
}
