"""The SGLang CPU shim: what it replaces is there in the installed SGLang, and it refuses what it does not know."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

SHIM = Path(__file__).parents[2] / "tools" / "sglang_cpu_shim"


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The shim's module from the source tree, with a SGLang whose BaseHostCache a test can choose."""
    monkeypatch.syspath_prepend(str(SHIM))
    monkeypatch.delitem(sys.modules, "sglang_cpu_shim", raising=False)
    return importlib.import_module("sglang_cpu_shim")


def pretend_sglang(monkeypatch: pytest.MonkeyPatch, cache: type) -> None:
    for name in ("sglang", "sglang.srt", "sglang.srt.state_capturer", "sglang.srt.state_capturer.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["sglang.srt.state_capturer.base"].BaseHostCache = cache


def run_with_shim(code: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(SHIM)!r}); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_installed_sglang_has_the_known_signature(shim: types.ModuleType) -> None:
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    tree = ast.parse((package / "srt" / "state_capturer" / "base.py").read_text())
    cache = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BaseHostCache")
    init = next(node for node in cache.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert tuple(argument.arg for argument in init.args.args) == shim.HOST_CACHE_PARAMETERS


def test_activate_allocates_ordinary_memory(shim: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class BaseHostCache:
        def __init__(self, num_tokens, num_layers, topk_size, name, device): ...

        def _log_allocation(self) -> None:
            self.logged = True

    pretend_sglang(monkeypatch, BaseHostCache)
    shim.activate()
    cache = BaseHostCache(5, 3, 2, "experts", device="cpu")
    assert cache.buffer.shape == (5, 3, 2) and cache.buffer.dtype == torch.int32 and not cache.buffer.any()
    assert (cache.num_tokens, cache.num_layers, cache.topk_size, cache.name, cache.logged) == (5, 3, 2, "experts", True)


def test_an_unknown_signature_is_refused(shim: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class BaseHostCache:
        def __init__(self, num_tokens, shape): ...

    pretend_sglang(monkeypatch, BaseHostCache)
    original = BaseHostCache.__init__
    with pytest.raises(shim.ShimError, match="does not know this SGLang"):
        shim.activate()
    assert BaseHostCache.__init__ is original


def test_cuda_is_refused(shim: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(shim.ShimError, match="pip uninstall sglang-cpu-shim"):
        shim.activate()


def test_the_kernel_stub_is_refused_beside_cuda() -> None:
    done = run_with_shim("import torch; torch.cuda.is_available = lambda: True; import sgl_kernel")
    assert done.returncode == 1
    assert "ShimError" in done.stderr


def test_kernel_names_import_and_raise_when_called() -> None:
    code = "from sgl_kernel import copy_all_layer_kv_cache_cpu as f; f()"
    done = run_with_shim(code)
    assert "NotImplementedError: sgl_kernel.copy_all_layer_kv_cache_cpu is not available on a CPU" in done.stderr


def test_gpu_kernel_names_are_absent() -> None:
    assert "ImportError" in run_with_shim("from sgl_kernel import silu_and_mul").stderr


def test_the_torchvision_stub_has_what_is_imported() -> None:
    code = """
import torchvision
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode, Normalize
from torchvision.transforms.functional import pil_to_tensor
import torchvision.transforms.v2.functional as tvF
assert InterpolationMode.NEAREST_EXACT.value == 'nearest-exact'
for unusable in (Normalize, pil_to_tensor, tvF.resize, decode_image):
    try: unusable()
    except NotImplementedError: pass
    else: raise SystemExit(unusable)
"""
    done = run_with_shim(f"exec({code!r})")
    assert done.returncode == 0, done.stderr
