"""Settings from the environment, `FENCEPOST_*` (and `DATABASE_URL`); nonsense is refused at start.

Every field is one environment variable: its name in upper case after `FENCEPOST_`. A provider's own options
(`FENCEPOST_<PROVIDER>_*`) are declared beside the provider and read by bootstrap. The README lists all.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import AliasChoices, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.domain.errors import ConfigurationError
from app.domain.policy import DAY_SECONDS, LeasePolicy


class Settings(BaseSettings):
    """Frozen. Times are seconds, sizes bytes."""

    model_config = SettingsConfigDict(
        env_prefix="FENCEPOST_", frozen=True, extra="ignore", populate_by_name=True
    )

    database_url: SecretStr = Field(
        SecretStr("postgresql://localhost/fencepost"),
        validation_alias=AliasChoices("FENCEPOST_DATABASE_URL", "DATABASE_URL"),
        description="PostgreSQL 15 or newer",
    )
    environment: Literal["development", "test", "production"] = Field(
        "development", description="Part of every API key; production insists on a stamp"
    )
    installation: str = Field(
        "", max_length=200, description="The stamp a copy of the database does not carry"
    )
    public_url: str = Field(
        "", description="Where clients reach the API, with any path prefix; empty: links are paths"
    )
    database_pool_size: int = Field(8, ge=2, le=200, description="Connections per process")
    database_prepared_statements: bool = Field(
        True, description="Off behind a pooler in transaction mode; LISTEN is then off too"
    )
    database_timeout_seconds: float = Field(
        5.0, gt=0, description="Wait for a connection, a row or a statement before 503"
    )
    lease_seconds: float = Field(30.0, gt=0, description="How long a claim lasts without renewal")
    renew_interval_seconds: float | None = Field(
        None, gt=0, description="How often leases are renewed; default a third of the lease"
    )
    claims_limit: int = Field(
        5, ge=1, description="Claims that ended by expiry before an operation needs attention"
    )
    poll_interval_seconds: float = Field(
        1.0, gt=0, description="How often due work is looked for; notices only shorten it"
    )
    reconcile_interval_seconds: float = Field(
        1.0, gt=0, description="How often a reconciler looks for due work"
    )
    worker_concurrency: int = Field(
        64, ge=1, le=2000, description="Operations one worker process carries at once"
    )
    drain_seconds: float = Field(
        25.0,
        ge=0,
        description="How long SIGTERM waits for calls under way before leases are given up",
    )
    retention_seconds: float = Field(
        30 * DAY_SECONDS,
        gt=0,
        description="How long payload and result stay, where the type is silent",
    )
    retention_tombstone_seconds: float = Field(
        400 * DAY_SECONDS, gt=0, description="How long a key stays taken, where the type is silent"
    )
    max_body_bytes: int = Field(262_144, ge=1024, description="Largest request body, also unpacked")
    max_wait_seconds: float = Field(
        60.0, ge=0, description="Longest `Prefer: wait` that is honoured"
    )
    cors_origins: str = Field("", description="Comma-separated origins; empty: CORS is off")
    metrics_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="Where worker and reconciler serve /metrics on loopback; 0: off",
    )
    metrics_public: bool = Field(
        True, description="Whether the API serves /metrics; off: answer 404"
    )
    simulator_data: str = Field(
        "", description="Where the simulated provider keeps its ledger; empty: in memory"
    )
    log_format: Literal["json", "console"] = Field("json", description="Shape of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe line that is written"
    )
    failpoints: str = Field(
        "", description="Test only: crash windows to arm, `name=action` separated by commas"
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.environment == "production" and not self.installation:
            raise ValueError("installation must be set in production (FENCEPOST_INSTALLATION)")
        if self.environment == "production" and self.failpoints:
            raise ValueError("failpoints must be empty in production (FENCEPOST_FAILPOINTS)")
        if self.retention_seconds > self.retention_tombstone_seconds:
            raise ValueError("retention_tombstone_seconds must not be below retention_seconds")
        if not self.database_url.get_secret_value().startswith(("postgresql://", "postgres://")):
            raise ValueError("database_url must begin with postgresql://")
        if self.public_url and not self.public_url.startswith(("https://", "http://")):
            raise ValueError("public_url must begin with https:// or http://")
        try:
            _ = self.lease_policy
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def lease_policy(self) -> LeasePolicy:
        """Lease, renewal and margin, validated; the margin is a tenth of the lease, 2 s at most."""
        interval = self.renew_interval_seconds
        return LeasePolicy(
            lease_seconds=self.lease_seconds,
            renew_interval_seconds=self.lease_seconds / 3 if interval is None else interval,
            margin_seconds=min(2.0, self.lease_seconds / 10),
            claims_limit=self.claims_limit,
        )

    @property
    def cors_origin_list(self) -> tuple[str, ...]:
        """The origins CORS is answered for."""
        return tuple(part.strip() for part in self.cors_origins.split(",") if part.strip())


def load_settings() -> Settings:
    """The settings of this process.

    Raises:
        ConfigurationError: one sentence per field that does not hold, each naming its variable. Values
            are not repeated, since one may be a secret.
    """
    try:
        return Settings()
    except ValidationError as error:
        problems = []
        for item in error.errors(include_input=False, include_url=False):
            field = ".".join(str(part) for part in item["loc"])
            variable = field if field.isupper() else f"FENCEPOST_{field.upper()}" if field else ""
            problems.append(f"{variable}: {item['msg']}" if variable else str(item["msg"]))
        raise ConfigurationError("; ".join(problems)) from None
