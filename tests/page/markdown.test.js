// torch_infini/serve/page/markdown.js: blocks and inline parts, unfinished and hostile texts, time.

import assert from "node:assert/strict";
import { test } from "node:test";

import { blocksOf, partsOf } from "../../torch_infini/serve/page/markdown.js";

const plain = (text) => blocksOf(text).map(({ source, ...block }) => block);
const code = (text) => ({ kind: "code", text });
const em = (...parts) => ({ kind: "em", parts });
const strong = (...parts) => ({ kind: "strong", parts });

test("blocks", () => {
  const text = "# One #\ntext\nmore\n\n> a\n> b\n---\n```py x\n  # no\n\n```\n~~~\n```\n~~~\nend";
  assert.deepEqual(plain(text), [
    { kind: "heading", level: 1, text: "One" },
    { kind: "paragraph", text: "text\nmore" },
    { kind: "quote", text: "a\nb" },
    { kind: "rule" },
    { kind: "code", language: "py", text: "  # no\n" },
    { kind: "code", language: "", text: "```" },
    { kind: "paragraph", text: "end" },
  ]);
  assert.equal(blocksOf(text).map((block) => block.source).join("\n"), text.replace("more\n\n", "more\n"));
});

test("sessions of Python are no quotes", () => {
  const text = ">>> f(1)\n... 2\n>> x";
  assert.deepEqual(plain(text), [{ kind: "paragraph", text }]);
});

test("code that is still written, and code in a list", () => {
  assert.deepEqual(plain("```\na\n"), [{ kind: "code", language: "", text: "a\n" }]);
  const [list, block, rest] = plain("1. one:\n   ```sh\n   ls\n     -l\n   ```\n2. two");
  assert.deepEqual(list.items, [{ depth: 0, number: 1, text: "one:" }]);
  assert.deepEqual(block, { kind: "code", language: "sh", text: "ls\n  -l" });
  assert.deepEqual(rest.items, [{ depth: 0, number: 2, text: "two" }]);
});

test("lists", () => {
  const items = (text) => plain(text)[0].items.map((item) => [item.depth, item.number, item.text]);
  assert.deepEqual(items("- a\n  more\n  - b\n    1. c\n\n- d\n* * *"), [
    [0, null, "a\nmore"],
    [1, null, "b"],
    [2, 1, "c"],
    [0, null, "d"],
  ]);
  assert.deepEqual(items("    - a\n  - b\n12) c"), [[0, null, "a"], [0, null, "b"], [0, 12, "c"]]);
  assert.equal(plain("- a\ntext").length, 2);
  assert.equal(Math.max(...items([..."0123456789"].map((n) => `${" ".repeat(n)}- x`).join("\n")).map(([depth]) => depth)), 6);
});

test("inline parts", () => {
  const cases = {
    "a **b** *c* _d_ __e__": ["a ", strong("b"), " ", em("c"), " ", em("d"), " ", strong("e")],
    "***both*** **a *b* c**": [strong(em("both")), " ", strong("a ", em("b"), " c")],
    "`a*b*` ``a`b`` `` ` ``": [code("a*b*"), " ", code("a`b"), " ", code("`")],
    "a_b_c 2*3 * 4": ["a_b_c 2*3 * 4"],
    "**a *b": ["**a *b"],
    "*a **b*": [em("a **b")],
    "`a": ["`a"],
    "****": ["****"],
    "<img src=x onerror=alert(1)> &lt; [a](javascript:b)": ["<img src=x onerror=alert(1)> &lt; [a](javascript:b)"],
    "": [],
  };
  for (const [text, parts] of Object.entries(cases)) assert.deepEqual(partsOf(text), parts, text);
});

test("no text is lost", () => {
  const letters = ["a", " ", "*", "**", "_", "`", "``", "\n", "<", "-", "1. ", "#", "> "];
  const textOf = (parts) => parts.map((part) => (typeof part === "string" ? part : part.text ?? textOf(part.parts))).join("");
  let seed = 1;
  const random = () => (seed = (seed * 48271) % 2147483647);
  for (let round = 0; round < 5000; round++) {
    const text = Array.from({ length: 12 }, () => letters[random() % letters.length]).join("");
    const left = textOf(partsOf(text));
    assert.equal(left.replace(/[*_` ]/g, ""), text.replace(/[*_` ]/g, ""), JSON.stringify(text));
    assert.equal(blocksOf(text).map((block) => block.source).join("").replace(/\s/g, ""), text.replace(/\s/g, ""));
  }
});

test("hostile texts take no more than linear time", () => {
  for (const unit of ["*", "**a ", "_a", "`", "``a`", "- ", "> ", "```\n", "#", "1. \n", " - a\n", "* *"]) {
    const text = unit.repeat(100_000 / unit.length);
    const start = performance.now();
    for (const block of blocksOf(text)) partsOf(block.text ?? "");
    assert.ok(performance.now() - start < 5000, unit);
  }
});
