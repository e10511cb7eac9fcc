"""A checkpoint as a model: `penstock serve --checkpoint` on loopback, asked over HTTP with a key of its own.

The server computes on the CPU, where it takes no memory from a job on the GPU, in bounded memory, and ends by
itself after a time without requests, also where the console was killed.
"""

import asyncio
import http.client
import json
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.core import env
from penstock.core.errors import PenstockError

IDLE_S = 300.0
_MAX_SEQUENCES = 16
_END_S = 5.0
"""Seconds to end in, before it is killed."""

Reply = dict[str, Any]  # Any: JSON values


class ModelProcess:
    """A server over one checkpoint; several threads may ask.

    Args:
        context: tokens of a prompt and its answer together.
        cache_bytes: memory of the KV cache.

    Raises:
        PenstockError: the checkpoint cannot be opened; the server's own words.
    """

    def __init__(self, run: Path, step: int, *, context: int, cache_bytes: int) -> None:
        self.context = context
        self._key = secrets.token_hex(24)
        words = ["--checkpoint", step, "--port", 0, "--json", "--idle-s", IDLE_S, "--api-sampling"]
        words += ["--device", "cpu", "--compile", "off", "--max-sequences", _MAX_SEQUENCES]
        words += ["--max-context", context, "--cache-gib", cache_bytes / 2**30]
        with tempfile.TemporaryFile() as errors:
            self._process = self._start([str(run), *map(str, words)], errors.fileno())
            assert self._process.stdout is not None
            started = self._process.stdout.readline()
            if not started:
                self._process.wait()
                self._process.stdout.close()
                errors.seek(0)
                said = " ".join(errors.read().decode(errors="replace").split())
                raise PenstockError(
                    said.rpartition("penstock: ")[2][-2000:] or "The checkpoint cannot be opened"
                )
        self._port: int = json.loads(started)["port"]

    def _start(self, words: list[str], errors: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "penstock", "serve", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**env.variables(""), "PENSTOCK_API_KEY": self._key},
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        """True until the server has ended, for example because nobody asked."""
        return self._process.poll() is None

    def post(self, path: str, body: Reply) -> Reply:
        """Post JSON; return the reply.

        Raises:
            PenstockError: the server refused, or went away.
        """
        connection = self._connection()
        try:
            found: Reply = json.loads(self._answered(connection, path, body).read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _gone(error) from None
        finally:
            connection.close()
        return found

    async def stream(self, path: str, body: Reply) -> AsyncGenerator[Reply, None]:
        """Post JSON; yield the chunks of the answer. Who leaves the iteration cancels the request.

        Raises:
            PenstockError: as in `post`.
        """
        connection = self._connection()
        try:
            body = {**body, "stream": True}
            response = await asyncio.to_thread(self._answered, connection, path, body)
            while line := await asyncio.to_thread(response.readline):
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise PenstockError(chunk["error"]["message"])
                yield chunk
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _gone(error) from None
        finally:
            if connection.sock is not None:
                with suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)  # a thread may still read from it
            connection.close()

    def close(self) -> None:
        """End the server."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port)

    def _answered(
        self, connection: http.client.HTTPConnection, path: str, body: Reply
    ) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise PenstockError(json.loads(response.read())["error"]["message"])
        return response


def _gone(error: Exception) -> PenstockError:
    return PenstockError(f"The process of the checkpoint went away: {error}", fix="Ask again.")
