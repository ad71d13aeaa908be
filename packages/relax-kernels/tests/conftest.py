"""Tests start without a choice of backend from outside, with uninitialised memory full of NaN."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import relax_kernels
import torch
from relax_kernels.testing import Target, targets


@pytest.fixture(params=targets(), ids=lambda target: f"{target.backend}-{target.device}")
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(autouse=True)
def nan_in_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is read before it is written shows."""

    def filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(torch.nan)
            return tensor

        return wrapper

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("RELAX_KERNELS_"):
            monkeypatch.delenv(name)
    yield
    relax_kernels.set_strict(None)
