"""Whatever ends the parent, and whatever its children do to hide, nothing is left running."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_tim.rollout.supervisor import Launch
from tests.rollout.processes import is_alive, shared_memory_of, wait_for

# A server that leaves nothing out: a child in another session, whose parent is gone, which ignores
# polite signals and holds a semaphore in shared memory; it prints its key and its configuration.
SERVER = """
import multiprocessing, os, signal, subprocess, sys, time
config = sys.argv[1]
print("the key is", open(config).read(), oct(os.stat(config).st_mode & 0o777), flush=True)
lock = multiprocessing.get_context("spawn").Lock()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open("orphan.pid", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
open("server.pid", "w").write(str(os.getpid()))
open("tmpdir", "w").write(os.environ["TMPDIR"])
time.sleep(600)
"""

# The trainer's part: starts a supervisor, says so, and waits for its own end.
PARENT = """
import json, os, subprocess, sys, time
spec = json.loads(sys.argv[1]) | {"parent_pid": os.getpid()}
words = [sys.executable, "-m", "megatron_tim.rollout.supervisor"]
supervisor = subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
supervisor.stdin.write(json.dumps(spec).encode() + b"\\n")
open("supervisor.pid", "w").write(str(supervisor.pid))
if "--fork" in sys.argv and os.fork() == 0:
    os.setsid()
    time.sleep(20)
    os._exit(0)
time.sleep(600)
"""
KEY = "s3cret-key"


@dataclasses.dataclass
class Tree:
    folder: Path
    parent: subprocess.Popen[bytes]

    def pid(self, name: str) -> int:
        path = self.folder / f"{name}.pid"
        assert wait_for(lambda: path.exists() and path.read_text() != ""), f"no {name}"
        return int(path.read_text())

    def assert_gone(self) -> None:
        pids = {name: self.pid(name) for name in ("server", "orphan", "supervisor")}
        assert wait_for(lambda: not any(is_alive(pid) for pid in pids.values()), 10), pids
        assert not Path((self.folder / "tmpdir").read_text()).exists()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    """Starts the parent with its server and waits until all of it runs."""
    trees = []

    def start_tree(*flags: str) -> Tree:
        argv = [sys.executable, "-c", SERVER, "{config}"]
        spec = Launch(argv, dict(os.environ), str(tmp_path / "server.log"), KEY, parent_pid=0)
        words = [sys.executable, "-c", PARENT, json.dumps(dataclasses.asdict(spec)), *flags]
        trees.append(Tree(tmp_path, subprocess.Popen(words, cwd=tmp_path)))
        for name in ("supervisor", "orphan", "server"):
            trees[-1].pid(name)
        assert wait_for((tmp_path / "tmpdir").exists)
        return trees[-1]

    yield start_tree
    for tree in trees:
        tree.parent.kill()
        tree.parent.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_parent_is_killed(start: Callable[..., Tree], number: int) -> None:
    tree = start()
    tree.parent.send_signal(number)
    tree.parent.wait()
    tree.assert_gone()


def test_the_parent_is_killed_while_a_fork_of_it_holds_the_pipe(start: Callable[..., Tree]) -> None:
    tree = start("--fork")
    tree.parent.kill()
    tree.parent.wait()
    tree.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_supervisor_is_signalled(start: Callable[..., Tree], number: int) -> None:
    tree = start()
    os.kill(tree.pid("supervisor"), number)
    tree.assert_gone()


def test_the_server_dies(start: Callable[..., Tree]) -> None:
    tree = start()
    os.kill(tree.pid("server"), signal.SIGKILL)
    tree.assert_gone()


def test_the_supervisor_is_killed(start: Callable[..., Tree]) -> None:
    """Then only the kernel is left to end the server, which is what ends SGLang's own processes."""
    tree = start()
    os.kill(tree.pid("supervisor"), signal.SIGKILL)
    assert wait_for(lambda: not is_alive(tree.pid("server")))
    os.kill(tree.pid("orphan"), signal.SIGKILL)
    shutil.rmtree((tree.folder / "tmpdir").read_text())


def test_no_shared_memory_is_left(start: Callable[..., Tree]) -> None:
    tree = start()
    files = shared_memory_of([tree.pid("server")])
    assert files
    tree.parent.kill()
    tree.assert_gone()
    assert not any(file.exists() for file in files)


def test_the_key_is_private_and_not_logged(start: Callable[..., Tree]) -> None:
    tree = start()
    log = tree.folder / "server.log"
    assert wait_for(lambda: log.exists() and log.read_text() != "")
    assert KEY not in log.read_text() and '{"api-key": "<api key>"} 0o600' in log.read_text()
    for name in ("server", "supervisor"):
        assert KEY not in " ".join(psutil.Process(tree.pid(name)).cmdline())


def test_ready_removes_the_file_with_the_key(tmp_path: Path) -> None:
    spec = Launch(
        [sys.executable, "-c", "import sys, time; print(sys.argv[1], flush=True); time.sleep(600)", "{config}"],
        dict(os.environ),
        str(tmp_path / "log"),
        KEY,
        parent_pid=os.getpid(),
    )
    with subprocess.Popen([sys.executable, "-m", "megatron_tim.rollout.supervisor"], stdin=subprocess.PIPE, bufsize=0) as supervisor:
        supervisor.stdin.write(json.dumps(dataclasses.asdict(spec)).encode() + b"\n")
        log = tmp_path / "log"
        assert wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        config = Path(log.read_text().strip())
        assert config.exists() and config.stat().st_mode & 0o777 == 0o600 and config.parent.stat().st_mode & 0o777 == 0o700
        supervisor.stdin.write(b"ready\n")
        assert wait_for(lambda: not config.exists())
        assert supervisor.poll() is None
        supervisor.stdin.close()
        assert supervisor.wait(10) == 0
    assert not config.parent.exists()


def test_the_parent_dies_before_it_says_what_to_run() -> None:
    done = subprocess.run([sys.executable, "-m", "megatron_tim.rollout.supervisor"], input=b"", capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
