"""The feedback log in PostgreSQL, for servers on several machines: `urank serve --sink postgresql://…`.

Tables are as in `sqlite_sink`, with the home as a column. The database numbers feedback in the order of its arrival.
Ids of requests are `bytea`, since `text` cannot contain every character.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from urank.errors import ConfigError, DataError
from urank.serve.feedback_records import TABLES, RecordReader, Row
from urank.serve.feedback_sink import Batch, FeedbackSink

if TYPE_CHECKING:
    import psycopg

SCHEMES = ("postgresql", "postgres")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS urank_homes (home text PRIMARY KEY, begun timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS urank_columns (digest text PRIMARY KEY, definition text NOT NULL);
CREATE TABLE IF NOT EXISTS urank_rankings (
    home text, number bigint, ranking_id text NOT NULL, time_us bigint NOT NULL, columns text NOT NULL,
    query_id bytea NOT NULL, user_id bytea, arm text, policy text NOT NULL, model text NOT NULL, items text NOT NULL,
    categorical text, ranked_position bytea, value bytea, propensity bytea, numeric bytea NOT NULL,
    PRIMARY KEY (home, number)
);
CREATE TABLE IF NOT EXISTS urank_feedback (
    home text, number bigint, ranking_id text NOT NULL, item_id bytea NOT NULL, click boolean NOT NULL,
    conversion boolean NOT NULL, value double precision, arrival bigint GENERATED ALWAYS AS IDENTITY,
    received timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (home, number)
);
CREATE TABLE IF NOT EXISTS urank_shadows (
    home text, number bigint, ranking_id text NOT NULL, model text NOT NULL, items text NOT NULL,
    PRIMARY KEY (home, number)
);
"""
_SCHEMA_LOCK = 0x7572616E6B
_BYTES = {"query_id", "user_id", "item_id"}
_OPTIONS: dict[str, int] = {"connect_timeout": 5, "tcp_user_timeout": 10_000, "keepalives_idle": 5}


def is_postgres(place: str) -> bool:
    """Return whether a place is the URL of a PostgreSQL database.

    >>> is_postgres("postgresql://db/urank"), is_postgres("served")
    (True, False)
    """
    return place.partition("://")[0] in SCHEMES and "://" in place


def place_of(dsn: str) -> str:
    """Return the URL without user, password and options, for messages; refuse anything but a valid URL.

    >>> place_of("postgresql://user:secret@db:5432/urank?sslmode=require")
    'postgresql://db:5432/urank'
    """
    try:
        parts = urlsplit(dsn)
        valid = is_postgres(dsn) and parts.netloc.count("@") <= 1 and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:  # without the URL, which may contain a password
        raise ConfigError(
            "a PostgreSQL database must be a URL as postgresql://user@host:5432/database, with special characters "
            "percent-encoded; the password may come from PGPASSWORD or a password file"
        )
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def connect(dsn: str) -> psycopg.Connection[Any]:
    """Connect, and create the tables if they are missing; raise a `UrankError` if that is impossible."""
    place = place_of(dsn)
    try:
        import psycopg
        from psycopg.conninfo import make_conninfo
    except ImportError:
        message = f"{place} needs psycopg, which is not installed; run pip install 'urank[postgres]'"
        raise ConfigError(message) from None
    try:
        connection = psycopg.connect(make_conninfo(dsn, **_OPTIONS), autocommit=True)
    except psycopg.ProgrammingError:
        raise ConfigError(f"the options of the URL of {place} are not as PostgreSQL requires") from None
    except psycopg.Error as error:
        raise DataError(f"{place} cannot be reached: {_reason(error)}") from None
    try:
        # A commit must be durable when it returns, whatever the default of the server.
        connection.execute("SELECT set_config('synchronous_commit', 'on', false) "
                           "WHERE current_setting('synchronous_commit') = 'off'")  # fmt: skip
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_SCHEMA_LOCK])
            connection.execute(_SCHEMA)
    except psycopg.Error as error:
        connection.close()
        raise DataError(f"{place} cannot be written: {_reason(error)}") from None
    return connection


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__


class PostgresSink(FeedbackSink):
    """Appends to a database; after a failure it connects again."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection: psycopg.Connection[Any] | None = None
        super().__init__(place_of(dsn))

    def _open(self, home: str) -> None:
        self._connection = connect(self._dsn)
        self._connection.execute("INSERT INTO urank_homes VALUES (%s)", [home])

    def _write(self, home: str, batches: Sequence[Batch]) -> None:
        assert self._connection is not None  # noqa: S101 - `_open` was called
        with self._connection.pipeline(), self._connection.transaction(), self._connection.cursor() as cursor:
            for batch in batches:
                if batch.columns is not None:
                    definition = batch.columns.digest, dumps(batch.columns.to_dict())
                    cursor.execute("INSERT INTO urank_columns VALUES (%s, %s) ON CONFLICT DO NOTHING", definition)
            for table in TABLES:
                rows = [_stored(home, table, row) for batch in batches for row in getattr(batch, table)]
                if rows:
                    cursor.executemany(_INSERT[table], rows)

    def _check(self) -> None:
        assert self._connection is not None  # noqa: S101 - `_open` was called
        self._connection.execute("SELECT 1")

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


_STORED = {table: [name for name in names if name != "arrival"] for table, names in TABLES.items()}
_INSERT = {
    table: f"INSERT INTO urank_{table} (home, {', '.join(names)}) VALUES ({', '.join(['%s'] * (len(names) + 1))})"  # noqa: S608
    for table, names in _STORED.items()
}


def _stored(home: str, table: str, row: Row) -> Row:
    pairs = zip(_STORED[table], row, strict=False)  # without the arrival, which comes last
    return home, *(each.encode() if name in _BYTES and each is not None else each for name, each in pairs)


class PostgresReader(RecordReader):
    """Reads the rows of a home, which the database keeps for whoever administers it to delete."""

    def __init__(self, home: str, connection: psycopg.Connection[Any]) -> None:
        super().__init__(self._query, "urank_", f"home = '{home}'")
        self._connection = connection

    def _query(self, query: str) -> Iterator[Row]:
        """Yield rows, of which the client does not hold all at once."""
        with self._connection.transaction(), self._connection.cursor("urank", binary=True) as cursor:
            cursor.execute(query)
            names = [column.name for column in cursor.description or ()]
            for row in cursor:
                pairs = zip(names, row, strict=True)
                yield tuple(each.decode() if name in _BYTES and each is not None else each for name, each in pairs)


class PostgresSource:
    """The homes of a database."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def homes(self) -> list[str]:
        """Return the homes, oldest first."""
        return [home for (home,) in self._connection.execute("SELECT home FROM urank_homes ORDER BY home")]

    @contextmanager
    def open(self, home: str) -> Iterator[PostgresReader]:
        """Open a home."""
        import psycopg

        try:
            yield PostgresReader(home, self._connection)
        except psycopg.Error as error:
            raise DataError(f"the PostgreSQL database cannot be read: {_reason(error)}") from None
