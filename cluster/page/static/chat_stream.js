// One answer of the model, as it comes: POST /v1/chat/completions with stream, read as server-sent events.

import { keyHeaders } from "./key.js";

/** @typedef {{role: string, content: string}} Message */
/** @typedef {{model: string, messages: Message[], temperature?: number, max_completion_tokens?: number}} Question */
/** @typedef {{text: string, thought: string, finish: string | null, usage: any}} Delta */
/** @typedef {{group: string | null, reason: string | null}} Route */

/** What the server says is wrong. */
export class Refused extends Error {}

/**
 * @param {Question} question
 * @param {AbortSignal} signal
 * @param {(route: Route) => void} onRoute
 * @returns {AsyncGenerator<Delta>} raises Refused
 */
export async function* answer(question, signal, onRoute) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...keyHeaders() },
    body: JSON.stringify({ ...question, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok || !response.body) throw new Refused(await complaint(response));
  onRoute({ group: response.headers.get("x-octavo-group"), reason: response.headers.get("x-octavo-route-reason") });
  for await (const data of events(response.body)) {
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message);
    const choice = chunk.choices?.[0];
    yield {
      text: choice?.delta?.content ?? "",
      thought: choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "",
      finish: choice?.finish_reason ?? null,
      usage: chunk.usage ?? null,
    };
  }
}

/**
 * The data of each event, until [DONE].
 * @param {ReadableStream<Uint8Array>} body
 */
async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop() ?? "";
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // blank lines, comments
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield data;
    }
  }
}

/** @param {Response} response */
async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway says HTTP ${response.status}.`;
  }
}
