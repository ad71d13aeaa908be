"""SGLang's servers on the NPU: relax-rollout starts them with relax-npu's plugin, arguments and environment.

The fake has SGLang 0.5.15's loader of plugins, which logs what fails, and the modules that relax-npu corrects
with exactly the names and parameters that it expects.
"""

import argparse
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from relax_npu.sglang import PLUGINS
from relax_rollout.engines.sglang import accelerators, launch
from relax_rollout.engines.sglang.config import SglangConfig

LOADER = """
    import logging, os
    from importlib.metadata import entry_points
    from sglang.srt.plugins.hook_registry import HookRegistry
    loaded = False
    def load_plugins():
        global loaded
        if loaded:
            return
        loaded = True
        allowed = os.environ["SGLANG_PLUGINS"].split(",")
        for entry in entry_points(group="sglang.srt.plugins"):
            if entry.name not in allowed:
                continue
            try:
                entry.load()()
            except Exception:
                logging.exception("Failed to execute general plugin: %s", entry.name)
        HookRegistry._patched |= set(HookRegistry._hooks)
"""
HOOKS = """
    class HookType:
        AROUND = REPLACE = None
    class HookRegistry:
        _hooks, _patched = {}, set()
        @classmethod
        def register(cls, target, function, kind):
            cls._hooks[target] = function
"""
# A server starts its schedulers as processes of their own, which load the plugins again.
SERVER = """
    import json, os, subprocess, sys
    SCHEDULER = "from sglang.srt.plugins import load_plugins; load_plugins(); import json; "
    SCHEDULER += "from relax_npu.upstream.fix import _applied; print(json.dumps(sorted(_applied)))"
    def launch_server(arguments):
        from relax_npu.upstream.fix import _applied
        print(json.dumps(sorted(_applied)), flush=True)
        done = subprocess.run([sys.executable, "-c", SCHEDULER])
        sys.exit(done.returncode)
"""
ARGUMENTS = """
    class ServerArgs:
        @staticmethod
        def add_cli_args(parser): parser.add_argument("--model-path")
        @staticmethod
        def from_cli_args(arguments): return arguments
"""


