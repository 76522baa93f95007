// The body of POST /v1/chat/completions, from a chat's messages and the settings.
// A setting that is empty is left out, so that the server's default holds.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

// Returns a message's content: a text, or with images its parts.
function contentOf({ content, images = [] }) {
  if (images.length === 0) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content === "" ? parts : [...parts, { type: "text", text: content }];
}

function joined(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  const parts = (content) => (typeof content === "string" ? [{ type: "text", text: content }] : content);
  return [...parts(first), ...parts(second)];
}

// Returns the messages to send: without answers that have no text. Neighbours of one role are joined, because many chat
// templates want user and assistant in turns.
export function messagesOf(chat) {
  const messages = chat.system ? [{ role: "system", content: chat.system }] : [];
  for (const message of chat.messages) {
    const { role } = message;
    const content = contentOf(message);
    const last = messages.at(-1);
    if (content === "") continue;
    if (last?.role === role) last.content = joined(last.content, content);
    else messages.push({ role, content });
  }
  return messages;
}

// Returns the stop strings: a line each, in which \n and \t stand for a line's end and a tab.
export function stopsOf(text) {
  const escapes = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\[nt\\]/g, (escape) => escapes[escape]));
}

export function bodyOf(chat, settings, model) {
  const body = { messages: messagesOf(chat), stream: true, stream_options: { include_usage: true } };
  if (model) body.model = model;
  for (const name of NUMBERS) {
    const text = settings[name] ?? "";
    if (text !== "" && Number.isFinite(Number(text))) body[name] = Number(text);
  }
  const stop = stopsOf(settings.stop ?? "");
  if (stop.length > 0) body.stop = stop;
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return body;
}
