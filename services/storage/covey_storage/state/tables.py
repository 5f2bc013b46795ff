"""The schema."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

__all__ = [
    "SCHEMA_VERSION",
    "blobs",
    "checkpoints",
    "metadata",
    "references",
    "removals",
    "schema_version",
    "secrets",
]

SCHEMA_VERSION = 1
"""Grows by one with each change of the tables below; `database.MIGRATIONS` says how to get there."""

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

secrets = Table(
    "secrets",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

blobs = Table(
    "blobs",
    metadata,
    Column("sha256", String(64), primary_key=True),
    Column("size_bytes", BigInteger, nullable=False),
    # Microseconds since 1970: exact in every database.
    Column("create_time_us", BigInteger, nullable=False),
    Column("quarantined", Boolean, nullable=False),
)

references = Table(
    "blob_references",
    metadata,
    Column("holder", String(128), primary_key=True),
    Column("sha256", String(64), ForeignKey("blobs.sha256"), primary_key=True),
    Index("blob_references_sha256", "sha256"),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("round", BigInteger, primary_key=True, autoincrement=False),
    Column("sha256", String(64), ForeignKey("blobs.sha256"), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("header", LargeBinary, nullable=False),
    Column("weights_offset", BigInteger, nullable=False),
    Column("weights_bytes", BigInteger, nullable=False),
    Column("weights_sha256", String(64), nullable=False),
    Index("checkpoints_sha256", "sha256"),
)

# Files whose records are gone and that must go too: what survives a crash between the two.
removals = Table("removals", metadata, Column("sha256", String(64), primary_key=True))
