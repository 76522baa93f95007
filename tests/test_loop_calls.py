"""LoopCalls: order, one wake-up for many calls, calls that raise, and loops that are closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from torch_infini.engine.loop_calls import LoopCalls


def test_calls_run_in_order_on_the_loop() -> None:
    seen: list[tuple[int, int]] = []

    async def run() -> None:
        calls = LoopCalls(asyncio.get_running_loop())
        done = asyncio.Event()

        def add(first: int) -> None:
            for i in range(first, first + 1000):
                calls.add(lambda i=i: seen.append((i, threading.get_ident())))

        threads = [threading.Thread(target=add, args=(n * 1000,)) for n in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(lambda: [thread.join() for thread in threads])
        calls.add(done.set)
        await asyncio.wait_for(done.wait(), 10)

    asyncio.run(run())
    assert {ident for _, ident in seen} == {threading.get_ident()}
    for n in range(3):  # those of one thread are in its order
        assert [i for i, _ in seen if i // 1000 == n] == list(range(n * 1000, n * 1000 + 1000))


def test_waiting_calls_wake_the_loop_once() -> None:
    async def run() -> tuple[int, list[int]]:
        loop = asyncio.get_running_loop()
        woken, seen = 0, []
        wake = loop.call_soon_threadsafe

        def counted(*args: Any, **more: Any) -> asyncio.Handle:
            nonlocal woken
            woken += 1
            return wake(*args, **more)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]
        calls = LoopCalls(loop)
        for round in range(2):
            for i in range(10):  # the loop runs none of them before it is its turn
                calls.add(seen.append, 10 * round + i)
            await asyncio.sleep(0)
        return woken, seen

    assert asyncio.run(run()) == (2, list(range(20)))


def test_a_call_that_raises_or_adds_another() -> None:
    async def run() -> tuple[list[str], list[BaseException]]:
        loop = asyncio.get_running_loop()
        seen: list[str] = []
        errors: list[BaseException] = []
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        calls = LoopCalls(loop)
        calls.add(lambda: 1 / 0)
        calls.add(lambda: calls.add(seen.append, "added by a call"))
        calls.add(seen.append, "after the error")
        await asyncio.sleep(0.01)
        return seen, errors

    seen, errors = asyncio.run(run())
    assert seen == ["after the error", "added by a call"]
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_calls_in_a_closed_loop_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    calls = LoopCalls(loop)
    loop.close()
    for _ in range(3):
        calls.add(print, "never")
