"""A machine to break: a Python without packages, a copy of relax_npu, and fakes of torch and torch_npu."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import relax_npu

TORCH = """
    import sys, types
    calls = []
    ops = types.SimpleNamespace(npu=types.SimpleNamespace())
    cuda = sys.modules["torch.cuda"] = types.ModuleType("torch.cuda")
    cuda.random = types.ModuleType("torch.cuda.random")
    cuda._lazy_call = lambda call: None
    class Tensor:
        def type(self): return "torch.npu.FloatTensor"
    def manual_seed(seed): calls.append(("torch.manual_seed", seed))
    class device:
        def __init__(self, type, index): self.type, self.index = type, index
"""
# What the real one does on import: it adds torch.npu and registers its backend.
TORCH_NPU = """
    import contextlib, os, types, torch
    MEMORY = types.SimpleNamespace(name="Ascend910_9391", total_memory=64 * 2**30)
    npu = types.SimpleNamespace(
        device_count=lambda: int(os.environ.get("FAKE_NPUS", "2")),
        set_device=lambda index: torch.calls.append(("set_device", index)),
        current_device=lambda: 0,
        get_device_properties=lambda index: MEMORY,
        get_device_name=lambda: MEMORY.name,
        manual_seed_all=lambda seed: torch.calls.append(("npu.manual_seed_all", seed)),
        synchronize=lambda: torch.calls.append(("synchronize",)),
        memory_allocated=lambda: 3, memory_reserved=lambda: 5, max_memory_allocated=lambda: 4,
        reset_peak_memory_stats=lambda: torch.calls.append(("reset_peak",)),
        mem_get_info=lambda: (60 * 2**30, 64 * 2**30),
        empty_cache=lambda: torch.calls.append(("empty_cache",)),
        Stream=lambda: "new stream",
        stream=lambda stream: contextlib.nullcontext(stream),
    )
    torch.npu = npu
"""
# What importing the real one raises where CANN is missing.
NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')"


@dataclass
class Bench:
    """A machine under test.

    Attributes:
        python: its interpreter, with no site packages.
        site: a folder on its import path; fakes go there.
    """

    python: Path
    site: Path

    torch_source = TORCH
    torch_npu_source = TORCH_NPU
    no_cann = NO_CANN

    def module(self, name: str, source: str) -> None:
        """Writes a fake module; `a.b` makes the packages on the way."""
        *folders, _ = name.split(".")
        for depth in range(len(folders)):
            init = self.site.joinpath(*folders[: depth + 1], "__init__.py")
            init.parent.mkdir(parents=True, exist_ok=True)
            init.touch()
        target = self.site.joinpath(*name.split("."))
        if name.count(".") == 0:
            target.mkdir(exist_ok=True)
            target /= "__init__"
        target.with_name(target.name + ".py").write_text(textwrap.dedent(source))

    def distribution(self, name: str, version: str) -> None:
        """Writes the metadata of an installed distribution."""
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def torch(self, version: str = "2.9.0", source: str = TORCH) -> None:
        self.module("torch", source)
        self.distribution("torch", version)

    def torch_npu(self, version: str = "2.9.0.post4", source: str = TORCH_NPU) -> None:
        self.module("torch_npu", source)
        self.distribution("torch-npu", version)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs this machine's Python."""
        clean = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        variables = clean | {"PYTHONPATH": str(self.site)} | environment
        return subprocess.run(
            [str(self.python), *arguments],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def tell(self, source: str, **environment: str) -> Any:
        """Runs a program that sets `answer`, and returns it."""
        program = textwrap.dedent(source) + "\nimport json; print('ANSWER' + json.dumps(answer))"
        done = self.run("-c", program, **environment)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
        return json.loads(line.removeprefix("ANSWER"))

    def probe(self, timeout_s: float = 30.0, **environment: str) -> dict[str, Any]:
        """The probe's result, made and read on this machine."""
        return self.tell(
            f"""
            from dataclasses import asdict
            import relax_npu
            answer = asdict(relax_npu.probe(timeout_s={timeout_s}))
            """,
            **environment,
        )


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that sees the standard library and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


@pytest.fixture
def bench(bare_python: Path, tmp_path: Path) -> Bench:
    site = tmp_path / "site"
    shutil.copytree(
        Path(relax_npu.__file__).parent, site / "relax_npu", ignore=shutil.ignore_patterns("__pycache__")
    )
    made = Bench(python=bare_python, site=site)
    made.distribution("relax-npu", relax_npu.__version__)
    return made
