"""The durable memory: effects, stored answers, strikes, counters and settings, in SQLite.

**What survives.** An answer leaves only after `Ledger.commit` has returned, so a killed simulator
process (SIGKILL included) never lost an effect or a stored answer it had answered for. The file
runs in WAL mode with `synchronous=NORMAL`: a commit is in the operating system's hands, which is
enough for the death of the process; a power cut may lose the last commits but does not corrupt
the file. Without a file everything is in memory.

**One transaction for many calls.** Whatever is written during one turn of the event loop is
committed together at its end. SQLite is called on the loop itself: a statement takes
microseconds, and one thread needs no further order. A call whose statements fail is undone alone
(`atomic`).

**Bytes.** Keys, references and bodies are BLOBs: compared byte by byte, NUL included.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_SCHEMA = """
CREATE TABLE IF NOT EXISTS effects ( seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, kind TEXT
NOT NULL, key BLOB, reference BLOB, amount INTEGER, currency TEXT, at REAL NOT NULL, calls INTEGER
NOT NULL, target TEXT, details BLOB NOT NULL ); CREATE INDEX IF NOT EXISTS effects_key ON effects
(key) WHERE key IS NOT NULL; CREATE INDEX IF NOT EXISTS effects_reference ON effects (reference)
WHERE reference IS NOT NULL; CREATE INDEX IF NOT EXISTS effects_target ON effects (target) WHERE
target IS NOT NULL; CREATE TABLE IF NOT EXISTS answers ( key BLOB PRIMARY KEY, fingerprint BLOB
NOT NULL, first_at REAL NOT NULL, forever INTEGER NOT NULL, status INTEGER NOT NULL, content_type
TEXT NOT NULL, body BLOB NOT NULL, effect INTEGER ); CREATE TABLE IF NOT EXISTS strikes (who BLOB
PRIMARY KEY, count INTEGER NOT NULL); CREATE TABLE IF NOT EXISTS early_calls (key BLOB PRIMARY
KEY, count INTEGER NOT NULL); CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value NOT
NULL);
"""
_VERSION = 1
_EFFECT = "seq, id, kind, key, reference, amount, currency, at, calls, target, details"


class LedgerError(Exception):
    """The ledger's file cannot be opened or written; the message is one sentence."""


class Effect(NamedTuple):
    """One effect: it happened, whatever the caller was told.

    `key` and `reference` are bytes as given or None; `amount` is in minor units; `at` is in
    seconds since the epoch; `calls` counts the calls that asked for it; `target` is the id of the
    charge or shipment it acts on; `details` is a JSON object with the rest of the request.
    """

    seq: int
    id: str
    kind: str
    key: bytes | None
    reference: bytes | None
    amount: int | None
    currency: str | None
    at: float
    calls: int
    target: str | None
    details: bytes


class StoredAnswer(NamedTuple):
    """What is remembered under a key; `effect` is its `Effect.seq`, None if there was none."""

    fingerprint: bytes
    first_at: float
    forever: bool
    status: int
    content_type: str
    body: bytes
    effect: int | None


