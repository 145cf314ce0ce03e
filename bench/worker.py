"""One worker: the loop with its group commits, against its own statements in batches of 50."""

from __future__ import annotations

import asyncio
import time

from app.bootstrap import Core
from app.domain.identity import Direction, DownstreamKey, OperationId, new_id
from app.domain.lifecycle import Actor, State
from app.domain.operation import Lease, Trust
from app.domain.outcome import Succeeded
from app.domain.plan import EffectRequest
from app.service.execution import Execution, Renewal
from app.storage import attempts, claims, leases, operations, reports, steps
from app.storage.database import Database
from bench.trivial import admit, core_on
from workers.lease_keeper import LeaseKeeper
from workers.loop import Loop

BATCH = 50
KNOWN = [("payments.charge", 1)]


async def _fill(core: Core, count: int) -> None:
    service = core.admission()
    for first in range(0, count, 200):
        await asyncio.gather(
            *(admit(service, number) for number in range(first, min(first + 200, count)))
        )


async def through_the_loop(database_url: str, count: int) -> float:
    """Claim, begin, call, record and finish in one process; operations per second until none is left."""
    async with core_on(database_url) as core:
        await _fill(core, count)
        turns = core.turns()
        policy = core.settings.lease_policy
        database = Database(database_url, application="bench-keeper", pool_size=2)
        keeper = LeaseKeeper(lambda: Renewal(database, policy), policy, core.telemetry)
        keeper.start()
        loop = Loop(
            Execution(turns),
            keeper,
            core.telemetry,
            concurrency=256,
            poll_interval_seconds=0.05,
            drain_seconds=10,
        )
        started = time.perf_counter()
        running = asyncio.create_task(loop.run())
        while await _live(core):
            await asyncio.sleep(0.02)
        took = time.perf_counter() - started
        loop.stop()
        await running
        keeper.stop()
        return count / took


async def _live(core: Core) -> bool:
    async with core.database.transaction() as tx:
        return bool(await reports.standings(tx))


async def bare_statements(database_url: str, count: int) -> float:
    """The same statements, batch after batch on one connection, without turns."""
    async with core_on(database_url) as core:
        await _fill(core, count)
        started = time.perf_counter()
        done = 0
        while batch := await _one_batch(core.database):
            done += batch
        assert done == count
        return count / (time.perf_counter() - started)


async def _one_batch(database: Database) -> int:
    async with database.transaction() as tx:
        rows = await claims.claim(
            tx,
            actor=Actor.WORKER,
            owner_token=new_id(),
            lease_seconds=30,
            limit=BATCH,
            known=KNOWN,
        )
    if not rows:
        return 0
    held = [
        Lease(
            OperationId(row["operation_id"]),
            row["lease_owner_token"],
            row["lease_generation"],
            Trust(0),
        )
        for row in rows
    ]
    begins = [_begin(lease) for lease in held]
    async with database.transaction() as tx:
        await steps.begin(tx, begins, await leases.lock(tx, held, unexpired=True))
    answers = [attempts.Answer(one.lease, one.attempt_id, Succeeded("r", {})) for one in begins]
    async with database.transaction() as tx:
        await attempts.record(tx, answers, await leases.lock(tx, held))
        await operations.finish(
            tx, [operations.Finish(lease, State.SUCCEEDED, b"{}", 1) for lease in held]
        )
    return len(rows)


def _begin(lease: Lease) -> steps.Begin:
    return steps.Begin(
        lease=lease,
        attempt_id=new_id(),
        step="charge",
        item=0,
        direction=Direction.FORWARD,
        provider="payments",
        key=DownstreamKey(str(lease.operation.uuid)),
        key_ordinal=0,
        request=EffectRequest("POST", "/v1/charges", b"x" * 200),
        send_window_seconds=10,
        in_transit_seconds=120,
        lag_seconds=2,
        resend_seconds=80000,
    )
