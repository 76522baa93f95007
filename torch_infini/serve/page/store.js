// Chats and settings in the browser's storage: a key for each chat, so that two tabs do not overwrite each other's.
// Where storage is full or forbidden, all is kept in memory, and `failed` is called once with a sentence.

export class Store {
  #storage;
  #prefix;
  #memory = new Map();
  #failed;

  // `storage` is localStorage or the like; null: there is none. The prefix tells servers at one origin apart.
  constructor(storage, prefix, failed = () => {}) {
    this.#storage = storage;
    this.#prefix = `${prefix}:`;
    this.#failed = failed;
  }

  read(name) {
    const text = this.#memory.get(name) ?? this.#storage?.getItem(this.#prefix + name) ?? null;
    try {
      return text === null ? null : JSON.parse(text);
    } catch {
      return null; // Something else wrote it.
    }
  }

  write(name, value) {
    const text = JSON.stringify(value);
    this.#memory.delete(name);
    try {
      if (this.#storage === null) throw new Error();
      this.#storage.setItem(this.#prefix + name, text);
    } catch {
      this.#memory.set(name, text);
      this.#failed("The browser stores no more: what is new is lost when this tab is closed. Export or delete chats.");
      this.#failed = () => {};
    }
  }

  remove(name) {
    this.#memory.delete(name);
    this.#storage?.removeItem(this.#prefix + name);
  }

  // Returns all chats, the one that changed last first.
  chats() {
    const names = new Set(this.#memory.keys());
    for (let i = 0; i < (this.#storage?.length ?? 0); i++) {
      const key = this.#storage.key(i);
      if (key.startsWith(this.#prefix)) names.add(key.slice(this.#prefix.length));
    }
    const chats = [...names].filter((name) => name.startsWith("chat:")).map((name) => this.chat(name.slice(5)));
    return chats.filter((chat) => chat !== null).sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0));
  }

  // Returns a chat, or null if there is none; what is no message is left out. An answer that has no end was cut by the page's own end.
  chat(id) {
    const chat = this.read(`chat:${id}`);
    if (chat?.id !== id || !Array.isArray(chat.messages)) return null;
    chat.messages = chat.messages.filter((message) => typeof message?.content === "string");
    for (const message of chat.messages) {
      if (message.images !== undefined) message.images = [message.images].flat().filter(isImage);
      if (message.role === "assistant" && !message.finish && !message.error) message.finish = "stopped";
    }
    return chat;
  }

  save(chat) {
    this.write(`chat:${chat.id}`, chat);
  }

  // Whether a key of the storage is that of a chat here.
  isChat(key) {
    return key === null || key.startsWith(`${this.#prefix}chat:`);
  }
}

export function newChat(system) {
  const now = Date.now();
  const random = crypto.getRandomValues(new Uint32Array(2)); // randomUUID is missing outside of HTTPS and localhost
  const id = now.toString(36) + [...random].map((number) => number.toString(36)).join("");
  return { id, title: "", system, messages: [], created: now, updated: now };
}

const isImage = (url) => typeof url === "string" && url.startsWith("data:image/");

// Returns a chat's name: the given one, or the beginning of its first message.
export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  const line = (first?.content ?? "").trim().split("\n")[0] || (first?.images?.length ? "Image" : "");
  return chat.title || (line.length > 60 ? `${line.slice(0, 59)}…` : line) || "New chat";
}