class Ledger:
    """See the module. Every method but `commit` returns at once; use from one event loop only."""

    def __init__(self, data: Path | None) -> None:
        """Open or create the file `data` (None: in memory). Raises `LedgerError`."""
        try:
            if data is not None:
                data.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                ":memory:" if data is None else data, isolation_level=None, timeout=0.5
            )
        except (OSError, sqlite3.Error) as error:
            raise LedgerError(f"The ledger {data} cannot be opened: {error}.") from error
        try:
            # Exclusive: a second simulator on the same file is refused; counts would drift.
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._check_version(data)
            self._db.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
            self.calls = int(self.read_meta("calls") or 0)
            self.connections_without_bytes = int(self.read_meta("connections_without_bytes") or 0)
        except sqlite3.Error as error:
            self._db.close()
            raise LedgerError(f"The ledger {data} cannot be used: {error}.") from error
        self._counted = False
        self._batch_begun = False
        self._batch_lost = False
        self._waiters: list[asyncio.Future[None]] = []

    def _check_version(self, data: Path | None) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _VERSION):
            self._db.close()
            raise LedgerError(f"The ledger {data} was written by another version of the simulator.")
        self._db.execute(f"PRAGMA user_version={_VERSION}")

    # Transactions

    def close(self) -> None:
        """Commit what is open and close the file."""
        self._flush()
        self._db.close()

    async def commit(self) -> None:
        """Return once everything written so far is committed. Raises `LedgerError`."""
        if not (self._counted or self._batch_begun):
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        if len(self._waiters) == 1:
            # What is ready to run in this turn of the loop still writes before the flush.
            loop.call_soon(self._flush)
        await waiter

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """All statements inside take effect together or, on an exception, not at all."""
        self._begin()
        self._db.execute("SAVEPOINT call")
        try:
            yield
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK TO call")
                self._db.execute("RELEASE call")
            raise
        self._db.execute("RELEASE call")

    def _begin(self) -> None:
        if not self._db.in_transaction:
            # On a full disk SQLite rolls the whole batch back by itself; who wrote in it must hear.
            self._batch_lost = self._batch_lost or self._batch_begun
            self._db.execute("BEGIN IMMEDIATE")
            self._batch_begun = True

    def _flush(self) -> None:
        waiters, self._waiters = self._waiters, []
        failure: LedgerError | None = None
        try:
            if self._counted:
                self.write_meta("calls", self.calls)
                self.write_meta("connections_without_bytes", self.connections_without_bytes)
                self._counted = False
            if self._batch_lost or (self._batch_begun and not self._db.in_transaction):
                raise sqlite3.OperationalError("the transaction was rolled back")
            if self._db.in_transaction:
                self._db.execute("COMMIT")
        except sqlite3.Error as error:
            failure = LedgerError(f"The ledger cannot be written: {error}.")
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        self._batch_begun = self._batch_lost = False
        for waiter in waiters:
            if waiter.done():
                continue
            if failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(failure)

    # Counters and settings

    def count_call(self) -> None:
        """One more request to a provider route."""
        self.calls += 1
        self._counted = True

    def count_connection_without_bytes(self) -> None:
        """One more connection that was closed before a single byte came."""
        self.connections_without_bytes += 1
        self._counted = True

    def read_meta(self, name: str) -> str | int | None:
        """A named value, or None."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return None if row is None else row[0]

    def write_meta(self, name: str, value: str | int) -> None:
        """Set a named value."""
        self._begin()
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def reset(self) -> None:
        """Empty everything; counters start at zero."""
        with self.atomic():
            for table in ("effects", "answers", "strikes", "early_calls", "meta"):
                self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - names from the line above
        self.calls = self.connections_without_bytes = 0

    # Effects

    def add_effect(self, effect: Effect) -> Effect:
        """Record `effect`, as it is returned: with its `seq`, and `calls` with the earlier ones."""
        self._begin()
        calls = effect.calls
        if effect.key is not None:
            early = self._db.execute(
                "DELETE FROM early_calls WHERE key = ? RETURNING count", (effect.key,)
            ).fetchall()
            calls += sum(row[0] for row in early)
        seq = self._db.execute(
            "INSERT INTO effects VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*effect[1:8], calls, *effect[9:]),
        ).lastrowid
        return effect._replace(seq=seq or 0, calls=calls)

    def effect(self, kind: str, effect_id: str) -> Effect | None:
        """The effect of this kind with this id."""
        found = self._select("id = ? AND kind = ?", (effect_id, kind))
        return found[0] if found else None

    def effects(
        self,
        *,
        kind: str | None = None,
        reference: bytes | None = None,
        key: bytes | None = None,
        target: str | None = None,
        until: float | None = None,
    ) -> list[Effect]:
        """Effects that match everything given, oldest first, none later than `until`."""
        wanted = {
            "kind = ?": kind, "reference = ?": reference, "key = ?": key, "target = ?": target,
            "at <= ?": until,
        }  # fmt: skip
        given = {clause: value for clause, value in wanted.items() if value is not None}
        return self._select(" AND ".join(given) or "TRUE", tuple(given.values()))

    def _select(self, where: str, values: Sequence[object]) -> list[Effect]:
        rows = self._db.execute(
            f"SELECT {_EFFECT} FROM effects WHERE {where} ORDER BY seq",  # noqa: S608 - own clauses
            values,
        )
        return [Effect(*row) for row in rows]

    def count_ask(self, key: bytes, effect: int | None) -> None:
        """A call asked without executing: count it at its effect, or for the effect to come."""
        self._begin()
        if effect is not None:
            self.add_call(effect)
            return
        self._db.execute(
            "INSERT INTO early_calls VALUES (?, 1)"
            " ON CONFLICT (key) DO UPDATE SET count = count + 1",
            (key,),
        )

    def add_call(self, effect: int) -> None:
        """One more call that asked for the effect with this number (`Effect.seq`)."""
        self._begin()
        self._db.execute("UPDATE effects SET calls = calls + 1 WHERE seq = ?", (effect,))

    # Keys

    def stored_answer(self, key: bytes, *, oldest: float) -> StoredAnswer | None:
        """What is remembered under `key`, unless it was first executed before `oldest`."""
        row = self._db.execute(
            "SELECT fingerprint, first_at, forever, status, content_type, body, effect"
            " FROM answers WHERE key = ?",
            (key,),
        ).fetchone()
        if row is None:
            return None
        stored = StoredAnswer(*row)
        return stored if stored.forever or stored.first_at > oldest else None

    def store_answer(self, key: bytes, stored: StoredAnswer) -> None:
        """Remember an answer under `key`, in place of a forgotten one."""
        self._begin()
        self._db.execute(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (key, *stored)
        )

    def forget_keys(self) -> int:
        """Forget every stored answer, the burned ones too; says how many. Strikes are kept."""
        self._begin()
        return self._db.execute("DELETE FROM answers").rowcount

    def strike(self, who: bytes) -> int:
        """Count a call that carries a failing token; returns its number, 1 for the first."""
        self._begin()
        rows = self._db.execute(
            "INSERT INTO strikes VALUES (?, 1)"
            " ON CONFLICT (who) DO UPDATE SET count = count + 1 RETURNING count",
            (who,),
        ).fetchall()
        return int(rows[0][0])