def modules() -> dict[str, str]:
    """The modules that relax-npu corrects, from what it expects of them."""
    made: dict[str, str] = {}
    for plugin in PLUGINS:
        lines = [made.get(plugin.module, "import torch")]
        for path, parameters in plugin.expects.items():
            owner, _, name = path.rpartition(".")
            if owner == "torch":
                continue
            value = f"lambda {', '.join((*parameters, '*rest'))}: None" if parameters else "6"
            lines.append(f"class {owner}: {name} = {value}" if owner else f"{name} = {value}")
            if owner and any(line.startswith(f"class {owner}:") for line in lines[0].splitlines()):
                lines[-1] = f"{owner}.{name} = {value}"
            made[plugin.module] = "\n".join(lines)
            lines = [made[plugin.module]]
    return made


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the fake, to be put on the path."""
    folder = tmp_path / "site"
    sources = modules() | {
        "sglang.srt.plugins.__init__": LOADER,
        "sglang.srt.plugins.hook_registry": HOOKS,
        "sglang.srt.entrypoints.http_server": SERVER,
        "sglang.srt.server_args": ARGUMENTS,
        "sglang.srt.distributed": "get_tp_group = None",
        "sglang.srt.layers.dp_attention": "get_attention_tp_group = is_dp_attention_enabled = None",
    }
    for name, source in sources.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    for parent in [folder / "sglang", *(folder / "sglang").rglob("*")]:
        if parent.is_dir() and not (parent / "__init__.py").exists():
            (parent / "__init__.py").touch()
    metadata = folder / "sglang-0.5.15.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.15\n")
    return folder


@pytest.fixture
def config(tmp_path: Path) -> SglangConfig:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"full_attention_interval": 4, "mtp_num_hidden_layers": 1, "dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps({"text_config": shape}))
    return SglangConfig(model, device="npu", tensor_parallel=4, max_rows=64, draft_tokens=2)


def serve(site: Path, config: SglangConfig, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | launch.environment(config) | variables
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment["RELAX_SGLANG_PARENT"] = str(os.getpid())
    command = [sys.executable, "-m", "relax_rollout.engines.sglang.serve", "--model-path", "x"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)


EVERY = sorted(plugin.name for plugin in PLUGINS)


def test_every_process_of_a_server_is_corrected(site: Path, config: SglangConfig) -> None:
    done = serve(site, config)
    assert done.returncode == 0, done.stderr[-3000:]
    server, scheduler = (json.loads(line) for line in done.stdout.splitlines())
    assert server == scheduler == EVERY


def test_another_sglang_ends_the_server_with_the_reason(site: Path, config: SglangConfig) -> None:
    (site / "sglang-0.5.15.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n"
    )
    done = serve(site, config)
    assert done.returncode != 0
    assert done.stdout == "", "it served"
    assert "made for sglang 0.5.15, found 0.5.23" in done.stderr


def test_an_interface_that_changed_ends_the_server(site: Path, config: SglangConfig) -> None:
    changed = site / "sglang/srt/speculative/triton_ops/cache_locs.py"
    changed.write_text("assign_extend_cache_locs_func = lambda other: None")
    done = serve(site, config)
    assert done.returncode != 0
    assert "assign_extend_cache_locs_func takes ('other',)" in done.stderr


def test_a_plugin_that_is_not_installed_ends_the_server(site: Path, config: SglangConfig) -> None:
    done = serve(site, config, SGLANG_PLUGINS="relax,relax_gone")
    assert done.returncode != 0
    assert "plugin relax_gone is not installed; there are: relax, relax_npu" in done.stderr


def test_servers_of_others_are_left_alone(site: Path, config: SglangConfig) -> None:
    done = serve(site, config, SGLANG_PLUGINS="relax")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[], []]


def test_the_npus_arguments_are_on_the_command_line(config: SglangConfig) -> None:
    command = launch.command(config, Path("served"), 30000)
    parser = argparse.ArgumentParser()
    for name in (
        "attention-backend",
        "sampling-backend",
        "device",
        "mamba-ssm-dtype",
        "speculative-algorithm",
    ):
        parser.add_argument(f"--{name}")
    for name in ("page-size", "tp-size", "max-mamba-cache-size", "speculative-num-draft-tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--cuda-graph-bs-decode", type=int, nargs="+")
    told, _ = parser.parse_known_args(command[3:])
    assert (told.attention_backend, told.sampling_backend, told.device) == ("ascend", "ascend", "npu")
    assert (told.page_size, told.tp_size, told.disable_radix_cache) == (128, 4, True)
    assert told.cuda_graph_bs_decode[-1] == 64
    assert (told.speculative_algorithm, told.speculative_num_draft_tokens) == ("NEXTN", 3)
    assert told.mamba_ssm_dtype == "bfloat16"


def test_what_the_user_gives_comes_last(config: SglangConfig) -> None:
    import dataclasses

    own = dataclasses.replace(config, arguments=("--page-size", "1"))
    assert launch.command(own, Path("served"), 1)[-2:] == ["--page-size", "1"]


def test_the_npus_environment_is_the_servers(config: SglangConfig) -> None:
    told = launch.environment(config)
    assert told["SGLANG_PLUGINS"] == "relax,relax_npu"
    assert told["HCCL_NPU_SOCKET_PORT_RANGE"] == told["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
    assert told["PYTORCH_NPU_ALLOC_CONF"] == "expandable_segments:False"


def test_without_relax_npu_the_engine_says_what_to_install(config: SglangConfig, monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "entry_points", lambda **chosen: ())
    with pytest.raises(ValueError, match="need relax-npu, which is not installed"):
        launch.command(config, Path("served"), 1)


REAL = os.environ.get("RELAX_TEST_SGLANG") == "1"


PROGRAM = """
import importlib, sys, types
from sglang.srt.utils import common, patch_torch
from relax_npu.sglang import install
# Names that SGLang has on the NPU only.
common.is_npu = lambda: True
for name in ("torch_npu", "torch_npu.multiprocessing", "torch_npu.multiprocessing.reductions"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torch_npu.multiprocessing"].reductions = sys.modules["torch_npu.multiprocessing.reductions"]
importlib.reload(patch_torch)
for name in [name for name in sys.modules if name.startswith("torch_npu")]:
    del sys.modules[name]
common.is_npu = lambda: False
import sglang.srt.distributed as distributed, sglang.srt.layers.dp_attention as attention, torch
from sglang.srt.speculative import eagle_utils
distributed.get_tp_group = lambda: types.SimpleNamespace(world_size=1)
attention.is_dp_attention_enabled = lambda: False
# SGLang's own verification as on the NPU, up to the kernel that compares drafts with a token for each place.
eagle_utils._is_npu = True
wanted = []
def kernel(*, predicts, accept_index, accept_token_num, target_predict, **rest):
    wanted.append(target_predict)
    return predicts, accept_index.zero_(), accept_token_num.zero_()
eagle_utils.verify_tree_greedy_func = kernel
p = torch.tensor([0.5, 0.3, 0.2])
def shares():
    none = dict.fromkeys(("acc_additive_penalties", "acc_scaling_penalties", "logit_bias"))
    one = torch.ones(2000, 1)
    settings = {"temperatures": one, "top_ks": 9 * one[:, 0], "top_ps": one[:, 0]}
    told = types.SimpleNamespace(is_all_greedy=False, **none, **settings)
    mode = types.SimpleNamespace(is_idle=lambda: False)
    batch = types.SimpleNamespace(device="cpu", forward_mode=mode, seq_lens=range(2000), sampling_info=told)
    names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    sizes = {"draft_token_num": 2, "max_tree_depth": 2, "tree_topk": 1}
    drafts = types.SimpleNamespace(draft_token=torch.zeros(4000), **sizes, **dict.fromkeys(names))
    logits = types.SimpleNamespace(next_token_logits=p.log().repeat(4000, 1))
    eagle_utils.eagle_sample(drafts, batch, logits)
    return torch.bincount(wanted.pop().flatten(), minlength=3) / 4000
assert shares().tolist() == [1, 0, 0], "upstream's fault"
install()
torch.manual_seed(1)
# Five standard deviations of a share of 4000 draws.
assert torch.allclose(shares(), p, atol=5 * (0.25 / 4000) ** 0.5)
"""


@pytest.mark.skipif(not REAL, reason="needs SGLang (nox -s sglang_cpu)")
def test_the_real_sglang_looks_as_the_corrections_expect_and_verifies_by_sampling() -> None:
    path = os.pathsep.join(filter(None, [str(launch.CPU_PATH), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
