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
SAMPLER_CALLS = 32
"""Calls at once of one client."""


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
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._client = self._new_client()
        self._samplers: list[tuple[httpx.AsyncClient, set[object]]] = []

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=SAMPLER_CALLS)
        return httpx.AsyncClient(
            base_url=self.url, limits=limits, timeout=None, trust_env=False, verify=self._tls
        )

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
        return await self._post(self._client, path, body, timeout_s)

    async def _post(
        self, client: httpx.AsyncClient, path: str, body: Mapping[str, Any], timeout_s: float | None
    ) -> Any:
        try:
            answer = await client.post(path, json=dict(body), timeout=timeout_s)
        except httpx.TimeoutException as error:
            raise ServerUnreachableError(f"{self.url}{path} did not answer in {timeout_s} s") from error
        except httpx.TransportError as error:
            name = type(error).__name__
            raise ServerUnreachableError(f"{self.url}{path} cannot be reached: {name}: {error}") from error
        if answer.status_code in GATEWAY_ERRORS:
            raise ServerUnreachableError(f"{self.url}{path} answered HTTP {answer.status_code}")
        if not answer.is_success:
            raise ServerRefusedError(f"{self.url}{path}: {answer.text[:2000]}", answer.status_code)
        return answer.json() if answer.content else None

    async def sample(self, body: Mapping[str, Any]) -> Any:
        """A ``/generate`` call, made once and waited for as long as it takes.

        A client of httpx looks through all of its connections at each call and each answer, so a thousand
        calls at once are spread over several clients.

        Raises:
            ServerUnreachableError: see :meth:`once`.
            ServerRefusedError: see :meth:`once`.
        """
        free = next((pair for pair in self._samplers if len(pair[1]) < SAMPLER_CALLS), None)
        if free is None:
            free = self._new_client(), set()
            self._samplers.append(free)
        client, calls = free
        call = object()
        calls.add(call)
        try:
            return await self._post(client, "/generate", body, None)
        finally:
            calls.discard(call)

    async def get(self, path: str, timeout_s: float = 5.0) -> Any:
        """What a GET answers.

        Raises:
            httpx.HTTPError: no answer in time, or not 200.
            ValueError: the answer is no JSON.
        """
        answer = await self._client.get(path, timeout=timeout_s)
        return answer.raise_for_status().json()

    async def delete(self, path: str, timeout_s: float = 5.0) -> None:
        """A DELETE; that there is nothing to delete is no error."""
        try:
            await self._client.delete(path, timeout=timeout_s)
        except httpx.TransportError as error:
            raise ServerUnreachableError(f"{self.url}{path} cannot be reached: {error}") from error

    async def alive(self, timeout_s: float) -> bool:
        """Whether the server answers at all."""
        try:
            return (await self._client.get("/model_info", timeout=timeout_s)).status_code == 200
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Give up the connections."""
        for client in (self._client, *(client for client, _ in self._samplers)):
            await client.aclose()


def relax_call(call: str, **fields: Any) -> dict[str, str]:
    """The body by which a message of ours travels; see ``plugin.control``."""
    return {"action": "relax:" + json.dumps({"call": call, **fields})}


def relax_answer(body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer in the body that came back."""
    answer: dict[str, Any] = json.loads(body["message"])
    return answer
