"""`relax-train` on the device npu with MindSpeed: a package of its semantics, in the order it needs."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

# As far as relax-npu uses it: the import acts and reads the command line, repatch takes a dict and replaces
# names in megatron-core, and features say whether they are on.
KERNEL = """
    from types import SimpleNamespace
    kernel = SimpleNamespace(configs=[SimpleNamespace(num_warps=4, kwargs={})], keys=["D"])
"""
PACKAGE = {
    "__init__": "",
    "core/__init__": "",
    "core/megatron_basic/__init__": "",
    "core/megatron_basic/arguments_basic": """
        def get_full_args():
            from mindspeed.args_utils import get_full_args
            return get_full_args()
        def transformer_config_init_subclass(cls, **kwargs): pass
    """,
    "args_utils": """
        from argparse import Namespace
        FULL = Namespace(optimization_level=2)
        def get_full_args(): return FULL
    """,
    "features_manager/__init__": "",
    "features_manager/features_manager": """
        class Feature:
            def __init__(self, name): self.feature_name = name
            def is_need_apply(self, args): return bool(getattr(args, self.feature_name, None))
        class MindSpeedFeaturesManager:
            FEATURES_LIST = [Feature("use_flash_attn"), Feature("moe_zero_memory"), Feature("use_ascend_mc2")]
    """,
    "ops/__init__": "",
    "ops/triton/__init__": "",
    "ops/triton/l2norm": KERNEL,
    "ops/triton/chunk_delta_h": KERNEL,
    "megatron_adaptor": """
        import json, os, sys
        from mindspeed.args_utils import FULL
        def _tell(**what):
            with open(os.environ["MINDSPEED_LOG"], "a") as file:
                file.write(json.dumps(what) + "\\n")
        def _started():
            from megatron.core import parallel_state
            return parallel_state.model_parallel_is_initialized()
        _tell(event="import", argv=sys.argv[1:], megatron=_started())
        def repatch(args):
            for name, value in args.items(): setattr(FULL, name, value)
            _tell(event="repatch", switches=dict(args), megatron=_started())
            from megatron.core.transformer import module, spec_utils
            usual = spec_utils.ModuleSpec.__init__
            def counted(self, *rest, **named):
                usual(self, *rest, **named)
                if not hasattr(counted, "told"):
                    counted.told = _tell(event="first spec", megatron=_started())
            spec_utils.ModuleSpec.__init__ = counted
    """,
}
PROGRAM = """
import sys
from relax_npu.simulation import install
install()
from relax_npu import NpuDevice
NpuDevice.available = lambda self: True  # the probe asks a process without the simulation
from relax_core.cli.train import main
sys.argv = ["relax-train", *sys.argv[1:]]
raise SystemExit(main())
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the package; its metadata name the version."""
    folder = tmp_path / "site"
    for name, source in PACKAGE.items():
        path = folder / "mindspeed" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    metadata = folder / "mindspeed-0.16.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n")
    return folder


def train(site: Path, tmp_path: Path, *arguments: str, **variables: str):
    log = tmp_path / "log.jsonl"
    log.touch()
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "MINDSPEED_LOG": str(log), "OMP_NUM_THREADS": "1"}
    fixed = ("--recipe", "quickstart-sft", "--run.device", "npu", "--run.dir", str(tmp_path / "runs"))
    fixed += ("--run.steps", "1", "--trainer.warmup_steps", "0", "--run.threads", "1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *fixed, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    return done, [json.loads(line) for line in log.read_text().splitlines()]


def test_it_is_loaded_and_repatched_before_specs_and_groups(site: Path, tmp_path: Path) -> None:
    done, told = train(site, tmp_path, RELAX_NPU_MINDSPEED='{"moe-zero-memory": "level0"}')
    assert done.returncode == 0, done.stderr[-3000:]
    assert [entry["event"] for entry in told] == ["import", "repatch", "first spec"]
    imported, repatched, spec = told
    assert imported == {"event": "import", "argv": [], "megatron": False}, "it saw our command line"
    assert not repatched["megatron"], "repatched after megatron's groups were made"
    assert spec["megatron"], "specs are built when both are done"
    wanted = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "use_flash_attn": True}
    assert (wanted | {"moe_zero_memory": "level0"}).items() <= repatched["switches"].items()
    (log,) = tmp_path.glob("runs/*/log.txt")
    assert "MindSpeed is used, features: moe_zero_memory, use_flash_attn" in log.read_text()


def test_it_is_left_alone_unless_it_is_asked_for(site: Path, tmp_path: Path) -> None:
    done, told = train(site, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert told == []


def test_another_version_ends_the_run_with_what_to_install(site: Path, tmp_path: Path) -> None:
    (site / "mindspeed-0.16.0.dist-info").rename(site / "mindspeed-0.17.0.dist-info")
    metadata = site / "mindspeed-0.17.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.16.0", "0.17.0"))
    done, told = train(site, tmp_path, RELAX_NPU_MINDSPEED="1")
    assert done.returncode != 0
    assert "made for mindspeed 0.16.0, found 0.17.0" in done.stderr + done.stdout
    assert told == []
