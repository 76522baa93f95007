// Requests to the server that served this page: JSON, and the chunks of a streamed answer.
// Every failure but an abort is a ServerError, whose message is a sentence for the reader.

import { eventsOf } from "./sse.js";

export const BASE = new URL("../", import.meta.url); // of the server, below a proxy's prefix too

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

// The sentence of an error's body, which may be of a proxy and no JSON.
export function sentenceOf(status, text) {
  let message;
  try {
    const { error } = JSON.parse(text);
    message = typeof error === "string" ? error : error?.message;
  } catch {
    // Not of this server.
  }
  if (typeof message !== "string" || message === "") return `The server answered with status ${status}.`;
  const sentence = message[0].toUpperCase() + message.slice(1);
  return /[.!?]$/.test(sentence) ? sentence : `${sentence}.`;
}

// Headers are bytes: a key may have any characters, as UTF-8.
function bytesOf(text) {
  return String.fromCharCode(...new TextEncoder().encode(text));
}

// Returns the response to GET PATH, or to POST PATH where there is a body.
export async function request(path, { key = "", body, signal } = {}) {
  const headers = key === "" ? {} : { Authorization: `Bearer ${bytesOf(key)}` };
  const options = { headers, signal, cache: "no-store", credentials: "same-origin" };
  if (body !== undefined) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["Content-Type"] = "application/json";
  }
  try {
    const response = await fetch(new URL(path, BASE), options);
    if (response.ok) return response;
    throw new ServerError(sentenceOf(response.status, await response.text()), response.status);
  } catch (error) {
    throw readable(error);
  }
}

export async function getJson(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    throw readable(error);
  }
}

// Yields the chunks of a streamed answer until [DONE].
export async function* chunksOf(stream) {
  try {
    for await (const data of eventsOf(stream)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(sentenceOf(500, data), 500);
      yield chunk;
    }
  } catch (error) {
    throw readable(error);
  }
  throw new ServerError("The connection ended before the answer did.");
}

function readable(error) {
  if (error instanceof ServerError || error.name === "AbortError") return error;
  if (error instanceof SyntaxError) return new ServerError("The server sent an answer that is not JSON.");
  return new ServerError("The server does not answer: it may have ended, or the network is down.");
}
