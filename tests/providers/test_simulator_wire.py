"""The simulated provider as a server: HTTP, connections, limits, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.providers.simulator.connection import Limits
from app.providers.simulator.server import StartupError, serve
from tests.support.simulator import SimulatorThread

KEY = {"Idempotency-Key": "k-1"}
CHARGE = {"amount": 1000, "currency": "eur", "source": "tok_ok", "reference": "r-1"}
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def running() -> Iterator[SimulatorThread]:
    with SimulatorThread() as simulator:
        yield simulator


@pytest.fixture
def simulator(running: SimulatorThread) -> SimulatorThread:
    running.reset()
    return running


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def talk(port: int, *chunks: bytes) -> bytes:
    """Send, then read to the end of the stream (or the reset)."""
    with connect(port) as link:
        for chunk in chunks:
            link.sendall(chunk)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while data := link.recv(65536):
                got += data
    return got


# HTTP


def test_keep_alive(simulator: SimulatorThread):
    with httpx.Client(base_url=simulator.url, verify=False) as client:
        for _ in range(3):
            client.post("/v1/charges", json=CHARGE)
    (line,) = (line for line in simulator.connections() if line["requests"])
    assert line["requests"] == 3
    assert line["bytes_received"] > 300
    assert line["first_line"] == "POST /v1/charges HTTP/1.1"


def test_connection_close_pipelining_and_http_1_0(simulator: SimulatorThread):
    last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert talk(simulator.port, GET + GET + last).count(b"HTTP/1.1 200 OK") == 3
    assert talk(simulator.port, b"GET /livez HTTP/1.0\r\n\r\n").count(b"200 OK") == 1
    chunks = [last[place : place + 1] for place in range(len(last))]
    assert talk(simulator.port, *chunks).count(b"200 OK") == 1


def test_chunked_absolute_form_head_and_expect(simulator: SimulatorThread):
    answer = talk(
        simulator.port,
        b"POST http://other/v1/shipments?a=1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: application/json\r\nConnection: close\r\n\r\n",
        b'5\r\n{"add\r\n',
        b'd\r\nress": "here"\r\n',
        b"1\r\n}\r\n0\r\n\r\n",
    )
    assert b"200 OK" in answer
    assert len(simulator.effects(kind="shipment")) == 1
    head = talk(simulator.port, b"HEAD /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404")
    assert head.endswith(b"\r\n\r\n")
    with connect(simulator.port) as link:
        link.sendall(
            b"PATCH /_control HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert link.recv(1000).startswith(b"HTTP/1.1 100 ")
        link.sendall(b"{}")
        assert link.recv(1000).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET /a\0b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\0c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"A" * 40_000,
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 1_000_000,
    ],
    ids=["tls", "no host", "nul in path", "nul in header", "length", "chunk", "line", "head"],
)
def test_malformed_http(garbage: bytes, simulator: SimulatorThread):
    answer = talk(simulator.port, garbage)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert b"http_malformed" in answer
    assert simulator.ledger()["calls"] == 0


def test_half_sent_requests(simulator: SimulatorThread):
    with connect(simulator.port) as link:
        link.sendall(b"POST /v1/charges HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1000).startswith(b"HTTP/1.1 400 ")
    with connect(simulator.port) as link:  # whoever has only stopped sending still gets the answer
        link.sendall(GET)
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1000).startswith(b"HTTP/1.1 200 ")
        assert link.recv(1000) == b""


def test_huge_bodies(simulator: SimulatorThread):
    head = b"POST /v1/charges HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    declared = talk(simulator.port, head + b"Content-Length: 99999999\r\n\r\n" + b"x" * 3_000_000)
    assert declared.startswith(b"HTTP/1.1 413 ")
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    chunked = talk(simulator.port, head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 40)
    assert chunked.startswith(b"HTTP/1.1 413 ")
    assert simulator.effects() == []
    with httpx.Client(base_url=simulator.url, verify=False) as client:
        big = {**CHARGE, "description": "x" * 900_000}
        assert client.post("/v1/charges", json=big).status_code == 200


def test_a_flood_behind_a_slow_call_is_held_back(simulator: SimulatorThread):
    simulator.fault(effect="before", delay_seconds=1.0, answer={"status": 503})
    first = b"GET /v1/charges?reference=a HTTP/1.1\r\nHost: x\r\n\r\n"
    with connect(simulator.port) as link:
        link.sendall(first)
        link.settimeout(0.1)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 50_000_000:
                sent += link.send(GET * 500)
        line = simulator.connections()[-1]
        assert line["requests"] == 1
        assert line["bytes_received"] < 1_000_000
        link.settimeout(5)
        got = b""
        while got.count(b"HTTP/1.1 ") < 1 + 500:
            got += link.recv(65536)
    assert got.startswith(b"HTTP/1.1 503 ")
    simulator.wait_until(lambda: all(entry["closed_at"] for entry in simulator.connections()))


# Connections


def test_connections_without_bytes(simulator: SimulatorThread):
    connect(simulator.port).close()
    simulator.wait_until(lambda: simulator.ledger()["connections_without_bytes"] == 1)
    with connect(simulator.port) as link:
        line = simulator.connections()[-1]
        assert (line["bytes_received"], line["first_line"], line["ended"]) == (0, None, None)
        link.sendall(b"G")
    simulator.wait_until(lambda: all(entry["closed_at"] for entry in simulator.connections()))
    lines = simulator.connections()
    assert [entry["bytes_received"] for entry in lines[-2:]] == [0, 1]
    assert [entry["ended"] for entry in lines[-2:]] == ["peer", "server"]
    assert simulator.ledger()["connections_without_bytes"] == 1


def test_a_sender_that_stops_at_its_last_check_sent_nothing(simulator: SimulatorThread):
    # R1, as the protocol's page measured it: raising on the open connection, before the first byte.
    class TooLateError(Exception):
        pass

    def last_check(event: str, info: object) -> None:
        if event == "http11.send_request_headers.started":
            raise TooLateError

    with (
        httpx.Client(base_url=simulator.url, verify=False) as client,
        pytest.raises(TooLateError),
    ):
        client.post("/v1/charges", json=CHARGE, extensions={"trace": last_check})
    simulator.wait_until(lambda: simulator.ledger()["connections_without_bytes"] == 1)
    assert simulator.ledger()["calls"] == 0


@pytest.mark.anyio
async def test_limits():
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    limits = Limits(connections=2, idle_seconds=0.2)
    running = asyncio.create_task(
        serve(
            "127.0.0.1", 0, None,
            ready=lambda host, port: ready.set_result(port), stop=stop, limits=limits,
        )
    )  # fmt: skip
    port = await ready
    links = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
    assert (await links[2][0].read(1000)).startswith(b"HTTP/1.1 503 ")
    for reader, _ in links[:2]:  # idle: the server closes, as real ones do
        assert await reader.read() == b""
    for _, writer in links:
        writer.close()
    stop.set()
    await running


@pytest.mark.anyio
async def test_startup_errors(tmp_path: Path, simulator: SimulatorThread):
    with pytest.raises(StartupError, match=f"cannot listen on 127.0.0.1 port {simulator.port}: "):
        await serve("127.0.0.1", simulator.port, None)
    with pytest.raises(StartupError, match="address"):
        await serve("no such host", 0, None)
    broken = tmp_path / "broken"
    broken.write_bytes(b"no database" * 1000)
    with pytest.raises(StartupError, match="ledger"):
        await serve("127.0.0.1", 0, broken)
    with pytest.raises(StartupError, match="ledger"):
        await serve("127.0.0.1", 0, broken / "below a file")
    newer = tmp_path / "newer"
    with contextlib.closing(sqlite3.connect(newer)) as file:
        file.execute("PRAGMA user_version=99")
    with pytest.raises(StartupError, match="another version"):
        await serve("127.0.0.1", 0, newer)
    data = tmp_path / "new folder" / "ledger"
    with SimulatorThread(data), pytest.raises(StartupError, match="ledger"):
        await serve("127.0.0.1", 0, data)


def test_a_clean_stop(tmp_path: Path):
    with SimulatorThread(tmp_path / "ledger") as simulator:
        idle = connect(simulator.port)
        simulator.control(slow_seconds=30)
        with httpx.Client(base_url=simulator.url, verify=False) as client:
            slow = {**CHARGE, "source": "tok_slow"}
            brief = httpx.Timeout(5, read=0.1)
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/charges", json=slow, headers=KEY, timeout=brief)
            simulator.wait_until(simulator.effects)
            client.post("/v1/charges", json={**CHARGE, "reference": "r-2"})
            started = time.monotonic()
            simulator.restart()
            assert time.monotonic() - started < 5
            assert idle.recv(10) == b""
            idle.close()
            assert [line["reference"] for line in simulator.effects()] == ["r-1", "r-2"]
            assert simulator.control()["slow_seconds"] == 30
            assert simulator.ledger()["calls"] == 2
            # Cut in the middle of a slow call: the answer was stored with the effect.
            again = client.post("/v1/charges", json=slow, headers=KEY)
            assert again.headers["Idempotent-Replayed"] == "true"
