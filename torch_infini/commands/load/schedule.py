"""Schedule: when the requests of a load are sent: at the random times of a rate, all at once, or N at a time."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from .client import Target, first_model, send, session_of
from .prompts import Prompt
from .results import Objective, Result, Summary


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return when requests arrive, in seconds from the first one.

    Args:
        count: How many.
        rate: Requests a second of a Poisson process.
        seed: The same seed gives the same times.
    """
    chance = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += chance.expovariate(rate)
    return times


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    rate: float,
    concurrency: int | None,
    seed: int,
    timeout: float,
    objective: Objective | None = None,
) -> tuple[Target, Summary]:
    """Send a request for each prompt.

    Args:
        target: Where to; if its model is "", the first one that the server lists.
        prompts: In the order of the requests.
        rate: As of arrivals; infinity: all at once.
        concurrency: How many requests run at a time, each of which begins when another ends; None: as they arrive.
        seed: As of arrivals.
        timeout: Seconds of a request, after which it fails.
        objective: What requests should take.

    Returns:
        The target, with its model, and what the requests took.
    """
    results = [Result(number) for number in range(len(prompts))]
    async with session_of(target, timeout) as session:
        if not target.model:
            target = replace(target, model=await first_model(session, target))
        begin = time.perf_counter()

        async def run(at: int, arrival: float | None = None) -> None:
            if arrival is not None:
                await asyncio.sleep(begin + arrival - time.perf_counter())
            result = results[at]
            result.start = time.perf_counter() - begin
            result.late = 0.0 if arrival is None else result.start - arrival
            await send(session, target, prompts[at], result)

        async def run_next(numbers: list[int]) -> None:
            while numbers:
                await run(numbers.pop())

        if concurrency is not None:
            numbers = [*reversed(range(len(prompts)))]
            await asyncio.gather(*(run_next(numbers) for _ in range(min(concurrency, len(prompts)))))
        elif math.isinf(rate):
            await asyncio.gather(*map(run, range(len(prompts))))
        else:
            await asyncio.gather(*(run(at, arrival) for at, arrival in enumerate(arrivals(len(prompts), rate, seed))))
        seconds = time.perf_counter() - begin
    return target, Summary(results, seconds, objective)
