"""Every way an HTTP call can fail is one sentence that names the endpoint and what to look at."""

from __future__ import annotations

import http.server
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_tim.errors import UserError
from megatron_tim.rollout.client import SGLangClient
from megatron_tim.rollout.connection import Connection

ANSWERS = {
    "/json": (200, '{"value": 1}'),
    "/html": (200, "<html>hello</html>"),
    "/locked": (401, '{"error": "Unauthorized"}'),
    "/refused": (400, '{"error": {"message": "The input is too long."}}'),
    "/broken": (500, "internal\nerror"),
    "/generate": (200, "[]"),
    "/server_info": (200, '{"model_path": "m", "version": "0.5.23", "dtype": "float32"}'),
}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/slow":
            time.sleep(1.0)
            return
        if self.path == "/dies":
            self.connection.close()
            return
        status, text = ANSWERS.get(self.path, (404, "no such page"))
        if self.headers.get("Authorization") != "Bearer key":
            status = 401
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_json_and_key(url: str) -> None:
    connection = Connection(url + "/", "key", timeout_s=10, log_path=None)
    assert connection.get("/json") == {"value": 1} == connection.post("/json", {})


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        ("/html", "/html did not answer JSON; is it an SGLang server"),
        ("/locked", "/locked refuses the API key; set the variable that rollout.api_key_env names"),
        ("/refused", "/refused answered 400: The input is too long; see its log run/sglang.log"),
        ("/broken", "/broken answered 500: internal error; see its log run/sglang.log"),
        ("/slow", "/slow gave no reply within rollout.request_timeout_s = 0.5 s; allow more time or see its log run/sglang.log"),
        ("/dies", "/dies failed .*; the server may have died: see its log run/sglang.log"),
    ],
)
def test_failures(url: str, endpoint: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Connection(url, "key", timeout_s=0.5, log_path=Path("run/sglang.log")).post(endpoint, {})


def test_nobody_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(UserError, match=rf"http://127.0.0.1:{port}/model_info failed \(.*refused.*see the server's log"):
            SGLangClient(f"http://127.0.0.1:{port}", "key", timeout_s=5).weight_version()


def test_an_answer_to_fewer_requests_is_refused(url: str) -> None:
    client = SGLangClient(url, "key", timeout_s=5)
    with pytest.raises(UserError, match="SGLang answered 0 replies to a call of 2 requests"):
        client.sample([[1]], 2, temperature=1.0, max_new_tokens=1, concurrency=2, return_routed_experts=False)
    with pytest.raises(UserError, match="prompt 1 has no tokens"):
        client.sample([[1], []], 2, temperature=1.0, max_new_tokens=1, concurrency=2, return_routed_experts=False)
    assert client.sample([], 2, temperature=1.0, max_new_tokens=1, concurrency=2, return_routed_experts=False) == []


@pytest.mark.parametrize("tempered", [True, False])
def test_the_temperature_of_recorded_logprobs_is_found_out(tempered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with SGLANG_RETURN_ORIGINAL_LOGPROB=1 records log-probs of temperature 1 whatever it samples at."""

    def post(_: Connection, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        if endpoint == "/generate" and "top_logprobs_num" in body:
            divisor = body["sampling_params"]["temperature"] if tempered else 1.0
            return {"meta_info": {"output_top_logprobs": [[[-0.1 / divisor, 4, None], [-3.0 / divisor, 5, None]]]}}
        meta = {"id": body["rid"][0], "finish_reason": {"type": "length"}, "output_token_logprobs": [[-1.0, 3, None]]}
        return [{"output_ids": [3], "meta_info": meta | {"weight_versions": [{"version": "0", "start": 0, "end": 1}]}}]

    monkeypatch.setattr(Connection, "post", post)
    monkeypatch.setattr(Connection, "get", lambda *_: {"version": "0.5.23", "dtype": "float32"})
    client = SGLangClient("http://127.0.0.1:1", "key", timeout_s=5)
    arguments = {"max_new_tokens": 1, "concurrency": 1, "return_routed_experts": False}
    for temperature in (1.0, 0.7, 0.99):
        (trajectory,) = client.sample([[1]], 1, temperature=temperature, **arguments)
        assert trajectory.logprob_temperature == (temperature if tempered else 1.0)


def test_the_proxy_of_the_environment_is_not_used(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert Connection(url, "key", timeout_s=10, log_path=None).get("/json") == {"value": 1}
