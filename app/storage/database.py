"""The way to PostgreSQL: a pool, transactions that say what a failure means, statements compiled once.

SQLAlchemy Core spells each statement and compiles it when the module is loaded; psycopg runs the text, since
SQLAlchemy's cost is per statement and these are hot (BENCH.md, trap 6).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout
from sqlalchemy.dialects import postgresql as pg
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from app.domain.errors import CommitUnknown, StoreBusy, StoreUnavailable

Row = DictRow
_DIALECT = PGDialect_psycopg()  # type: ignore[no-untyped-call]

_BUSY = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.QueryCanceled,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)
_TRANSIENT = (psycopg.OperationalError, psycopg.InterfaceError, PoolTimeout, PoolClosed, OSError)


class Statement:
    """One statement, compiled once. Parameters are given by name at each run."""

    __slots__ = ("_fixed", "name", "sql")

    def __init__(self, name: str, construct: sa.ClauseElement) -> None:
        compiled = construct.compile(dialect=_DIALECT)
        self.name = name
        self.sql = str(compiled)
        self._fixed = dict(compiled.params)

    def parameters(self, given: Mapping[str, object]) -> dict[str, object]:
        """All parameters of one run: the construct's own literals and what the caller gives."""
        return {**self._fixed, **given}


Kind = Any
"""A SQLAlchemy type; the library's own annotations of it do not agree with each other."""


def batch(name: str, /, **columns: Kind) -> sa.TableValuedAlias:
    """A table `name` made of one array parameter per column (`<name>_<column>`), one row per item."""
    parameters = [
        sa.bindparam(f"{name}_{column}", type_=pg.ARRAY(kind)) for column, kind in columns.items()
    ]
    return (
        sa.func.unnest(*parameters)
        .table_valued(*(sa.column(column, kind) for column, kind in columns.items()))
        .render_derived(name=name)
    )


def arrays(name: str, columns: Mapping[str, Sequence[object]]) -> dict[str, object]:
    """The parameters of a `batch` table of that name."""
    return {f"{name}_{column}": list(values) for column, values in columns.items()}


def one_of(column: sa.ColumnElement[Any], values: Iterable[str]) -> sa.ColumnElement[bool]:
    """Whether the column holds one of these values, each a parameter of its own."""
    return sa.or_(sa.false(), *(column == str(value) for value in values))


