// torch_infini/serve/page/answer.js, request.js and store.js: figures of an answer, bodies of requests, stored chats.

import assert from "node:assert/strict";
import { test } from "node:test";

import { lineOf, newAnswer, receive } from "../../torch_infini/serve/page/answer.js";
import { bodyOf, messagesOf, stopsOf } from "../../torch_infini/serve/page/request.js";
import { Store, newChat, titleOf } from "../../torch_infini/serve/page/store.js";

const delta = (fields, finish = null) => ({ choices: [{ delta: fields, finish_reason: finish }] });

async function answered(chunks, step = 100) {
  const answer = newAnswer();
  let [time, changes] = [0, 0];
  async function* stream() {
    yield* chunks;
  }
  await receive(answer, stream(), 0, () => changes++, () => (time += step));
  assert.equal(changes, chunks.length);
  return answer;
}

test("an answer and its figures", async () => {
  const usage = { choices: [], model: "small", usage: { completion_tokens: 5 } };
  const parts = [delta({ role: "assistant", content: "" }), delta({ reasoning_content: "hm" }), delta({ content: "a" })];
  const answer = await answered([...parts, delta({ content: "b" }), delta({}, "length"), usage]);
  assert.deepEqual([answer.content, answer.reasoning, answer.finish], ["ab", "hm", "length"]);
  assert.equal(answer.model, "small");
  assert.deepEqual(answer.figures, { tokens: 5, about: false, first: 0.1, rate: 4000 / 300 });
  assert.equal(lineOf(answer), "5 tokens · 13.3 tokens/s · first token after 0.10 s · ended at the limit of tokens");
});

test("figures without usage count chunks, and one token has no rate", async () => {
  const one = await answered([delta({ content: "a" })]);
  assert.equal(lineOf(one), "about 1 token · first token after 0.10 s");
  const slow = await answered([delta({ content: "a" }), delta({ content: "b" })], 500);
  assert.equal(lineOf({ ...slow, finish: "stopped" }), "about 2 tokens · 2.00 tokens/s · first token after 0.50 s · stopped");
  assert.equal(lineOf(await answered([delta({}, "stop")])), "");
});

test("messages are sent in turns", () => {
  const messages = [
    { role: "user", content: "a" },
    { role: "assistant", content: "", error: "failed" },
    { role: "user", content: "b" },
    { role: "assistant", content: "c", reasoning: "not sent" },
    { role: "assistant", content: "" },
  ];
  assert.deepEqual(messagesOf({ system: "s", messages }), [
    { role: "system", content: "s" },
    { role: "user", content: "a\n\nb" },
    { role: "assistant", content: "c" },
  ]);
  assert.deepEqual(messagesOf({ system: "", messages: [] }), []);
  assert.equal(messages[0].content, "a");
});

test("settings that are empty are left out", () => {
  const chat = { system: "", messages: [{ role: "user", content: "a" }] };
  const fixed = { messages: chat.messages, stream: true, stream_options: { include_usage: true } };
  assert.deepEqual(bodyOf(chat, { temperature: "", seed: "x", stop: "\n", reasoning_effort: "" }, ""), fixed);
  const given = { temperature: "0", top_p: "0.5", top_k: "3", seed: "7", stop: "a\n\\n\\\\n", thinking: "off" };
  assert.deepEqual(bodyOf(chat, { ...given, reasoning_effort: "low" }, "m"), {
    ...fixed,
    ...{ model: "m", temperature: 0, top_p: 0.5, top_k: 3, seed: 7, stop: ["a", "\n\\n"] },
    ...{ reasoning_effort: "low", chat_template_kwargs: { enable_thinking: false } },
  });
  assert.deepEqual(stopsOf("a b\n\n\\t"), ["a b", "\t"]);
});

