"""A client of the server with nothing but the standard library: models, health, an answer, and the same as a stream.

python client.py PORT PROMPT NEW_TOKENS
"""

import http.client
import json
import sys

port, prompt, new = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def show(name, value):
    print(json.dumps({"name": name, "value": value}))


def call(method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    return connection.getresponse()


response = call("GET", "/health")
show("health", [response.status, json.loads(response.read())])
response = call("GET", "/v1/models")
models = json.loads(response.read())
show("models", [response.status, models["object"], len(models["data"])])
body = {
    "model": models["data"][0]["id"],
    "messages": [{"role": "user", "content": prompt}],
    "max_tokens": new,
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 0.8,
}
for path in ("/chat/completions", "/v1/chat/completions"):
    response = call("POST", path, {**body, "stream": False})
    answer = json.loads(response.read())
    show(f"status of {path}", response.status)
    show(f"answer of {path}", [answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]])
    response = call("POST", path, {**body, "stream": True})
    show(f"type of {path}", response.getheader("Content-Type"))
    pieces, reasons, done = [], [], False
    for line in response:
        line = line.decode().strip()
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            done = True
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            reasons.append(choice.get("finish_reason"))
    show(f"stream of {path}", ["".join(pieces), [reason for reason in reasons if reason], done])
    show(f"pieces of {path}", len([piece for piece in pieces if piece]))
response = call("POST", "/chat/completions", {**body, "messages": "what"})
show("bad", [response.status, bool(response.read())])