def looked_up(*conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
    """An EXISTS that is asked anew for each row, by index. Use it under an OR.

    There the planner may else read the whole table once into a hash, and a plan made while the table was
    empty does (BENCH.md, trap 7). OFFSET 0 is what keeps it from trying.
    """
    return sa.exists(
        sa.select(sa.literal_column("1")).where(*conditions).offset(sa.literal_column("0"))
    )


def seconds(amount: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    """An interval of so many seconds."""
    return amount * sa.literal_column("interval '1 second'", pg.INTERVAL())


class Transaction:
    """One open transaction; storage verbs take it as their first argument."""

    __slots__ = ("_connection",)

    def __init__(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        self._connection = connection

    async def fetch(self, statement: Statement, **parameters: object) -> list[Row]:
        """Run `statement` and return its rows.

        Raises:
            StoreUnavailable: the database went away.
            StoreBusy: a row or the statement took too long.
        """
        with store_errors():
            cursor = await self._connection.execute(statement.sql, statement.parameters(parameters))
            return await cursor.fetchall()

    async def execute(self, statement: Statement, **parameters: object) -> int:
        """Run `statement` and return how many rows it changed.

        Raises:
            StoreUnavailable: as `fetch`.
        """
        with store_errors():
            cursor = await self._connection.execute(statement.sql, statement.parameters(parameters))
            return cursor.rowcount


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn what psycopg raises when the database is away or too slow into `StoreUnavailable`."""
    try:
        yield
    except _BUSY as error:
        raise StoreBusy(f"{type(error).__name__}: {_first_line(error)}") from error
    except _TRANSIENT as error:
        raise StoreUnavailable(f"{type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


class Database:
    """A pool of connections to one database. Open it in the loop that uses it."""

    def __init__(
        self,
        url: str,
        *,
        application: str,
        pool_size: int = 8,
        timeout_seconds: float = 5.0,
        prepared_statements: bool = True,
    ) -> None:
        self.url = url
        self.prepared_statements = prepared_statements
        self._timeout_seconds = timeout_seconds
        self._application = application
        self._identity: tuple[Statement, Row] | None = None
        self._pool: AsyncConnectionPool[psycopg.AsyncConnection[DictRow]] = AsyncConnectionPool(
            url,
            kwargs=self._connect_arguments(),
            min_size=0 if pool_size < 3 else 2,
            max_size=pool_size,
            timeout=timeout_seconds,
            max_idle=60.0,
            reconnect_timeout=5.0,
            configure=self._insist,
            open=False,
            name=application,
        )

    def insist_on(self, identity: Statement, expected: Row) -> None:
        """From now on use only connections to the very cluster that answers `identity` as expected.

        A failover brings new connections before any poll can notice it; on a promoted or restored copy
        this process must not act (DESIGN.md I11), so there it finds no connection at all.
        """
        self._identity = (identity, expected)

    async def _insist(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        if self._identity is None:
            return
        identity, expected = self._identity
        cursor = await connection.execute(identity.sql, identity.parameters({}))
        row = await cursor.fetchone()
        await connection.rollback()
        if row != expected:
            raise psycopg.OperationalError("this is another installation's cluster, or a copy")

    def _connect_arguments(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "application_name": self._application,
            "row_factory": dict_row,
            "connect_timeout": max(2, round(self._timeout_seconds)),
            "prepare_threshold": 5 if self.prepared_statements else None,
            # A half-open connection (CASES.md B37) is noticed in about half a minute.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 30_000,
        }
        if self.prepared_statements:
            arguments["options"] = self._session_options()
        return arguments

    async def _set_for_transaction(self, connection: psycopg.AsyncConnection[DictRow]) -> None:
        """Behind a pooler a session is shared, so what others set at the start holds for a transaction."""
        names = ", ".join(
            f"set_config('{name}', '{value}', true)" for name, value in self._settings().items()
        )
        with store_errors():
            await connection.execute(f"SELECT {names}".encode())

    def _session_options(self) -> str:
        return " ".join(f"-c {name}={value}" for name, value in self._settings().items())

    def _settings(self) -> dict[str, object]:
        milliseconds = round(self._timeout_seconds * 1000)
        return {
            "statement_timeout": milliseconds,
            "lock_timeout": milliseconds,
            "idle_in_transaction_session_timeout": 2 * milliseconds,
            "timezone": "UTC",
            "jit": "off",
            # Every verb reaches a bounded batch by key. Without these a plan made while a table was
            # empty reads all of it later (BENCH.md, trap 7); tests pin the plans this gives.
            "enable_seqscan": "off",
            "enable_hashjoin": "off",
            "enable_mergejoin": "off",
        }

    async def open(self) -> None:
        """Start the pool; it connects in the background and keeps trying while the database is away."""
        await self._pool.open(wait=False)

    async def close(self) -> None:
        """Close every connection, those in use as soon as they come back."""
        await self._pool.close()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """One transaction: committed when the block ends, rolled back when it raises.

        Raises:
            StoreUnavailable: no connection in time, or it was lost before COMMIT; nothing stands.
            CommitUnknown: the error came at COMMIT (R13, R17): run the verb again, it compares.
        """
        with store_errors():
            connection = await self._pool.getconn()
        try:
            try:
                if not self.prepared_statements:
                    await self._set_for_transaction(connection)
                yield Transaction(connection)
            except BaseException:
                await _roll_back(connection)
                raise
            try:
                await connection.commit()
            except _TRANSIENT as error:
                await connection.close()
                raise CommitUnknown(f"{type(error).__name__}: {_first_line(error)}") from error
            except BaseException:
                await connection.close()  # cancelled at COMMIT: nobody may use this session again
                raise
        finally:
            await asyncio.shield(self._pool.putconn(connection))

    async def dedicated(self) -> psycopg.AsyncConnection[DictRow]:
        """A connection of one's own in autocommit mode, outside the pool: for LISTEN and the keeper.

        Raises:
            StoreUnavailable: the database cannot be reached.
        """
        with store_errors():
            return await psycopg.AsyncConnection.connect(
                self.url, autocommit=True, **self._connect_arguments()
            )


async def _roll_back(connection: psycopg.AsyncConnection[DictRow]) -> None:
    try:
        await connection.rollback()
    except _TRANSIENT:
        await connection.close()
