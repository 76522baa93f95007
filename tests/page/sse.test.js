// torch_infini/serve/page/sse.js and api.js: events cut anywhere, comments, errors, streams that end early.

import assert from "node:assert/strict";
import { test } from "node:test";

import { ServerError, chunksOf, request, sentenceOf } from "../../torch_infini/serve/page/api.js";
import { EventParser, eventsOf } from "../../torch_infini/serve/page/sse.js";

function streamOf(pieces, cancelled = () => {}) {
  const left = [...pieces];
  return new ReadableStream({
    pull(controller) {
      if (left.length === 0) controller.close();
      else controller.enqueue(left.shift());
    },
    cancel: cancelled,
  });
}

async function all(iterable) {
  const found = [];
  for await (const one of iterable) found.push(one);
  return found;
}

const TEXT = 'data: {"a":"é☕😀"}\r\n\r\n: ping\n\ndata:two\ndata: lines\nevent: x\nid: 7\n\n\ndata:\r\rdata:  b\n\n';
const DATA = ['{"a":"é☕😀"}', "two\nlines", "", " b"];

test("events are the same wherever the bytes are cut", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  for (let size = 1; size <= bytes.length; size++) {
    const pieces = [];
    for (let at = 0; at < bytes.length; at += size) pieces.push(bytes.slice(at, at + size));
    assert.deepEqual(await all(eventsOf(streamOf(pieces))), DATA, `pieces of ${size} bytes`);
  }
});

test("an event that is not complete is none", () => {
  const parser = new EventParser();
  assert.deepEqual(parser.push("data: a\n"), []);
  assert.deepEqual(parser.push("\n"), ["a"]);
  assert.deepEqual(parser.push("data: b\n"), []);
});

test("a stream is cancelled when its reader leaves", async () => {
  let cancelled = false;
  const stream = streamOf([new TextEncoder().encode("data: a\n\n"), new Uint8Array(1)], () => (cancelled = true));
  for await (const event of eventsOf(stream)) {
    assert.equal(event, "a");
    break;
  }
  await new Promise(setImmediate);
  assert.ok(cancelled);
});

const chunks = (text) => all(chunksOf(streamOf([new TextEncoder().encode(text)])));

test("chunks end with [DONE]", async () => {
  assert.deepEqual(await chunks('data: {"x":1}\n\ndata: [DONE]\n\ndata: {"x":2}\n\n'), [{ x: 1 }]);
  await assert.rejects(chunks('data: {"x":1}\n\n'), { message: "The connection ended before the answer did." });
  await assert.rejects(chunks("data: {\n\n"), { message: "The server sent an answer that is not JSON." });
  const failed = chunks('data: {"error":{"message":"the engine has failed"}}\n\ndata: [DONE]\n\n');
  await assert.rejects(failed, new ServerError("The engine has failed.", 500));
});

test("errors are sentences", () => {
  assert.equal(sentenceOf(400, '{"error":{"message":"seed must be 1, got 2"}}'), "Seed must be 1, got 2.");
  assert.equal(sentenceOf(400, '{"error":"n is wrong!"}'), "N is wrong!");
  for (const text of ["<html>", "", "null", "{}", '{"error":{"message":5}}', '{"error":""}']) {
    assert.equal(sentenceOf(502, text), "The server answered with status 502.");
  }
});

test("requests: key, body, failures", async (context) => {
  const sent = [];
  const answers = [new Response("{}"), new Response('{"error":{"message":"no"}}', { status: 401 }), new TypeError("x")];
  context.mock.method(globalThis, "fetch", async (url, options) => {
    sent.push([String(url), options]);
    const answer = answers.shift();
    if (answer instanceof Error) throw answer;
    return answer;
  });
  await request("v1/models", { key: "sécret", body: { a: 1 } });
  const [url, { method, body, headers }] = sent[0];
  assert.ok(url.endsWith("/serve/v1/models"), "relative to the page's folder");
  assert.deepEqual([method, body, headers["Content-Type"]], ["POST", '{"a":1}', "application/json"]);
  assert.equal(Buffer.from(new Headers(headers).get("authorization"), "latin1").toString(), "Bearer sécret");
  await assert.rejects(request("x"), new ServerError("No.", 401));
  assert.deepEqual(sent[1][1].headers, {});
  await assert.rejects(request("x"), { message: /^The server does not answer: / });
});
