"""``octavo serve`` as a process: what it prints, that it can be ended at any time, and that it ends
well.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from octavo.base import ConfigError
from octavo.cli.main import main
from octavo.server.run import bind, listen, url
from tests.server.fakes import wait_until
from tests.server.test_engine import write_model

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
ENDLESS: dict[str, Any] = {
    "prompt": "on and on",
    "max_tokens": 3900,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("serve"))


@contextmanager
def octavo_serve(
    model: Path, *arguments: str, program: Sequence[str] = ("-m", "octavo")
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A ready server: the process, its URL, and the command it says to try."""
    command = [
        sys.executable,
        *program,
        "serve",
        str(model),
        "--port",
        "0",
        "--kv-memory",
        "64MiB",
        *arguments,
    ]
    environment = os.environ | {
        "OCTAVO_API_KEY": KEY,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None
    try:
        ready, try_this = process.stdout.readline(), process.stdout.readline()
        assert ready.startswith(f"octavo serves {model.name} at http://127.0.0.1:")
        yield process, ready.split(" at ")[1].split("/v1 ")[0], try_this.removeprefix("Try: ")
    finally:
        process.kill()
        process.communicate()


def try_command(command: str) -> str:
    """What the printed command answers."""
    environment = os.environ | {"OCTAVO_API_KEY": KEY}
    return subprocess.run(
        command, shell=True, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
def test_running_requests_get_their_time_and_new_ones_are_refused(model: Path) -> None:
    with octavo_serve(model, "--max-model-len", "4000", "--shutdown-timeout", "5") as (
        process,
        base,
        command,
    ):
        assert '"object":"text_completion"' in try_command(command)
        chat = {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": True,
        }
        client = httpx2.Client(base_url=base, headers=HEADERS, timeout=60)
        with (
            client.stream("POST", "/v1/chat/completions", json=chat) as short,
            client.stream("POST", "/v1/completions", json=ENDLESS) as endless,
        ):
            process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: httpx2.get(f"{base}/health").status_code == 503)
            refused = httpx2.post(f"{base}/v1/completions", json={"prompt": "a"}, headers=HEADERS)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "5"
            *_, last, done = [line for line in short.iter_lines() if line]
            assert '"finish_reason":"length"' in last
            assert done == "data: [DONE]"
            *_, broken = [line for line in endless.iter_lines() if line]
            assert '"code":"shutting_down"' in broken
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_second_signal_ends_it_now(model: Path) -> None:
    with octavo_serve(model, "--max-model-len", "4000", "--shutdown-timeout", "600") as (
        process,
        base,
        _,
    ):
        client = httpx2.Client(base_url=base, headers=HEADERS, timeout=60)
        # Two that are never read.
        with (
            client.stream("POST", "/v1/completions", json=ENDLESS),
            client.stream("POST", "/v1/completions", json=ENDLESS),
        ):
            process.send_signal(signal.SIGINT)
            assert wait_until(lambda: httpx2.get(f"{base}/health").status_code == 503)
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


ENDLESS_STEP = """
import time
from octavo.cli.main import main
from octavo.runner.runner import Runner
Runner.execute = lambda *_: time.sleep(600)
main()
"""


def test_a_step_that_takes_long_keeps_neither_clients_nor_the_process(model: Path) -> None:
    with octavo_serve(model, "--shutdown-timeout", "0.2", program=("-c", ENDLESS_STEP)) as (
        process,
        base,
        _,
    ):
        with (
            ThreadPoolExecutor(1) as pool,
            httpx2.Client(base_url=base, headers=HEADERS, timeout=60) as client,
        ):
            asked = pool.submit(client.post, "/v1/completions", json={"prompt": "a"})
            assert not wait_until(asked.done, 1.0)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
            assert asked.result().status_code == 503
            assert asked.result().json()["error"]["code"] == "shutting_down"
        assert process.stderr is not None
        assert process.stderr.read() == ""


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *arguments])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def test_a_port_in_use_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 cannot be used" in refused(
            [str(model), "--port", str(port)], capsys
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-body", "much"], "max_body 'much' is not a size"),
        (["--dtype", "int3"], "dtype must be one of"),
        (["--host", "not a host"], "--host"),
        (["--chat-template", "/nowhere"], "chat_template /nowhere cannot be read"),
        (["--api-key", " "], "api_key must not be empty"),
    ],
)
def test_wrong_options_are_one_line(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused([str(model), "--port", "0", *arguments], capsys)


def test_of_two_that_were_bound_one_may_listen() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(
            ConfigError, match=f"port {first.getsockname()[1]} of 127.0.0.1 cannot be used"
        ):
            listen(second)


def test_addresses() -> None:
    with bind("0.0.0.0", 0) as taken:
        assert url(taken) == f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ConfigError, match="--host"):
        bind("256.256.256.256", 0)
