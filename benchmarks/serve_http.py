"""Servers of the serving benchmark: each starts as its manual says, and is asked over HTTP on loopback.

The client is the same for all of them, and plain: sockets and a search for the mark of an event, so that it
takes little of the cores that the servers are measured on. Its CPU time is not counted as theirs.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

_EVENT, _LAST = b"data: {", b"data: [DONE]"
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')
_START_S = 240.0


class Client(asyncio.Protocol):
    """One streamed completion; `stamps` says when each of its events came."""

    def __init__(self, body, start, done):
        self._start, self._done = start, done
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        self._received = bytearray()
        self._searched = 0
        self.stamps = []

    def connection_made(self, transport):
        """Ask."""
        transport.write(self._request)

    def data_received(self, data):
        """Count the events that came."""
        now = time.perf_counter() - self._start
        self._received += data
        while (found := self._received.find(_EVENT, self._searched)) >= 0:
            self._searched = found + len(_EVENT)
            self.stamps.append(now)
        self._searched = max(self._searched, len(self._received) - len(_EVENT) + 1)

    def connection_lost(self, _):
        """Leave out the event with the usage, which is no token's."""
        whole = bytes(self._received)
        if _LAST not in whole or not (found := _TOKENS.findall(whole)):
            self._done.set_exception(RuntimeError(f"no whole stream came: {whole[:500]!r}"))
            return
        self.stamps.pop()
        self._done.set_result((self.stamps, int(found[-1])))


class Server:
    """A server in a process of its own."""

    is_server = True  # the process that asks is none of it

    def __init__(self, command, *, environment=None):
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=environment, start_new_session=True
        )
        self._wait()

    def serve(self, requests):
        """Ask for all as they are due; return for each when its events came, and how many tokens it had."""
        replies = asyncio.run(self._serve(requests))
        return [stamps for stamps, _ in replies], [tokens for _, tokens in replies]

    def close(self):
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _serve(self, requests):
        loop, start = asyncio.get_running_loop(), time.perf_counter()

        async def one(wanted):
            asked = {
                "model": "measured", "prompt": wanted["prompt"], "max_tokens": wanted["max_tokens"],
                "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
            body, done = json.dumps(asked).encode(), loop.create_future()
            await asyncio.sleep(wanted["arrival_s"] - (time.perf_counter() - start))
            await loop.create_connection(lambda: Client(body, start, done), "127.0.0.1", self.port)
            return await done

        return await asyncio.gather(*(one(wanted) for wanted in requests))

    def _wait(self):
        until = time.perf_counter() + _START_S
        while time.perf_counter() < until and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        self.close()
        raise RuntimeError("the server did not start")


class Penstock(Server):
    """`penstock serve`, its defaults but for prefixes."""

    weights = ()

    def __init__(self, folder, _dtype):
        self.port = free_port()
        super().__init__(
            [sys.executable, "-m", "penstock", "serve", folder, "--name", "measured",
             "--port", str(self.port), "--no-prefix-caching", "--max-context", "2048", "--cache-gib", "2",
             *self.weights]
        )  # fmt: skip


class Int8(Penstock):
    """With 8-bit weights."""

    weights = ("--weights", "int8")


class Vllm(Server):
    """vLLM's server, its defaults but for prefixes and what an operator tunes it by (serve_vllm.py)."""

    def __init__(self, folder, dtype):
        self.port = free_port()
        super().__init__(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
             "--served-model-name", "measured", "--port", str(self.port), "--host", "127.0.0.1",
             "--dtype", dtype, "--max-model-len", "2048", "--no-enable-prefix-caching",
             "--disable-log-stats", "--disable-uvicorn-access-log"]
        )  # fmt: skip


def free_port():
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
