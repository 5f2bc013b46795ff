"""Databases survive callers that go."""

import asyncio
import random
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from covey_storage.state.sqlite import connect_args


async def select(engine: AsyncEngine) -> None:
    """Runs two statements."""
    async with engine.connect() as connection:
        await connection.execute(text("SELECT 1"))
        await connection.execute(text("SELECT 2"))


async def test_cancelled_statements_leave_nothing_behind(tmp_path: Path) -> None:
    """Whenever a caller is cancelled, no task of the driver stays, and the database goes on and closes."""
    chance = random.Random(1)
    url = f"sqlite+aiosqlite:///{tmp_path / 'x.db'}"
    before = asyncio.all_tasks()
    for _ in range(10):
        engine = create_async_engine(url, connect_args=connect_args(url))
        callers = []
        for _ in range(20):
            callers.append(asyncio.create_task(select(engine)))
            await asyncio.sleep(chance.random() * 0.002)
            if chance.random() < 0.7:
                callers[-1].cancel()
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        async with asyncio.timeout(20):
            await select(engine)
            await engine.dispose()
            left = asyncio.all_tasks() - before
            await asyncio.gather(*left, return_exceptions=True)


def test_other_databases_are_left_alone() -> None:
    """PostgreSQL has its own driver."""
    assert connect_args("postgresql+asyncpg://host/covey") == {}
