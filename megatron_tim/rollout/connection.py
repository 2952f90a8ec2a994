"""HTTP to an SGLang server, with every failure turned into one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import requests

from megatron_tim.errors import UserError

_CONNECT_TIMEOUT_S = 10.0


class Connection:
    """Sends requests to one server, each on a connection of its own; safe to use from several threads.

    A kept connection may be closed by the server while the trainer computes, just as it is used again.
    """

    def __init__(self, base_url: str, api_key: str, timeout_s: float, log_path: Path | None) -> None:
        self.base_url = base_url.rstrip("/")
        self._log = f"its log {log_path}" if log_path else "the server's log"
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}", "Connection": "close"}

    def get(self, endpoint: str) -> Any:
        """Returns the JSON that ``endpoint`` answers.

        Raises:
            UserError: no connection, no reply in time, or a refusal; names the endpoint and the reason.
        """
        return self._json(self._request("GET", endpoint, None))

    def post(self, endpoint: str, body: dict[str, Any]) -> Any:
        """Posts ``body`` and returns the JSON answered; raises as :meth:`get` does."""
        return self._json(self._request("POST", endpoint, body))

    def command(self, endpoint: str) -> None:
        """Posts to an endpoint whose answer is text for people; raises as :meth:`get` does."""
        self._request("POST", endpoint, None)

    def _request(self, method: str, endpoint: str, body: dict[str, Any] | None) -> requests.Response:
        url = self.base_url + endpoint
        try:
            with requests.Session() as session:
                # A proxy of the environment must not see the key, nor stand between two processes of one machine.
                session.trust_env = False
                response = session.request(method, url, json=body, headers=self._headers, timeout=(_CONNECT_TIMEOUT_S, self._timeout_s))
        except requests.ConnectTimeout:
            raise UserError(f"{url} does not accept connections; check that the server runs and see {self._log}.") from None
        except requests.Timeout:
            raise UserError(
                f"{url} gave no reply within rollout.request_timeout_s = {self._timeout_s:g} s; allow more time or see {self._log}."
            ) from None
        except requests.RequestException as error:
            raise UserError(f"the connection to {url} failed ({_cause(error)}); the server may have died: see {self._log}.") from None
        if response.status_code == 401:
            raise UserError(f"{url} refuses the API key; set the variable that rollout.api_key_env names to the server's key.")
        if not response.ok:
            raise UserError(f"{url} answered {response.status_code}: {_message(response)}; see {self._log}.")
        return response

    def _json(self, response: requests.Response) -> Any:
        try:
            return response.json()
        except ValueError:
            raise UserError(f"{response.url} did not answer JSON; is it an SGLang server?") from None


def _cause(error: BaseException) -> str:
    """The innermost reason: requests wraps urllib3, which wraps the operating system's."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return " ".join(str(error).split())


def _message(response: requests.Response) -> str:
    try:
        body = response.json()
        body = body.get("error", body) if isinstance(body, dict) else body
        text = body.get("message", body) if isinstance(body, dict) else body
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:500].rstrip(".")
