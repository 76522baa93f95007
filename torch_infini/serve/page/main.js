// The page: which chat is shown, what the buttons do, and the requests that run.

import { BASE, chunksOf, getJson, request } from "./api.js";
import { newAnswer, receive } from "./answer.js";
import { ask } from "./dialogs.js";
import { Attached } from "./images.js";
import { bodyOf } from "./request.js";
import { openSettings, showDefaults } from "./settings.js";
import { Store, newChat, titleOf } from "./store.js";
import { MessageView, isSend, make } from "./view.js";

const element = (id) => document.getElementById(id);
const PREFIX = `torch_infini:${BASE.pathname}`;
const SAVE_EVERY = 2000; // ms, while an answer arrives

// Access to storage throws where the browser forbids it.
function storageOf(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

const store = new Store(storageOf("localStorage"), PREFIX, notify);
const tab = new Store(storageOf("sessionStorage"), PREFIX); // the key, and texts that are not sent yet
const attached = new Attached(element("attached"), notify);
const running = new Map(); // by the id of a chat: {controller, chat}
let settings = store.read("settings") ?? {};
let chat = null; // the shown one; it is stored with its first message
let views = [];

function notify(sentence) {
  element("notice").hidden = sentence === "";
  element("notice").textContent = sentence;
}

// Has a screen reader say a text, once.
function announce(text) {
  element("status").textContent = "";
  setTimeout(() => (element("status").textContent = text), 50);
}

const key = () => tab.read("key") ?? "";
const isRunning = () => running.has(chat.id);

// The server

async function askKey(refused) {
  const text = refused ? "The server refused this key." : "This server answers only with a key.";
  const given = await ask({ title: "API key", text, label: "Key, kept until this tab is closed", type: "password", ok: "Use" });
  if (given === null) return false;
  tab.write("key", given);
  return true;
}

async function meetServer() {
  for (;;) {
    try {
      const [models, props] = await Promise.all(["v1/models", "props"].map((path) => getJson(path, { key: key() })));
      showServer(models.data.map((model) => model.id), props);
      return;
    } catch (error) {
      const unlocked = error.status === 401 && (await askKey(key() !== ""));
      if (unlocked) continue;
      element("facts").textContent = error.message;
      return;
    }
  }
}

function showServer(names, props) {
  const select = element("model");
  select.replaceChildren(...names.map((name) => make("option", { textContent: name, value: name })));
  select.value = names.includes(settings.model) ? settings.model : names[0];
  const { device, build_info: release } = props;
  const cpu = device.threads ? ` (${device.cpu_capability}), ${device.threads} ${device.threads === 1 ? "thread" : "threads"}` : "";
  element("facts").textContent = `${names[0]} · ${device.name}${cpu} · ${release}`;
  element("attach").hidden = !props.modalities?.vision;
  showDefaults(props);
}

// Chats

function save(one) {
  if (!one.deleted) store.save(one);
}

function showList() {
  const items = store.chats().map((one) => {
    const link = make("a", { href: `#chat=${one.id}`, textContent: titleOf(one) });
    if (one.id === chat.id) link.setAttribute("aria-current", "page");
    return make("li", {}, link);
  });
  element("chat-list").replaceChildren(...items);
  const isStored = chat.messages.length > 0;
  element("title").textContent = titleOf(chat);
  element("chat-actions").hidden = !isStored;
  document.title = isStored ? `${titleOf(chat)} – torch_infini` : "torch_infini";
}

// Shows the chat that the address names, or a new one.
function openChat() {
  const id = location.hash.match(/^#chat=(\w+)$/)?.[1];
  chat = running.get(id)?.chat ?? (id ? store.chat(id) : null) ?? newChat(settings.system ?? "");
  element("prompt").value = tab.read(draftName()) ?? "";
  showMessages();
  showList();
  toggleChats(false);
  showEnd();
}

const draftName = () => `draft:${chat.messages.length > 0 ? chat.id : "new"}`;

function showMessages() {
  views = chat.messages.map((message) => new MessageView(message));
  element("messages").replaceChildren(...views.map((view) => view.node));
  refresh();
}

// Shows what each message is now, and what can be done with it.
function refresh() {
  const busy = isRunning();
  views.forEach((view, at) => {
    const isLast = at === views.length - 1;
    const isAnswer = view.message.role === "assistant";
    view.update(busy && isLast && isAnswer);
    const actions = {};
    if (!busy && !isAnswer) actions.Edit = () => edit(view, at);
    if (!busy && isLast) actions[isAnswer ? (view.message.error ? "Try again" : "Regenerate") : "Answer"] = regenerate;
    view.setActions(actions);
  });
  const [send, stop] = [element("send"), element("stop")];
  const hadFocus = [send, stop].includes(document.activeElement);
  send.hidden = busy;
  stop.hidden = !busy;
  if (hadFocus) (busy ? stop : element("prompt")).focus();
}

function edit(view, at) {
  view.edit(
    (text) => {
      const { images } = view.message;
      chat.messages.length = at;
      element("prompt").focus();
      send(text, images);
    },
    () => [...view.actions.children].find((one) => one.textContent === "Edit")?.focus(),
  );
}

function send(text, images = []) {
  if (chat.messages.length === 0) history.replaceState(null, "", `#chat=${chat.id}`);
  chat.messages.push({ role: "user", content: text, ...(images.length > 0 && { images }) });
  answer(chat);
}

function regenerate() {
  if (isRunning() || isEditing()) return;
  const replaced = chat.messages.at(-1).role === "assistant" ? chat.messages.pop() : undefined;
  element("prompt").focus();
  answer(chat, replaced);
}

// Asks for the next message of a chat. `replaced` is the answer that the new one replaces, if one comes.
async function answer(one, replaced) {
  const message = newAnswer();
  const controller = new AbortController();
  const body = bodyOf(one, settings, element("model").value);
  one.messages.push(message);
  one.updated = Date.now();
  running.set(one.id, { controller, chat: one });
  notify("");
  save(one);
  if (one === chat) {
    showMessages();
    showList();
    showEnd();
  }
  announce("The model is answering.");
  try {
    await receiveWithKey(one, message, body, controller.signal);
    message.finish ??= "stop";
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message;
  }
  const isEmpty = message.content === "" && message.reasoning === "";
  if (replaced?.content && isEmpty) {
    one.messages[one.messages.length - 1] = { ...replaced, error: message.error };
  }
  running.delete(one.id);
  save(one);
  announce(message.error ?? (message.finish === "stopped" ? "The answer was stopped." : `Answer: ${message.content}`));
  if (one === chat) {
    keepEnd(() => (one.messages.at(-1) === message ? refresh() : showMessages()));
  }
}

async function receiveWithKey(one, message, body, signal) {
  const changed = drawing(one, message);
  for (let unlocked = false; ; ) {
    const start = performance.now();
    try {
      const response = await request("v1/chat/completions", { key: key(), body, signal });
      if (unlocked || element("model").length === 0) meetServer(); // which could not be met before
      await receive(message, chunksOf(response.body), start, changed);
      return;
    } catch (error) {
      unlocked = error.status === 401 && (await askKey(key() !== ""));
      if (!unlocked || signal.aborted) throw error;
    }
  }
}

// Returns a function that draws an answer at most once a frame, and stores it every SAVE_EVERY.
function drawing(one, message) {
  let [waiting, saved] = [false, performance.now()];
  return () => {
    if (performance.now() - saved > SAVE_EVERY) {
      saved = performance.now();
      save(one);
    }
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (views.at(-1)?.message !== message || !running.has(one.id)) return;
      keepEnd(() => views.at(-1).update(true));
    });
  };
}

