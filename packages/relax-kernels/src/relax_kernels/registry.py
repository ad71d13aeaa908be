"""Which backend serves a call: by argument, by environment, or the best that is able."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from torch.amp.autocast_mode import is_autocast_available

from relax_kernels.contract import ENTRY_POINT_GROUP, Backend, Call
from relax_kernels.errors import BackendUnavailable, InvalidInput, NoBackend

logger = logging.getLogger(__name__)
PREFIX = "RELAX_KERNELS_"
STRICT_VARIABLE = f"{PREFIX}STRICT"
_SWITCH = {"": False, "0": False, "false": False, "1": True, "true": True}

_strict: bool | None = None
_logged: set[str] = set()


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call and, for each of the others, why it does not."""

    op: str
    chosen: str | None
    detail: str
    """What would run in the chosen backend, or why nothing would."""
    others: tuple[tuple[str, str], ...]
    """(backend, reason) of every other backend known, also of those that could not be loaded."""

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.chosen or 'no backend'} ({self.detail})"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.others])


@dataclass(frozen=True)
class _Loaded:
    backends: tuple[Backend, ...]
    unavailable: tuple[tuple[str, str], ...]


@cache
def _load() -> _Loaded:
    found: dict[str, Backend] = {}
    unavailable: list[tuple[str, str]] = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        try:
            backend = point.load()()
        except (ImportError, BackendUnavailable) as error:
            unavailable.append((point.name, f"not usable here: {error}"))
            continue
        except Exception as error:
            error.add_note(
                f"while loading the entry point {point.name} = {point.value} of {ENTRY_POINT_GROUP}"
            )
            raise
        if not isinstance(backend, Backend) or backend.name != point.name:
            raise TypeError(f"entry point {point.name} = {point.value} does not give a Backend of that name")
        if backend.name in found:
            raise TypeError(f"two entry points of {ENTRY_POINT_GROUP} have the name {point.name}")
        found[backend.name] = backend
    is_strict()  # a value that says nothing is refused, also where nothing would stand in
    ordered = sorted(found.values(), key=lambda backend: -backend.priority)
    _warn_of_variables({op for backend in ordered for op in backend.operators})
    return _Loaded(tuple(ordered), tuple(unavailable))


def _warn_of_variables(operators: set[str]) -> None:
    known = {STRICT_VARIABLE, *map(environment_variable, operators)}
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable not in known:
            _log_once(logging.WARNING, f"the environment variable {variable} names no operator")


def backends() -> tuple[Backend, ...]:
    """Return the backends that could be loaded, best first."""
    return _load().backends


def unavailable_backends() -> tuple[tuple[str, str], ...]:
    """Return (name, reason) of the backends that are installed but not usable here."""
    return _load().unavailable


def set_strict(strict: bool | None) -> None:
    """Forbid (True) or allow (False) that a worse backend stands in; None: as RELAX_KERNELS_STRICT says.

    A stand-in is a backend used because the one named by the environment, or a better one made for the
    device, does not serve the call. Without strict it is logged once for each reason; with strict NoBackend
    is raised.
    """
    global _strict
    _strict = strict


def is_strict() -> bool:
    """Tell whether stand-ins are forbidden. Raises InvalidInput if the environment says neither."""
    if _strict is not None:
        return _strict
    given = os.environ.get(STRICT_VARIABLE, "")
    if given.lower() not in _SWITCH:
        raise InvalidInput(f"{STRICT_VARIABLE} must be 1, true, 0 or false, given {given!r}")
    return _SWITCH[given.lower()]


def environment_variable(op: str) -> str:
    """Return the variable whose value names the backend for one operator."""
    return f"{PREFIX}{op.upper()}"


def _inability(backend: Backend, call: Call) -> str | None:
    if call.op not in backend.operators:
        return "does not have this operator"
    if backend.device_types is not None and call.device_type not in backend.device_types:
        return f"runs on {', '.join(sorted(backend.device_types))}, not on {call.device_type}"
    return backend.refusal(call)


def _meant_for(backend: Backend, call: Call) -> bool:
    right_device = backend.device_types is not None and call.device_type in backend.device_types
    return right_device and call.op in backend.operators


def _named(name: str, source: str, call: Call) -> Backend:
    for backend in backends():
        if backend.name == name:
            return backend
    known = ", ".join(backend.name for backend in backends())
    missing = dict(_load().unavailable).get(name, "no such backend is installed")
    raise NoBackend(f"{call.op}: {source} asks for {name!r}: {missing}; available: {known}")


def _log_once(level: int, message: str) -> None:
    if message not in _logged:
        _logged.add(message)
        logger.log(level, message)


def choose(call: Call, backend: str | None = None) -> Backend:
    """Return the backend that will serve a call.

    `backend` (an argument of the public operators) is binding. Else the environment variable
    RELAX_KERNELS_<OP> is followed, else the backend of highest priority that serves the call. A choice by
    argument or environment is logged once (info), a stand-in too (warning). Raises NoBackend.
    """
    if backend is not None:
        asked = _named(backend, "the argument backend", call)
        reason = _inability(asked, call)
        if reason is not None:
            raise NoBackend(f"{call.op}: backend {backend!r} {reason}")
        _log_once(logging.INFO, f"{call.op}: {backend} by argument")
        return asked

    passed_over: list[str] = []
    variable = environment_variable(call.op)
    wanted = os.environ.get(variable)
    if wanted:
        asked = _named(wanted, f"the environment variable {variable}", call)
        reason = _inability(asked, call)
        if reason is None:
            _log_once(logging.INFO, f"{call.op}: {wanted} by {variable}")
            return asked
        passed_over.append(f"{wanted} (from {variable}): {reason}")

    for candidate in backends():
        reason = _inability(candidate, call)
        if reason is None:
            _accept_stand_in(call, candidate, passed_over)
            return candidate
        if _meant_for(candidate, call):
            passed_over.append(f"{candidate.name}: {reason}")
    raise NoBackend(str(_explanation(call, None)))


def _accept_stand_in(call: Call, candidate: Backend, passed_over: list[str]) -> None:
    if not passed_over:
        return
    reasons = "; ".join(passed_over)
    if is_strict():
        raise NoBackend(f"{call.op}: {candidate.name} would stand in, which strict forbids ({reasons})")
    _log_once(logging.WARNING, f"{call.op}: {candidate.name} stands in ({reasons})")


def implementation(call: Call, backend: str | None) -> Callable[..., Any]:
    """Return the function that will serve a call.

    It computes in the dtypes that the operator promises under autocast too, which would else cast its
    products, and not what they meet.
    """
    function = choose(call, backend).implementation(call.op)
    device = call.device_type
    if is_autocast_available(device) and torch.is_autocast_enabled(device):
        exact: Callable[..., Any] = torch.autocast(device, enabled=False)(function)
        return exact
    return function


def _explanation(call: Call, chosen: Backend | None) -> Explanation:
    others = []
    for other in backends():
        if chosen is None or other.name != chosen.name:
            default = f"would serve it, priority {other.priority}"
            others.append((other.name, _inability(other, call) or default))
    detail = "no backend serves this call" if chosen is None else chosen.describe(call)
    name = None if chosen is None else chosen.name
    return Explanation(call.op, name, detail, (*others, *_load().unavailable))


def explain_call(call: Call, backend: str | None = None) -> Explanation:
    """Explain the choice for a described call; see `relax_kernels.explain`."""
    try:
        return _explanation(call, choose(call, backend))
    except NoBackend as error:
        unserved = _explanation(call, None)
        return Explanation(call.op, None, str(error).splitlines()[0], unserved.others)
