"""The commands of Docker and of the machine that the image and the integration run are made of."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins, build_arguments, load_pins

DOCKERFILE = "docker/Dockerfile.npu"
IMAGE = "relax-npu:local"
_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_MOUNTS = (
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/usr/local/Ascend/driver",
    "/etc/ascend_install.info",
)
_SHARED_MEMORY = "200g"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: what it is for.
        command: program and arguments.
    """

    name: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"# {self.name}\n{shlex.join(self.command)}"


def build(image: str = IMAGE, pins: Pins | None = None) -> Step:
    """Builds the image from the repository's root, with every pin as an argument."""
    arguments = [
        part
        for name, value in sorted(build_arguments(pins or load_pins()).items())
        for part in ("--build-arg", f"{name}={value}")
    ]
    return Step("build the image", ("docker", "build", "--file", DOCKERFILE, "--tag", image, *arguments, "."))


def run(dies: Sequence[int], *command: str, image: str = IMAGE, name: str = "run in the image") -> Step:
    """Runs a command in the image with some dies and the host's driver."""
    devices = [part for die in dies for part in ("--device", f"/dev/davinci{die}")]
    devices += [part for node in _NODES for part in ("--device", node)]
    mounts = [part for path in _MOUNTS for part in ("--volume", f"{path}:{path}:ro")]
    fixed = ("docker", "run", "--rm", "--network", "host", "--shm-size", _SHARED_MEMORY)
    return Step(name, (*fixed, *devices, *mounts, image, *command))


def check(dies: Sequence[int], image: str = IMAGE) -> tuple[Step, ...]:
    """What shows that an image works on this machine's dies."""
    return (
        run(dies, "relax-npu", "doctor", image=image, name="examine the machine from inside the image"),
        run(
            dies,
            *("python3", "-m", "relax_kernels", "check", "--backend", "ascend"),
            image=image,
            name="compare the operators with their references",
        ),
    )


def missing(machine: Machine) -> list[str]:
    """What this machine lacks to run an NPU container; [] when nothing does."""
    lacking = [f"{path} is not there" for path in (*_NODES, *_MOUNTS) if not machine.path(path).exists()]
    if not visible_dies(machine):
        lacking.insert(0, "no /dev/davinci<n>: there is no NPU, or it is not passed on")
    folders = machine.environment.get("PATH", "").split(":")
    if not any(folder and (machine.path(folder) / "docker").exists() for folder in folders):
        lacking.append("docker is not on PATH")
    return lacking


def visible_dies(machine: Machine) -> list[int]:
    """The numbers of the dies under /dev."""
    names = [path.name.removeprefix("davinci") for path in machine.path("/dev").glob("davinci*")]
    return sorted(int(name) for name in names if name.isdigit())


def integration(dies: Sequence[int], image: str, *, root: Path, built: bool = False) -> tuple[Step, ...]:
    """The run on real NPUs: image, examination, operators, a training step of a 9B's shapes, the engine."""
    inside = str(root)
    smoke = ("python3", "-m", "relax_npu.smoke", "--dies", str(len(dies)))
    steps = (
        *check(dies, image),
        run(dies, *smoke, image=image, name="one training step with a 9B model's shapes"),
        Step(
            "the engine's contract",
            (
                *run(dies, image=image).command[:-1],
                *("--volume", f"{inside}:/src/tests:ro", image),
                *("python3", "-m", "pytest", "/src/tests/packages/relax-rollout/tests", "-k", "contract"),
            ),
        ),
    )
    return steps if built else (build(image), *steps)
