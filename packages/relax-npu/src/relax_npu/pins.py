"""The versions of the Ascend stack that relax-npu is built for, from pins.toml."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Pins:
    """See pins.toml for what each one is."""

    python: tuple[str, ...]
    torch: str
    torch_npu: str
    cann: str
    driver: tuple[str, ...]
    soc: str


def load_pins() -> Pins:
    """Reads pins.toml of this package."""
    data = tomllib.loads((files("relax_npu") / "pins.toml").read_text())
    return Pins(
        python=tuple(data["python"]),
        torch=data["torch"],
        torch_npu=data["torch-npu"],
        cann=data["cann"],
        driver=tuple(data["driver"]),
        soc=data["soc"],
    )
