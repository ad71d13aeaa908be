"""The drain barrier of the swap."""

import asyncio

from relax_core.cluster.gate import Gate


def test_closing_waits_for_those_inside_and_holds_back_those_who_come_later():
    async def go() -> list[str]:
        gate, events, leave = Gate(), [], asyncio.Event()

        async def request(name: str) -> None:
            async with gate.passing():
                events.append(f"{name} in")
                await leave.wait()
                events.append(f"{name} out")

        async def release() -> None:
            await gate.close()
            events.append("released")

        early = asyncio.create_task(request("early"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(release())
        await asyncio.sleep(0)
        late = asyncio.create_task(request("late"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert events == ["early in"]
        leave.set()
        await closing
        await early
        assert not late.done()
        events.append("reclaimed")
        gate.open()
        await late
        return events

    assert asyncio.run(go()) == ["early in", "early out", "released", "reclaimed", "late in", "late out"]


def test_a_gate_that_is_closed_again_at_once_lets_nobody_slip_through():
    async def go() -> bool:
        gate = Gate()
        await gate.close()

        async def request() -> None:
            async with gate.passing():
                pass

        waiting = asyncio.create_task(request())
        await asyncio.sleep(0)
        gate.open()
        await gate.close()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return waiting.done()

    assert asyncio.run(go()) is False


def test_a_request_that_fails_leaves_too():
    async def go() -> None:
        gate = Gate()
        try:
            async with gate.passing():
                raise ValueError
        except ValueError:
            pass
        await asyncio.wait_for(gate.close(), 1)

    asyncio.run(go())