function showEnd() {
  scrollTo(0, document.documentElement.scrollHeight);
}

// Changes the page; its end stays in view if it was.
function keepEnd(change) {
  const wasAtEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 60;
  change();
  if (wasAtEnd) showEnd();
}

const editField = () => document.querySelector("#messages textarea");

// Whether a message is being edited, whose new text would be lost with its node; then says so.
function isEditing() {
  const field = editField();
  if (field === null) return false;
  field.focus();
  notify("Send or cancel the edited message first.");
  return true;
}

// Takes the images among what was pasted or dropped; all else stays the browser's.
function addImages(event, transfer) {
  const images = [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));
  if (element("attach").hidden || images.length === 0) return;
  event.preventDefault();
  attached.add(images);
}

// Buttons and keys

function toggleChats(open) {
  element("chats").classList.toggle("open", open);
  element("show-chats").setAttribute("aria-expanded", String(open));
}

function setTheme(theme) {
  store.write("theme", theme);
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  element("theme").textContent = `Theme: ${theme}`;
}

function exportChat() {
  const { deleted: _, ...content } = chat;
  const blob = new Blob([JSON.stringify(content, null, 2)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(blob), download: `chat-${chat.id}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function rename() {
  const one = chat;
  const title = await ask({ title: "Rename the chat", label: "Name", value: titleOf(one), ok: "Rename" });
  if (title === null) return;
  one.title = title.trim();
  save(one);
  showList();
}

async function deleteChat() {
  const one = chat;
  const text = `“${titleOf(one)}” is removed from this browser.`;
  if ((await ask({ title: "Delete the chat?", text, ok: "Delete" })) === null) return;
  one.deleted = true;
  running.get(one.id)?.controller.abort();
  store.remove(`chat:${one.id}`);
  location.hash = "#new";
  element("prompt").focus();
}

element("composer").onsubmit = (event) => {
  event.preventDefault();
  const field = element("prompt");
  if (isRunning()) announce("The answer is still arriving. Escape stops it.");
  if ((field.value.trim() === "" && attached.count === 0) || isRunning() || isEditing()) return;
  const text = field.value;
  field.value = "";
  tab.remove(draftName());
  send(text, attached.take());
};
element("attach").onclick = () => element("files").click();
element("files").onchange = async () => {
  await attached.add([...element("files").files]);
  element("files").value = "";
  element("prompt").focus();
};
element("prompt").onpaste = (event) => addImages(event, event.clipboardData);
element("composer").ondragover = (event) => !element("attach").hidden && event.preventDefault();
element("composer").ondrop = (event) => addImages(event, event.dataTransfer);
element("prompt").onkeydown = (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  element("composer").requestSubmit();
};
element("prompt").oninput = () => tab.write(draftName(), element("prompt").value);
element("stop").onclick = () => running.get(chat.id)?.controller.abort();
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.querySelector("dialog[open]") === null) element("stop").click();
});
element("skip").onclick = (event) => {
  event.preventDefault(); // The address names the chat.
  element("prompt").focus();
};
element("new").onclick = () => {
  location.hash = "#new";
  toggleChats(false);
  element("prompt").focus();
};
element("show-chats").onclick = () => toggleChats(!element("chats").classList.contains("open"));
element("rename").onclick = rename;
element("export").onclick = exportChat;
element("delete").onclick = deleteChat;
element("theme").onclick = () => {
  const themes = ["system", "light", "dark"];
  setTheme(themes[(themes.indexOf(store.read("theme") ?? "system") + 1) % themes.length]);
};
element("model").onchange = () => {
  settings.model = element("model").value;
  store.write("settings", settings);
};
element("show-settings").onclick = () => {
  openSettings({ ...settings, system: chat.system, key: key() }, ({ key: given, ...entered }) => {
    settings = { ...settings, ...entered };
    store.write("settings", settings);
    chat.system = entered.system;
    if (chat.messages.length > 0) save(chat);
    if (given === key()) return;
    tab.write("key", given);
    meetServer();
  });
};
addEventListener("hashchange", openChat);
addEventListener("pagehide", () => running.forEach(({ chat: one }) => save(one)));
addEventListener("storage", (event) => {
  if (!store.isChat(event.key)) return;
  const changed = event.key?.endsWith(`chat:${chat.id}`) && !isRunning() ? store.chat(chat.id) : null;
  if (changed !== null && editField() === null) {
    chat = changed;
    showMessages();
  }
  showList();
});
setTheme(store.read("theme") ?? "system");
openChat();
meetServer();
