"""The tables. Nothing in them is SQLite's own, so that the URL may name PostgreSQL.

Times are unix seconds; digests hex; metrics JSON lists of {name, sum, count} (numbers in JSON keep every
bit of an f64); what the contract has a message for is kept as that message, serialized.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

__all__ = [
    "SCHEMA_VERSION",
    "assignments",
    "faults",
    "holders",
    "invitations",
    "job_specs",
    "jobs",
    "metadata",
    "participants",
    "requests",
    "rounds",
    "settings",
    "validations",
]

SCHEMA_VERSION = 2
"""Grows by one with each change of the tables; another version's database is refused."""

metadata = MetaData()

_JOB = String(63)
_PARTICIPANT = String(63)
_ASSIGNMENT = String(128)
_SHA256 = String(64)

settings = Table(
    "settings",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)

participants = Table(
    "participants",
    metadata,
    Column("participant_id", _PARTICIPANT, primary_key=True),
    Column("display_name", Text, nullable=False),
    Column("credential_sha256", _SHA256, nullable=False),
    Column("device", LargeBinary, nullable=False),  # DeviceInfo
    Column("join_time", Double, nullable=False),
    Column("last_seen_time", Double, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("sequence", Integer, primary_key=True, autoincrement=True),
    Column("job_id", _JOB, nullable=False, unique=True),
    Column("display_name", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("create_time", Double, nullable=False),
    Column("start_time", Double),
    Column("end_time", Double),
    Column("paused_time", Double),
    Column("package_name", String(63), nullable=False),
    Column("package_version", String(64), nullable=False),
    Column("unit", String(32), nullable=False),
    Column("settings", LargeBinary, nullable=False),  # JobSettings in force
    Column("chunk_count", Integer, nullable=False),
    Column("can_validate", Boolean, nullable=False),
    Column("rounds_wanted", Integer, nullable=False),
    Column("rounds_done", Integer, nullable=False),
    Column("units_done", BigInteger, nullable=False),
    Column("failure", LargeBinary),  # Failure
    Column("last_error", LargeBinary),  # Failure
    Column("origin", Text, nullable=False),  # JSON of Origin
    Column("lineage", LargeBinary),  # JobLineage; none: it began with initial weights
    Index("jobs_state", "state"),
)

job_specs = Table(
    "job_specs",
    metadata,
    Column("job_id", _JOB, ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True),
    Column("package", LargeBinary, nullable=False),  # ModelPackage
    Column("dataset", LargeBinary, nullable=False),  # DatasetManifest
)

requests = Table(
    "requests",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("fingerprint", _SHA256, nullable=False),
    Column("job_id", _JOB, ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False, index=True),
)

invitations = Table(
    "invitations",
    metadata,
    Column("job_id", _JOB, ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False),
    Column("participant_id", _PARTICIPANT, ForeignKey("participants.participant_id"), nullable=False),
    Column("invitation_id", String(128), nullable=False),
    Column("state", String(16), nullable=False),
    Column("create_time", Double, nullable=False),
    Column("assignments_done", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("backend", String(16)),
    PrimaryKeyConstraint("job_id", "participant_id"),
    UniqueConstraint("invitation_id"),
    Index("invitations_participant", "participant_id"),
)

rounds = Table(
    "rounds",
    metadata,
    Column("job_id", _JOB, ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("start_time", Double, nullable=False),
    Column("end_time", Double),  # none: the round is open, and so is everything below
    Column("metrics", Text),
    Column("validation_metrics", Text),
    Column("units", BigInteger),
    Column("assignments", Integer, nullable=False),
    Column("participant_ids", Text),  # JSON list
    Column("no_units", Boolean),
    Column("checkpoint_sha256", _SHA256),
    Column("checkpoint_size", BigInteger),
    Column("weights_offset", BigInteger),
    Column("weights_size", BigInteger),
    Column("weights_sha256", _SHA256),
    PrimaryKeyConstraint("job_id", "round"),
)

assignments = Table(
    "assignments",
    metadata,
    Column("assignment_id", _ASSIGNMENT, primary_key=True),
    Column("job_id", _JOB, ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("place", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("participant_id", _PARTICIPANT),  # who has it; none: nobody
    Column("lease_time", Double),
    Column("result_participant_id", _PARTICIPANT),  # who did it; none: nobody yet, and so is what follows
    Column("result_attempt", Integer),
    Column("units", BigInteger),
    Column("metrics", Text),
    Column("backend", String(16)),
    Column("compute_seconds", Double),
    Column("delta_name", Text),
    Column("delta_sha256", _SHA256),
    Column("delta_size", BigInteger),
    Index("assignments_round", "job_id", "round"),
)

faults = Table(
    "faults",
    metadata,
    Column(
        "assignment_id",
        _ASSIGNMENT,
        ForeignKey("assignments.assignment_id", ondelete="CASCADE"),
        nullable=False,
    ),
    Column("attempt", Integer, nullable=False),
    Column("participant_id", _PARTICIPANT, nullable=False),
    Column("package", Boolean, nullable=False),
    Column("failure", LargeBinary, nullable=False),  # Failure
    PrimaryKeyConstraint("assignment_id", "attempt"),
)

validations = Table(
    "validations",
    metadata,
    Column("job_id", _JOB, ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False),
    Column("round", Integer, nullable=False),
    Column("scheduled", Boolean, nullable=False),
    PrimaryKeyConstraint("job_id", "round"),
)

holders = Table(
    "holders",
    metadata,
    Column("job_id", _JOB, primary_key=True),
)
