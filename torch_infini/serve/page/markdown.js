// A small part of Markdown, read into plain objects that view.js makes nodes of: code, lists, headings, quotes, rules,
// bold, italic. All else, HTML and links too, stays the text that it is. Takes time in proportion to the text.

const FENCE = /^\s*(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const HEADING = /^(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const DEEPEST = 6; // of lists in lists
const RULE = /^\s*([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^\s*>(?!>)\s?(.*)$/; // not >>>, the prompt of Python

// Returns the blocks of a text: {kind, source, ...}; a block is the same where its source is.
export function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const begin = at;
    const [block, next] = readBlock(lines, at);
    at = next;
    blocks.push({ ...block, source: lines.slice(begin, at).join("\n") });
  }
  return blocks;
}

function readBlock(lines, at) {
  const line = lines[at];
  const fence = line.match(FENCE);
  if (fence) return readCode(lines, at, fence);
  const heading = line.match(HEADING);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] }, at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return gather(lines, at, QUOTE, "quote");
  if (ITEM.test(line)) return readList(lines, at);
  const begin = at++;
  while (at < lines.length && isPlain(lines[at])) at++;
  return [{ kind: "paragraph", text: lines.slice(begin, at).join("\n") }, at];
}

function isPlain(line) {
  return line.trim() !== "" && ![FENCE, HEADING, RULE, QUOTE, ITEM].some((form) => form.test(line));
}

// A fence without an end reaches to the end of the text: it may still be written.
function readCode(lines, at, [opening, mark, language]) {
  const indent = opening.length - opening.trimStart().length;
  const code = [];
  for (at++; at < lines.length; at++) {
    const line = lines[at].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) return [codeBlock(), at + 1];
    code.push(lines[at].slice(Math.min(indent, lines[at].length - lines[at].trimStart().length)));
  }
  return [codeBlock(), at];

  function codeBlock() {
    return { kind: "code", language: language.trim().split(/\s/)[0], text: code.join("\n") };
  }
}

function gather(lines, at, form, kind) {
  const found = [];
  for (; at < lines.length && form.test(lines[at]); at++) found.push(lines[at].match(form)[1]);
  return [{ kind, text: found.join("\n") }, at];
}

// Items are flat, with a depth; view.js nests them. An empty line ends the list unless another item follows it.
function readList(lines, at) {
  const items = [];
  const indents = [];
  for (; at < lines.length; at++) {
    const item = RULE.test(lines[at]) ? null : lines[at].match(ITEM);
    if (item) {
      const [, space, mark, text] = item;
      while (indents.length > 0 && indents.at(-1) > space.length) indents.pop();
      if (indents.length === 0 || indents.at(-1) < space.length) indents.push(space.length);
      items.push({ depth: Math.min(indents.length - 1, DEEPEST), number: /\d/.test(mark) ? parseInt(mark, 10) : null, text });
    } else if (lines[at].trim() === "") {
      if (!ITEM.test(lines[at + 1] ?? "") || RULE.test(lines[at + 1])) break;
    } else if (isPlain(lines[at]) && /^\s/.test(lines[at])) {
      items.at(-1).text += `\n${lines[at].trim()}`;
    } else {
      break;
    }
  }
  return [{ kind: "list", items }, at];
}

const WORD = /[\p{L}\p{N}_]/u;

// Returns the parts of a line: strings, {kind: "code", text} and {kind: "strong" or "em", parts}.
export function partsOf(text) {
  const open = [{ mark: "", parts: [] }];
  const unclosed = new Set(); // lengths of backquotes of which no more follow
  const add = (part) => {
    const { parts } = open.at(-1);
    if (typeof part === "string" && typeof parts.at(-1) === "string") parts.push(parts.pop() + part);
    else if (part !== "") parts.push(part);
  };
  // What was opened and not closed is text.
  const drop = () => {
    const { mark, parts } = open.pop();
    add(mark);
    parts.forEach(add);
  };
  const marks = /`+|\*+|_+/g;
  let begin = 0;
  for (let found; (found = marks.exec(text)); begin = marks.lastIndex) {
    add(text.slice(begin, found.index));
    const run = found[0];
    if (run[0] === "`") {
      const end = unclosed.has(run.length) ? -1 : closing(text, run, marks.lastIndex);
      if (end < 0) unclosed.add(run.length);
      else marks.lastIndex = end + run.length;
      add(end < 0 ? run : { kind: "code", text: unpadded(text.slice(found.index + run.length, end)) });
    } else if (run.length > 3) {
      add(run);
    } else {
      const [before, after] = [text[found.index - 1] ?? " ", text[marks.lastIndex] ?? " "];
      const inWord = run[0] === "_" && WORD.test(before) && WORD.test(after);
      const [opens, closes] = [!/\s/.test(after) && !inWord, !/\s/.test(before) && !inWord];
      emphasize(run, opens, closes);
    }
  }
  add(text.slice(begin));
  while (open.length > 1) drop();
  return open[0].parts;

  function emphasize(run, opens, closes) {
    for (let left = run.length; left > 0; ) {
      const one = run[0];
      const top = open.at(-1).mark;
      // A run of three closes what was opened last first.
      const mark = left === 2 || (left === 3 && !(closes && top === one)) ? one + one : one;
      left -= mark.length;
      const at = closes ? open.findLastIndex((other) => other.mark === mark) : -1;
      if (at > 0) {
        while (open.length - 1 > at) drop();
        const { parts } = open.pop();
        add({ kind: mark.length === 2 ? "strong" : "em", parts });
      } else if (opens && !open.some((other) => other.mark === mark)) {
        open.push({ mark, parts: [] });
      } else {
        add(mark);
      }
    }
  }
}

// Returns where a run of backquotes of the same length begins, or -1.
function closing(text, run, from) {
  const runs = /`+/g;
  runs.lastIndex = from;
  for (let found; (found = runs.exec(text)); ) if (found[0].length === run.length) return found.index;
  return -1;
}

function unpadded(text) {
  return /^ .*\S.* $/s.test(text) ? text.slice(1, -1) : text;
}
