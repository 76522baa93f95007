// An answer as it arrives: its text, its reasoning, why it ended, and how fast it was.

export function newAnswer() {
  return { role: "assistant", content: "", reasoning: "" };
}

// Adds the chunks of a stream to an answer; calls `changed` after each. `now` gives milliseconds, `start` is its value
// when the request was sent. The answer's figures hold for what came, also where the stream fails.
export async function receive(answer, chunks, start, changed, now = () => performance.now()) {
  let first;
  for await (const chunk of chunks) {
    const [choice] = chunk.choices ?? [];
    if (chunk.model) answer.model = chunk.model;
    const { content, reasoning_content: reasoning } = choice?.delta ?? {};
    if (content || reasoning) {
      const time = now();
      first ??= time;
      answer.content += content ?? "";
      answer.reasoning += reasoning ?? "";
      answer.figures = figuresOf((answer.figures?.tokens ?? 0) + 1, true, start, first, time);
    }
    if (choice?.finish_reason) answer.finish = choice.finish_reason;
    if (chunk.usage && first !== undefined) {
      answer.figures = figuresOf(chunk.usage.completion_tokens, false, start, first, now());
    }
    changed();
  }
}

// `about`: a chunk was counted as a token, but may have several where the client reads slowly.
function figuresOf(tokens, about, start, first, last) {
  const rate = tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null;
  return { tokens, about, first: (first - start) / 1000, rate };
}

// Returns the line below an answer: figures, and why it ended if that was not the model.
export function lineOf(answer) {
  const parts = [];
  if (answer.figures) {
    const { tokens, about, first, rate } = answer.figures;
    parts.push(`${about ? "about " : ""}${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (rate !== null) parts.push(`${rate.toFixed(rate < 10 ? 2 : 1)} tokens/s`);
    parts.push(`first token after ${first.toFixed(2)} s`);
  }
  if (answer.finish === "length") parts.push("ended at the limit of tokens");
  if (answer.finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
