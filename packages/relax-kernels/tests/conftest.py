"""Tests start without a choice of backend from outside, with uninitialised memory full of NaN."""

import os
from collections.abc import Iterator

import pytest
import relax_kernels
from relax_kernels.testing import Target, nan_in_new_memory, targets


@pytest.fixture(params=targets(), ids=lambda target: f"{target.backend}-{target.device}")
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(autouse=True)
def memory_full_of_nan() -> Iterator[None]:
    with nan_in_new_memory():
        yield


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("RELAX_KERNELS_"):
            monkeypatch.delenv(name)
    yield
    relax_kernels.set_strict(None)
