"""What is installed here and what this machine can run, found without importing torch or an engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

REQUIREMENTS = Path(__file__).parents[1] / "launch" / "requirements"
SUPPORTED_PYTHON = ((3, 11), (3, 12))

# Shown and compared with the tested version where they are installed or needed.
ENGINES = ("torch", "megatron-core", "sglang", "transformers")
LIBRARIES = ("tokenizers", "safetensors", "pydantic", "pyarrow", "tensorboard", "rich")
GPU_PACKAGES = ("sglang-kernel", "transformer-engine", "nvidia-modelopt", "ray")

# Variables that change what a kernel or an engine computes.
NUMERIC_VARIABLES = (
    "MKL_CBWR",
    "NCCL_ALGO",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "SGLANG_RETURN_ORIGINAL_LOGPROB",
)

SETUP = "run launch/setup.sh"
GB = 2**30


@dataclass(frozen=True)
class Check:
    """One finding: ``problem`` stops the main job, ``warning`` does not; ``advice`` says what to do about either."""

    name: str
    status: Literal["ok", "warning", "problem"]
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Package:
    """A distribution with its installed version (None: absent) and the tested one (None: no pin known)."""

    name: str
    version: str | None
    tested: str | None

    @property
    def is_tested(self) -> bool:
        return self.version is not None and self.tested in (None, self.version.partition("+")[0])


def installed_version(name: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_count() -> int:
    """Counts this machine's NVIDIA devices that CUDA_VISIBLE_DEVICES does not hide altogether."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return 0
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def torch_cuda_version() -> str | None:
    """Returns the CUDA version that torch was built for, read from its files, or None for a CPU build or no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    version_file = Path(spec.submodule_search_locations[0]) / "version.py"
    match = re.search(r"^cuda\b[^=]*= '([\d.]+)'", version_file.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def uses_gpu() -> bool:
    """Says whether torch will find a GPU: there is one, and torch was built for it."""
    return gpu_count() > 0 and torch_cuda_version() is not None


def tested_versions(gpu: bool) -> dict[str, str]:
    """Reads the versions pinned in launch/requirements; empty where the package is installed without its repository."""
    names = ("common", "gpu") if gpu else ("common", "torch", "cpu")
    pins: dict[str, str] = {}
    for path in (REQUIREMENTS / f"{name}.txt" for name in names):
        if path.is_file():
            found = re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
            pins |= {name.lower(): version for name, version in found}
    return pins


def packages() -> list[Package]:
    """Lists the packages that matter here, with installed and tested versions."""
    gpu = uses_gpu()
    pins = tested_versions(gpu)
    names = ENGINES + LIBRARIES + tuple(name for name in GPU_PACKAGES if gpu or installed_version(name))
    return [Package(name, installed_version(name), pins.get(name)) for name in names]


def checks(directory: Path = Path(".")) -> list[Check]:
    """Examines the interpreter, the packages, both engines and the machine; ``directory`` is where runs are written."""
    return [
        check_python(),
        check_packages(packages()),
        check_device(),
        check_trainer(),
        check_rollout_engine(),
        check_numerics(),
        check_loopback(),
        check_disk(directory),
        check_shared_memory(),
        check_memory(),
    ]


def check_python() -> Check:
    version = sys.version.split()[0]
    if sys.version_info[:2] in SUPPORTED_PYTHON:
        return Check("Python", "ok", version)
    return Check("Python", "problem", f"{version} is not supported", f"{SETUP} with Python 3.11 or 3.12 (PYTHON=/path/to/python3.11)")


def check_packages(found: list[Package]) -> Check:
    missing = [package.name for package in found if package.version is None]
    if missing:
        return Check("packages", "problem", f"not installed: {', '.join(missing)}", SETUP)
    other = [f"{package.name} {package.version} (tested: {package.tested})" for package in found if not package.is_tested]
    if other:
        return Check("packages", "warning", f"not the tested versions: {', '.join(other)}", f"{SETUP}, or check your numbers")
    return Check("packages", "ok", f"{len(found)} packages at the tested versions")


def check_device() -> Check:
    gpus, cuda = gpu_count(), torch_cuda_version()
    build = f"torch built for CUDA {cuda}" if cuda else "torch built for CPU"
    if gpus == 0:
        return Check("device", "ok", f"CPU ({len(os.sched_getaffinity(0))} cores), {build}")
    if cuda is None:
        return Check("device", "warning", f"CPU: {build}, so {gpus} NVIDIA GPUs are not used", f"{SETUP} with MEGATRON_TIM_DEVICE=cuda")
    return Check("device", "ok", f"{gpus} NVIDIA GPUs, {build}")


def check_trainer() -> Check:
    """Megatron's layers: Transformer Engine's on a GPU, its own ("local") on a CPU, where Transformer Engine breaks the import."""
    name = "trainer"
    if installed_version("megatron-core") is None:
        return Check(name, "problem", "Megatron-Core is not installed", SETUP)
    engine = installed_version("transformer-engine")
    if not uses_gpu() and engine is not None:
        detail = "transformer-engine is installed, and without a GPU it makes the import of Megatron-Core fail"
        return Check(name, "problem", detail, "pip uninstall transformer-engine transformer-engine-torch")
    if not uses_gpu():
        return Check(name, "ok", "Megatron-Core, local layers on the CPU")
    if engine is None:
        return Check(name, "warning", "Megatron-Core, local layers: transformer-engine is not installed", f"{SETUP} for full speed")
    return Check(name, "ok", f"Megatron-Core, Transformer Engine {engine} layers")


def check_rollout_engine() -> Check:
    """SGLang: with its real kernels on a GPU, with the shim and only with the shim on a CPU."""
    name = "rollout engine"
    version, shim, gpu = installed_version("sglang"), installed_version("sglang-cpu-shim"), uses_gpu()
    if version is None:
        return Check(name, "problem", "SGLang is not installed; rollout.engine=recorded still works", SETUP)
    if gpu and shim is not None:
        detail = "sglang-cpu-shim hides SGLang's GPU kernels"
        return Check(name, "problem", detail, "pip uninstall sglang-cpu-shim && pip install --force-reinstall --no-deps sglang-kernel")
    if gpu and installed_version("sglang-kernel") is None:
        return Check(name, "problem", f"SGLang {version} without sglang-kernel", SETUP)
    if not gpu and shim is None:
        return Check(name, "problem", f"SGLang {version} cannot start on a CPU without sglang-cpu-shim", SETUP)
    return Check(name, "ok", f"SGLang {version}, {'CUDA' if gpu else f'CPU through sglang-cpu-shim {shim}'}")


def check_numerics() -> Check:
    """Names the variables set here that change results; both engines must compute under the same ones for an exact comparison."""
    found = [f"{name}={os.environ[name]}" for name in NUMERIC_VARIABLES if name in os.environ]
    if found:
        return Check(
            "numerics", "warning", f"set here: {', '.join(found)}", "unset them unless you mean them: they change what the engines compute"
        )
    return Check("numerics", "ok", "no variable that changes results is set")


def check_loopback() -> Check:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return Check(
            "ports", "problem", f"no port can be opened on 127.0.0.1: {error.strerror}", "allow loopback sockets in this container"
        )
    return Check("ports", "ok", "loopback ports can be opened")


def check_disk(directory: Path) -> Check:
    free = shutil.disk_usage(directory).free / GB
    return _at_least("disk", free, f"{free:.1f} GB free in {directory.resolve()}", 0.5, 5, "free some space or set run.dir")


def check_shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check(
            "shared memory", "problem", "there is no /dev/shm", "mount a tmpfs there: the engines' processes share tensors through it"
        )
    free = shutil.disk_usage(path).free / GB
    return _at_least("shared memory", free, f"{free:.2f} GB free in /dev/shm", 0.05, 1, "give the container more: --shm-size=8g")


def check_memory() -> Check:
    import psutil

    available = psutil.virtual_memory().available / GB
    return _at_least(
        "memory", available, f"{available:.1f} GB available", 3, 6, "stop other programs: SGLang and the trainer take 5 GB on a tiny model"
    )


def _at_least(name: str, value: float, detail: str, needed: float, comfortable: float, advice: str) -> Check:
    if value >= comfortable:
        return Check(name, "ok", detail)
    return Check(name, "problem" if value < needed else "warning", detail, advice)
