"""One real SGLang server for the whole test session: starting it takes longer than the tests that use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_tim.config import RolloutConfig
from megatron_tim.rollout.client import SGLangClient
from megatron_tim.rollout.server import SGLangServer
from tests.helpers import make_tiny_qwen3_moe


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="session")
def other_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_tiny_qwen3_moe(tmp_path_factory.mktemp("other_model"), seed=2)


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """A float32 server of ``tiny_model``; a test that changes its weights puts them back."""
    config = RolloutConfig(dtype="float32", concurrency=32, max_total_tokens=16384, start_timeout_s=600)
    with SGLangServer.start(config, tiny_model, tmp_path_factory.mktemp("server") / "sglang.log") as server:
        yield server


@pytest.fixture
def client(sglang_server: SGLangServer) -> SGLangClient:
    return SGLangClient(sglang_server.base_url, sglang_server.api_key, timeout_s=120, log_path=sglang_server.log_path)
