"""Calls to a server over HTTP: patient with a lost or refused one, never with a wrong one."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import httpx

from relax_rollout.engine import EngineError

log = logging.getLogger(__name__)

GATEWAY_ERRORS = (502, 503, 504)
FIRST_WAIT_S = 0.2


class ServerUnreachableError(EngineError):
    """A server did not answer, however often it was asked, or answered as a gateway without one."""


class ServerRefusedError(EngineError):
    """A server answered that it will not."""

    def __init__(self, text: str, status: int, kind: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.kind = kind


class Http:
    """Of one server.

    Args:
        url: of the server.
        timeout_s: of a control call.
        retries: of a control call; sampling calls are never repeated here.
    """

    def __init__(self, url: str, timeout_s: float, retries: int) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._retries = retries
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False)

    async def control(self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None) -> Any:
        """A call that may be repeated: doing it twice is doing it once.

        Raises:
            ServerUnreachableError: no answer after all retries.
            ServerRefusedError: the server refused.
        """
        wait_s, last = FIRST_WAIT_S, ""
        for attempt in range(self._retries + 1):
            if attempt:
                log.warning("%s%s: %s; trying again", self.url, path, last)
                await asyncio.sleep(wait_s)
                wait_s *= 2
            try:
                return await self.once(path, body, timeout_s or self._timeout_s)
            except ServerUnreachableError as error:
                last = str(error)
        raise ServerUnreachableError(f"{last} ({self._retries + 1} attempts)")

    async def once(self, path: str, body: Mapping[str, Any], timeout_s: float | None) -> Any:
        """A call that is made once.

        Raises:
            ServerUnreachableError: no answer in time, a broken connection, or a gateway's error.
            ServerRefusedError: the server refused.
        """
        try:
            answer = await self._client.post(path, json=dict(body), timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise ServerUnreachableError(f"{self.url}{path} did not answer in {timeout_s} s") from error
        except httpx.TransportError as error:
            name = type(error).__name__
            raise ServerUnreachableError(f"{self.url}{path} cannot be reached: {name}: {error}") from error
        if answer.status_code in GATEWAY_ERRORS:
            raise ServerUnreachableError(f"{self.url}{path} answered HTTP {answer.status_code}")
        if answer.status_code != 200:
            raise ServerRefusedError(f"{self.url}{path}: {answer.text[:2000]}", answer.status_code)
        return answer.json() if answer.content else None

    async def alive(self, timeout_s: float) -> bool:
        """Whether the server answers at all."""
        try:
            return (await self._client.get("/model_info", timeout=timeout_s)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.aclose()


def relax_call(call: str, **fields: Any) -> dict[str, str]:
    """The body by which a message of ours travels; see ``plugin.control``."""
    return {"action": "relax:" + json.dumps({"call": call, **fields})}


def relax_answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer in the body that came back."""
    answer: dict[str, Any] = json.loads(body["message"])
    return answer
