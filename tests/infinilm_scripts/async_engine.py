"""The asynchronous engine: started, several requests streamed at once, one aborted, a conversation, stopped.

python async_engine.py FOLDER NEW_TOKENS PROMPT...
"""

import asyncio
import json
import sys

from infinilm.llm import AsyncLLMEngine, EngineConfig, SamplingParams

path, new, prompts = sys.argv[1], int(sys.argv[2]), sys.argv[3:]


def show(name, value):
    print(json.dumps({"name": name, "value": value}))


async def read(engine, request):
    ids, text, reason = [], "", None
    async for output in engine.stream_request(request):
        if output.token_id is not None and output.token_id >= 0:
            ids.append(output.token_id)
        text += output.token_text
        if output.finished:
            reason = str(output.finish_reason)
    return {"ids": ids, "text": text, "reason": reason is not None}


async def main():
    config = EngineConfig(
        model_path=path, device="cpu", dtype="float32", max_batch_size=4, max_tokens=new, num_blocks=64, block_size=16
    )
    engine = AsyncLLMEngine(config)
    engine.start()
    show("running", engine.is_running)
    greedy = SamplingParams(temperature=1.0, top_p=0.8, top_k=1, max_tokens=new)
    requests = [
        engine.add_request(prompt=prompt, sampling_params=greedy.clone(), request_id=f"request-{i}")
        for i, prompt in enumerate(prompts)
    ]
    show("ids of requests", [request.request_id for request in requests])
    show("streams", await asyncio.gather(*(read(engine, request) for request in requests)))
    show("finished", [request.is_finished() for request in requests])

    long = engine.add_request(
        prompt=prompts[0], sampling_params=SamplingParams(max_tokens=500, top_k=1, ignore_eos=True)
    )
    seen = 0
    async for _ in engine.stream_request(long):
        seen += 1
        if seen == 3:
            long.abort()
            break
    show("aborted after", seen)

    ids = engine.add_request(prompt_token_ids=[5, 6, 7, 8], sampling_params=greedy)
    show("by ids", (await read(engine, ids))["ids"])
    chat = engine.add_chat_request([{"role": "user", "content": prompts[0]}], sampling_params=greedy)
    show("chat", (await read(engine, chat))["ids"])
    engine.stop()
    show("stopped", not engine.is_running)


asyncio.run(main())
