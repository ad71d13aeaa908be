"""The commands of Docker and of the machine that the image and the integration run are made of."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_npu.doctor.machine import Machine
from relax_npu.pins import Pins, build_arguments, load_pins

DOCKERFILE = "docker/Dockerfile.npu"
IMAGE = "relax-npu:local"
_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# Each line: where the host may have it, the usual place first.
_MOUNTS = (
    ("/usr/local/dcmi",),
    ("/usr/local/bin/npu-smi", "/usr/local/sbin/npu-smi"),
    ("/usr/local/Ascend/driver",),
    ("/etc/ascend_install.info",),
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


def mounts(machine: Machine) -> list[str]:
    """What of the host a container sees: for each thing the place where it is, else the usual one."""
    return [next((path for path in places if machine.exists(path)), places[0]) for places in _MOUNTS]


def build(image: str = IMAGE, pins: Pins | None = None, *, pip_config: Path | None = None) -> Step:
    """Builds the image from the repository's root, with every pin as an argument.

    Args:
        image: its tag.
        pins: those of this package when None.
        pip_config: pip's configuration for the build; never part of the image.
    """
    arguments = [
        part
        for name, value in sorted(build_arguments(pins or load_pins()).items())
        for part in ("--build-arg", f"{name}={value}")
    ]
    secret = ("--secret", f"id=pipconf,src={pip_config}") if pip_config is not None else ()
    # The Dockerfile needs BuildKit; `docker build` is the old builder where docker lacks its component.
    fixed = ("docker", "buildx", "build", "--load", "--file", DOCKERFILE, "--tag", image)
    return Step("build the image", (*fixed, *secret, *arguments, "."))


def run(
    dies: Sequence[int],
    *command: str,
    image: str = IMAGE,
    name: str = "run in the image",
    machine: Machine | None = None,
    more: Sequence[str] = (),
    terminal: bool = False,
) -> Step:
    """Runs a command in the image with some dies and the host's driver, in the groups of the device files.

    Args:
        dies: physical ids.
        *command: program and arguments.
        image: its tag.
        name: of the step.
        machine: where the host's files are looked for; this one when None.
        more: further options of `docker run`.
        terminal: whether a person sits at it, who types into the command.
    """
    host = machine or Machine()
    nodes = [*(f"/dev/davinci{die}" for die in dies), *_NODES]
    options = [part for node in nodes for part in ("--device", node)]
    options += [part for group in groups(host, nodes) for part in ("--group-add", str(group))]
    options += [part for path in mounts(host) for part in ("--volume", f"{path}:{path}:ro")]
    # --init: what the command leaves behind is reaped, and a signal reaches it.
    fixed = ("docker", "run", "--rm", "--init", *(("--interactive", "--tty") if terminal else ()))
    shared = ("--network", "host", "--shm-size", _SHARED_MEMORY)
    return Step(name, (*fixed, *shared, *options, *more, image, *command))


def binds(folders: Sequence[Path]) -> list[str]:
    """Options of `docker run` that show folders of the host under their own paths, writable."""
    return [part for one in folders for part in ("--mount", f"type=bind,source={one},target={one}")]


def groups(machine: Machine, nodes: Sequence[str]) -> list[int]:
    """The groups that may use device files here: the image's user is in none of the host's by itself."""
    found = {machine.path(node).stat().st_gid for node in nodes if machine.exists(node)}
    return sorted(found - {0})


def check(dies: Sequence[int], image: str = IMAGE, machine: Machine | None = None) -> tuple[Step, ...]:
    """What shows that an image works on this machine's dies."""
    told: dict[str, Any] = {"image": image, "machine": machine}
    suite = ("python3", "-m", "relax_kernels", "check", "--backend", "ascend")
    return (
        run(dies, "relax-npu", "doctor", name="examine the machine from inside the image", **told),
        run(dies, *suite, name="compare the operators with their references", **told),
    )


def missing(machine: Machine, dies: Sequence[int] = ()) -> list[str]:
    """What this machine lacks to run an NPU container on some dies (all when none); [] when nothing."""
    lacking = [f"{path} is not there" for path in (*_NODES, *mounts(machine)) if not machine.exists(path)]
    if not visible_dies(machine):
        lacking.insert(0, "no /dev/davinci<n>: there is no NPU, or it is not passed on")
    else:
        there = visible_dies(machine)
        lacking += [f"/dev/davinci{die} is not there: dies are {there}" for die in dies if die not in there]
    return lacking + without_docker(machine)


def without_docker(machine: Machine) -> list[str]:
    """Says so where there is no docker on PATH; [] where there is."""
    folders = machine.environment.get("PATH", "").split(":")
    there = any(folder and machine.exists(f"{folder}/docker") for folder in folders)
    return [] if there else ["docker is not on PATH"]


def visible_dies(machine: Machine) -> list[int]:
    """The numbers of the dies under /dev."""
    names = [path.name.removeprefix("davinci") for path in machine.path("/dev").glob("davinci*")]
    return sorted(int(name) for name in names if name.isdigit())


def outside(root: Path) -> list[str]:
    """What a folder lacks to be the repository's root, from which the image is built; [] when nothing."""
    if (root / DOCKERFILE).is_file():
        return []
    return [f"{root} has no {DOCKERFILE}: run this in the root of Relax's repository"]


def integration(
    dies: Sequence[int],
    image: str,
    *,
    root: Path,
    built: bool = False,
    pip_config: Path | None = None,
    machine: Machine | None = None,
) -> tuple[Step, ...]:
    """The run on real NPUs: image, examination, operators, a training step of a 9B's shapes, the engine."""
    told: dict[str, Any] = {"image": image, "machine": machine}
    smoke = ("python3", "-m", "relax_npu.smoke", "--dies", str(len(dies)))
    # The tests are not part of the image; nothing is written among them.
    contract = "/src/tests/packages/relax-rollout/tests/contract"
    tests = ("python3", "-m", "pytest", "-p", "no:cacheprovider", contract, "-k", "sglang")
    variables = ("RELAX_TEST_SGLANG=1", "RELAX_TEST_DEVICE=npu", "PYTHONDONTWRITEBYTECODE=1")
    more = [part for variable in variables for part in ("--env", variable)]
    more += ["--volume", f"{root}:/src/tests:ro"]
    steps = (
        *check(dies, image, machine),
        run(dies, *smoke, name="one training step with a 9B model's shapes", **told),
        run(dies, *tests, name="the engine's contract", more=more, **told),
    )
    return steps if built else (build(image, pip_config=pip_config), *steps)
