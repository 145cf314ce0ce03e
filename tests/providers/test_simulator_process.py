"""The simulated provider's durability, and its process: SIGKILL, a full disk, the command line."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app.providers.simulator.ledger import Effect, Ledger, LedgerError
from tests.support.simulator import SimulatorProcess

CHARGE = {"amount": 1000, "currency": "eur", "source": "tok_ok", "reference": "r-1"}


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


@pytest.mark.anyio
async def test_a_full_disk_loses_no_answered_effect(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger")
    ledger._db.execute("PRAGMA max_page_count=40")
    answered = set()

    async def record(number: int) -> None:
        effect = Effect(
            0, f"ch_{number}", "charge", b"k-%d" % number, None, 1, "eur", 0.0, 1, None, b"{}"
        )
        with contextlib.suppress(LedgerError, sqlite3.Error):
            with ledger.atomic():
                ledger.add_effect(effect._replace(details=b"x" * 1000))
            await ledger.commit()
            answered.add(effect.id)

    for batch in range(0, 200, 10):
        await asyncio.gather(*(record(number) for number in range(batch, batch + 10)))
    ledger._db.execute("PRAGMA max_page_count=1000")
    assert 20 < len(answered) < 200
    assert {effect.id for effect in ledger.effects()} == answered
    await record(1000)
    assert "ch_1000" in answered
    ledger.close()


@pytest.mark.slow
def test_kill_minus_nine_loses_nothing_that_was_answered():
    with SimulatorProcess() as simulator:
        answered: dict[str, bytes] = {}
        with httpx.Client(base_url=simulator.url, verify=False) as client:
            for number in range(200):
                key = f"k-{number}"
                body = {**CHARGE, "amount": number + 1}
                reply = client.post("/v1/charges", json=body, headers={"Idempotency-Key": key})
                answered[key] = reply.content
            headers = {"Idempotency-Key": "struck"}
            struck = {**CHARGE, "source": "tok_500_before"}
            assert client.post("/v1/charges", json=struck, headers=headers).status_code == 500
            burned = {**CHARGE, "source": "tok_500_burn"}
            client.post("/v1/charges", json=burned, headers={"Idempotency-Key": "burned"})
            simulator.control(seed=5)
            connect(simulator.port).close()
            simulator.wait_until(lambda: simulator.ledger()["connections_without_bytes"] == 1)
        before = simulator.ledger()
        port = simulator.port
        simulator.kill()
        simulator.restart()
        assert simulator.port == port
        assert simulator.ledger() == before
        assert simulator.control()["seed"] == 5
        with httpx.Client(base_url=simulator.url, verify=False) as client:
            for number, (key, content) in enumerate(answered.items()):
                body = {**CHARGE, "amount": number + 1}
                reply = client.post("/v1/charges", json=body, headers={"Idempotency-Key": key})
                assert reply.headers["Idempotent-Replayed"] == "true"
                assert reply.content == content
            again = client.post("/v1/charges", json=struck, headers=headers)
            assert again.status_code == 200  # a fault does not strike twice
            stored = client.post("/v1/charges", json=burned, headers={"Idempotency-Key": "burned"})
            assert stored.headers["Idempotent-Replayed"] == "true"
        assert len(simulator.effects()) == 201


@pytest.mark.slow
@pytest.mark.anyio
async def test_kill_minus_nine_under_load():
    """Every answer that arrived is in the ledger afterwards, with the same bytes, exactly once."""
    with SimulatorProcess() as simulator:
        answered: dict[str, bytes] = {}
        enough = asyncio.Event()

        async def keep_sending(client: httpx.AsyncClient, name: str) -> None:
            for number in range(1_000_000):
                key = f"{name}-{number}"
                try:
                    reply = await client.post(
                        "/v1/charges", json=CHARGE, headers={"Idempotency-Key": key}
                    )
                except httpx.TransportError:
                    return
                answered[key] = reply.content
                if len(answered) == 200:
                    enough.set()

        async with httpx.AsyncClient(base_url=simulator.url, verify=False) as client:
            senders = [asyncio.create_task(keep_sending(client, str(name))) for name in range(8)]
            await enough.wait()
            simulator.kill()
            await asyncio.gather(*senders)
        simulator.restart()
        effects = simulator.effects()
        by_key = {line["key"]: line["id"] for line in effects}
        assert len(by_key) == len(effects)
        assert len(answered) <= len(effects) <= len(answered) + 8
        async with httpx.AsyncClient(base_url=simulator.url, verify=False) as client:
            for key, content in [*answered.items()][-50:]:
                assert by_key[key].encode() in content
                reply = await client.post(
                    "/v1/charges", json=CHARGE, headers={"Idempotency-Key": key}
                )
                assert reply.content == content


@pytest.mark.slow
def test_the_command_line(tmp_path: Path):
    command = [sys.executable, "-m", "app.providers.simulator"]
    with SimulatorProcess() as simulator:
        taken = subprocess.run(
            [*command, "--port", str(simulator.port)], capture_output=True, text=True, timeout=20
        )
        assert taken.returncode == 3
        assert taken.stdout == ""
        (line,) = taken.stderr.splitlines()
        assert line == (
            f"The simulator cannot listen on 127.0.0.1 port {simulator.port}: "
            "Address already in use."
        )
    usage = subprocess.run([*command, "--prot", "1"], capture_output=True, timeout=20)
    assert usage.returncode == 2
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("simulator listening on http://127.0.0.1:")
            process.send_signal(number)
            _, errors = process.communicate(timeout=10)
        assert (process.returncode, errors) == (0, "")
