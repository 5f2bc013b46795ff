"""The schema holds in databases other than SQLite, too."""

import pytest
from sqlalchemy.dialects import registry
from sqlalchemy.schema import CreateIndex, CreateTable

from covey_storage.state.tables import metadata


@pytest.mark.parametrize("name", ["postgresql", "mysql", "sqlite"])
def test_the_schema_compiles_everywhere(name: str) -> None:
    """Every table and index has a statement in each dialect: no type or option is SQLite's own."""
    dialect = registry.load(name)()
    for table in metadata.sorted_tables:
        assert "CREATE TABLE" in str(CreateTable(table).compile(dialect=dialect))
        for index in table.indexes:
            assert "CREATE INDEX" in str(CreateIndex(index).compile(dialect=dialect))