class Storage {
  constructor(room = Infinity) {
    this.items = new Map();
    this.room = room;
  }
  get length() {
    return this.items.size;
  }
  key(at) {
    return [...this.items.keys()][at];
  }
  getItem(key) {
    return this.items.get(key) ?? null;
  }
  setItem(key, text) {
    if (text.length > this.room) throw new Error("full");
    this.items.set(key, text);
  }
  removeItem(key) {
    this.items.delete(key);
  }
}

const withMessage = (content) => ({ ...newChat(""), messages: [{ role: "user", content }] });

test("chats by when they changed, apart from those of other servers", () => {
  const storage = new Storage();
  const [store, other] = [new Store(storage, "p:/"), new Store(storage, "p:/other/")];
  const [first, second] = [withMessage("one"), withMessage("two")];
  store.save({ ...first, updated: 2 });
  store.save({ ...second, updated: 1 });
  other.save(withMessage("three"));
  storage.setItem("p:/:chat:bad", "{");
  storage.setItem("p:/:chat:strange", "[1]");
  assert.deepEqual(store.chats().map((chat) => chat.id), [first.id, second.id]);
  assert.notEqual(first.id, second.id);
  store.remove(`chat:${first.id}`);
  assert.equal(store.chat(first.id), null);
  assert.deepEqual([store.isChat("p:/:chat:1"), store.isChat(null), store.isChat("p:/:settings")], [true, true, false]);
});

test("where nothing can be stored, memory holds it, and one sentence says so", () => {
  for (const storage of [new Storage(10), null]) {
    const sentences = [];
    const store = new Store(storage, "p", (sentence) => sentences.push(sentence));
    const chat = withMessage("a long text");
    store.save(chat);
    store.save(chat);
    assert.equal(store.chats()[0].id, chat.id);
    assert.equal(sentences.length, 1);
    store.remove(`chat:${chat.id}`);
    assert.deepEqual(store.chats(), []);
  }
});

test("an answer that the page's end cut off is stopped", () => {
  const store = new Store(new Storage(), "p");
  const chat = withMessage("a");
  chat.messages.push(newAnswer(), { ...newAnswer(), error: "e" }, { ...newAnswer(), finish: "length" });
  chat.messages.push(null, "text", { role: "assistant" });
  store.save(chat);
  const finishes = store.chat(chat.id).messages.map((message) => message.finish);
  assert.deepEqual(finishes, [undefined, "stopped", undefined, "length"]);
});

test("titles", () => {
  assert.equal(titleOf(newChat("")), "New chat");
  assert.equal(titleOf(withMessage("\n first\nsecond")), "first");
  assert.equal(titleOf(withMessage("x".repeat(61))), `${"x".repeat(59)}…`);
  assert.equal(titleOf({ ...withMessage("a"), title: "mine" }), "mine");
});

test("messages with images", () => {
  const url = "data:image/png;base64,AAAA";
  const picture = { type: "image_url", image_url: { url } };
  const text = (content) => ({ type: "text", text: content });
  const user = (content, images) => ({ role: "user", content, images });
  assert.deepEqual(messagesOf({ messages: [user("a", [url])] }), [{ role: "user", content: [picture, text("a")] }]);
  assert.deepEqual(messagesOf({ messages: [user("", [url])] }), [{ role: "user", content: [picture] }]);
  assert.deepEqual(messagesOf({ messages: [user("a", []), user("b", [url])] }), [
    { role: "user", content: [text("a"), picture, text("b")] },
  ]);
  const storage = new Map();
  const access = { getItem: (name) => storage.get(name) ?? null, setItem: (name, value) => storage.set(name, value) };
  const store = new Store(access, "p");
  const chat = newChat("");
  chat.messages = [user("", [url, "http://elsewhere", 5]), user("x", "no list")];
  store.save(chat);
  assert.deepEqual(store.chat(chat.id).messages.map((message) => message.images), [[url], []]);
  assert.equal(titleOf(store.chat(chat.id)), "Image");
});
