// Messages as nodes of the page. Texts of the model and of the user become text nodes, never HTML.

import { lineOf } from "./answer.js";
import { copy } from "./dialogs.js";
import { blocksOf, partsOf } from "./markdown.js";

// Makes an element with properties and children; false and null are left out.
export function make(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children.filter((child) => child !== null && child !== false));
  return node;
}

export function button(label, press, properties = {}) {
  return make("button", { type: "button", textContent: label, onclick: press, ...properties });
}

export function copyButton(label, textOf) {
  let timer;
  const made = button(label, async () => {
    made.textContent = (await copy(textOf())) ? "Copied" : "Not allowed";
    clearTimeout(timer);
    timer = setTimeout(() => (made.textContent = label), 2000);
  });
  return made;
}

function inline(parts) {
  return parts.map((part) => {
    if (typeof part === "string") return part;
    if (part.kind === "code") return make("code", { textContent: part.text });
    return make(part.kind, {}, ...inline(part.parts));
  });
}

function listOf(items) {
  const top = items.map((item) => item.depth === 0);
  const ordered = items[0].number !== null;
  const list = make(ordered ? "ol" : "ul", ordered ? { start: items[0].number } : {});
  for (let at = 0; at < items.length; ) {
    let next = at + 1;
    while (next < items.length && !top[next]) next++;
    const below = items.slice(at + 1, next).map((item) => ({ ...item, depth: item.depth - 1 }));
    list.append(make("li", {}, ...inline(partsOf(items[at].text)), below.length > 0 && listOf(below)));
    at = next;
  }
  return list;
}

function nodeOf(block) {
  const { kind, text } = block;
  if (kind === "code") {
    const pre = make("pre", { tabIndex: 0 }, make("code", { textContent: text }));
    const head = make("div", { className: "code-head" }, block.language, copyButton("Copy code", () => text));
    return make("div", { className: "code" }, head, pre);
  }
  if (kind === "list") return listOf(block.items);
  if (kind === "rule") return make("hr");
  // Below the message's own heading, which is of level 3.
  if (kind === "heading") return make(`h${Math.min(block.level + 3, 6)}`, {}, ...inline(partsOf(text)));
  return make(kind === "quote" ? "blockquote" : "p", {}, ...inline(partsOf(text)));
}

// Shows a text in a node that showed its beginning: only blocks from the first new one on are made anew.
export function showText(node, text) {
  const blocks = blocksOf(text);
  const shown = node.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < shown.length && shown[same] === blocks[same].source) same++;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const block of blocks.slice(same)) node.append(nodeOf(block));
  node.blocks = blocks.map((block) => block.source);
}

let number = 0;

// One message. `actions` are {label: function}; `running` while the answer arrives.
export class MessageView {
  constructor(message) {
    this.message = message;
    const isAnswer = message.role === "assistant";
    const id = `message-${++number}`;
    const heading = make("h3", { id, textContent: isAnswer ? "Answer" : "You" });
    this.body = make("div", { className: "body" });
    this.reasoning = make("div", { className: "body" });
    this.summary = make("summary");
    this.details = make("details", { hidden: true }, this.summary, this.reasoning);
    this.error = make("p", { className: "error", hidden: true });
    this.line = make("p", { className: "line", hidden: true });
    this.actions = make("div", { className: "actions", role: "group" });
    this.actions.setAttribute("aria-labelledby", id);
    const images = message.images ?? [];
    const pictures = images.map((src, at) => make("img", { src, alt: `Image ${at + 1} of your message` }));
    const shown = pictures.length > 0 && make("div", { className: "images" }, ...pictures);
    const parts = isAnswer ? [this.details, this.body, this.error, this.line] : [shown, this.body].filter(Boolean);
    this.node = make("article", { className: isAnswer ? "answer" : "user" }, heading, ...parts, this.actions);
    this.node.setAttribute("aria-labelledby", id);
  }

  // Shows the message as it is now.
  update(running = false) {
    const { role, content, reasoning, error } = this.message;
    if (role === "user") {
      this.body.textContent = content;
      this.body.hidden = content === "";
      return;
    }
    this.node.setAttribute("aria-busy", String(running));
    this.details.hidden = !reasoning;
    this.summary.textContent = running && !content ? "Reasoning…" : "Reasoning";
    if (reasoning) showText(this.reasoning, reasoning);
    showText(this.body, content);
    this.error.hidden = !error;
    this.error.textContent = error ?? "";
    const line = lineOf(this.message) || (running ? "Waiting for the first token…" : "");
    this.line.hidden = line === "";
    this.line.textContent = line;
  }

  setActions(actions) {
    const buttons = Object.entries(actions).map(([label, press]) => button(label, press));
    this.actions.replaceChildren(copyButton("Copy", () => this.message.content), ...buttons);
  }

  // Replaces the text by a field; `send` gets its new text, `cancel` nothing.
  edit(send, cancel) {
    const id = `edit-${++number}`;
    const field = make("textarea", { id, value: this.message.content, rows: 4 });
    const end = (call, ...given) => {
      form.replaceWith(this.body);
      this.actions.hidden = false;
      call(...given);
    };
    const hasImages = (this.message.images?.length ?? 0) > 0;
    const submit = () => (field.value.trim() !== "" || hasImages) && end(send, field.value);
    const buttons = [make("button", { textContent: "Send again", className: "main" }), button("Cancel", () => end(cancel))];
    const hint = make("p", { textContent: "Sending removes the messages after this one.", id: `${id}-hint` });
    const label = make("label", { htmlFor: id, textContent: "New text of the message" });
    const form = make("form", {}, label, field, hint, make("div", { className: "buttons" }, ...buttons));
    field.setAttribute("aria-describedby", hint.id);
    form.onsubmit = (event) => {
      event.preventDefault();
      submit();
    };
    field.onkeydown = (event) => {
      if (isSend(event)) {
        event.preventDefault();
        submit();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        end(cancel);
      }
    };
    this.body.replaceWith(form);
    this.actions.hidden = true;
    field.focus();
  }
}

// Whether a key sends: Enter alone, and not the one that ends the input of a Chinese or Japanese word.
export function isSend(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;
}
