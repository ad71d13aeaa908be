"""The versions of the Ascend stack that relax-npu is built for, from pins.toml."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Source:
    """A project that the image builds.

    Attributes:
        url: of its repository.
        release: its tag or branch.
        commit: what is built; "" where the tag decides.
    """

    url: str
    release: str
    commit: str


@dataclass(frozen=True)
class Pins:
    """See pins.toml for what each one is."""

    python: tuple[str, ...]
    torch: str
    torch_npu: str
    cann: str
    driver: tuple[str, ...]
    firmware: Mapping[str, str]
    soc: str
    sgl_soc: str
    base_image: str
    triton_ascend_wheels: str
    packages: Mapping[str, str]
    sources: Mapping[str, Source]


def load_pins() -> Pins:
    """Reads pins.toml of this package."""
    data = tomllib.loads((files("relax_npu") / "pins.toml").read_text())
    return Pins(
        python=tuple(data["python"]),
        torch=data["torch"],
        torch_npu=data["torch-npu"],
        cann=data["cann"],
        driver=tuple(data["driver"]),
        firmware=dict(data["firmware"]),
        soc=data["soc"],
        sgl_soc=data["sgl-soc"],
        base_image=data["image"]["base"],
        triton_ascend_wheels=data["image"]["triton-ascend-wheels"],
        packages=dict(data["packages"]),
        sources={name: Source(**told) for name, told in data["sources"].items()},
    )


def build_arguments(pins: Pins) -> dict[str, str]:
    """Every pin as a build argument of docker/Dockerfile.npu, by the argument's name."""
    arguments = {
        "BASE_IMAGE": pins.base_image,
        "TRITON_ASCEND_WHEELS": pins.triton_ascend_wheels,
        "TORCH": pins.torch,
        "TORCH_NPU": pins.torch_npu,
        "FLA_SOC": pins.soc,
        "SGL_SOC": pins.sgl_soc,
    }
    arguments |= {name.upper().replace("-", "_"): version for name, version in pins.packages.items()}
    for name, source in pins.sources.items():
        prefix = name.upper().replace("-", "_")
        arguments |= {f"{prefix}_URL": source.url, f"{prefix}_REF": source.commit or source.release}
    return arguments
