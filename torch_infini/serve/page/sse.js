// Server-sent events in the body of a fetch() response: EventSource can send neither a body nor a key.
// Only data is read; comments (": ping") and other fields mean nothing here.

export class EventParser {
  #rest = "";
  #data = [];

  // Takes the next text, cut anywhere, and returns the data of the events that it completes.
  push(text) {
    const events = [];
    const all = this.#rest + text;
    let begin = 0;
    // A \r at the end waits for the next text, which may begin with its \n.
    for (const end of all.matchAll(/\r\n|\n|\r(?=[^])/g)) {
      this.#line(all.slice(begin, end.index), events);
      begin = end.index + end[0].length;
    }
    this.#rest = all.slice(begin);
    return events;
  }

  #line(line, events) {
    if (line === "") {
      if (this.#data.length > 0) events.push(this.#data.join("\n"));
      this.#data = [];
    } else if (line.startsWith("data:")) {
      this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    }
  }
}

// Yields the data of each event of a stream of bytes. The stream is cancelled when the caller leaves the loop.
export async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
