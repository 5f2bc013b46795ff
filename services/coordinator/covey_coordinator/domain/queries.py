"""What owners ask: lists, pages, and how a job moves."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence

from covey_coordinator.domain.model import InvitationState, JobRecord, JobState, RoundRecord
from covey_coordinator.domain.pages import PageTokens
from covey_coordinator.domain.ports import Transaction
from covey_coordinator.domain.recovery import load_sight
from covey_coordinator.domain.spec import JobSpec
from covey_coordinator.domain.world import JobSight, Member, World, job_not_found
from covey_kit.errors import Reason, Unavailable

__all__ = ["Queries"]

_LONGEST_PAUSE = 2.0


class Queries:
    """Reads, never writes."""

    def __init__(self, world: World, tokens: PageTokens) -> None:
        self._world = world
        self._tokens = tokens
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends all watches; the server stops."""
        self._stopping.set()

    async def _sight(self, job_id: str) -> JobSight:
        job = self._world.jobs.get(job_id)
        if job is not None:
            return job
        return await self._world.store.read(lambda tx: load_sight(tx, job_id))

    async def jobs(self, size: int, token: str, states: Sequence[JobState]) -> tuple[list[JobSight], str]:
        """Returns a page of jobs, the newest first, and the next page's token.

        Raises:
            InvalidArgument: PAGE_TOKEN.
        """
        scope = f"jobs/{','.join(sorted(states))}"
        place = self._tokens.open(scope, token)
        before = int(place) if place is not None else None

        async def page(tx: Transaction) -> tuple[list[tuple[int, JobRecord]], list[JobSight]]:
            found = await tx.jobs.page(before, size + 1, states)
            sights: list[JobSight] = []
            for _, record in found[:size]:
                alive = self._world.jobs.get(record.job_id)
                sights.append(alive if alive is not None else await load_sight(tx, record.job_id))
            return found, sights

        found, sights = await self._world.store.read(page)
        more = len(found) > size
        return sights, self._tokens.make(scope, str(found[size - 1][0])) if more else ""

    async def rounds(self, job_id: str, size: int, token: str) -> tuple[list[RoundRecord], str]:
        """Returns a page of finished rounds in order, and the next page's token.

        Raises:
            NotFound: JOB_NOT_FOUND.
            InvalidArgument: PAGE_TOKEN.
        """
        scope = f"rounds/{job_id}"
        place = self._tokens.open(scope, token)
        await self._sight(job_id)
        after = int(place) if place is not None else -1
        found = await self._world.store.read(lambda tx: tx.rounds.page(job_id, after, size + 1))
        more = len(found) > size
        return found[:size], self._tokens.make(scope, str(found[size - 1].round)) if more else ""

    async def round(self, job_id: str, number: int | None) -> RoundRecord | None:
        """Returns a finished round, or the latest; None: there is none.

        Raises:
            NotFound: JOB_NOT_FOUND.
        """
        await self._sight(job_id)
        return await self._world.store.read(lambda tx: tx.rounds.get(job_id, number))

    async def spec(self, job_id: str) -> JobSpec:
        """Returns what a job is made of.

        Raises:
            NotFound: JOB_NOT_FOUND.
        """
        job = self._world.jobs.get(job_id)
        if job is not None:
            return job.spec
        spec = await self._world.store.read(lambda tx: tx.jobs.spec(job_id))
        if spec is None:
            raise job_not_found(job_id)
        return spec

    def participants(self, size: int, token: str, *, connected_only: bool) -> tuple[list[Member], str]:
        """Returns a page of devices by id, and the next page's token.

        Raises:
            InvalidArgument: PAGE_TOKEN.
        """
        scope = f"participants/{connected_only}"
        after = self._tokens.open(scope, token) or ""
        ids = sorted(
            p
            for p, member in self._world.members.items()
            if p > after and (member.session is not None or not connected_only)
        )
        page = [self._world.members[p] for p in ids[:size]]
        return page, self._tokens.make(scope, ids[size - 1]) if len(ids) > size else ""

    async def accepted(self, participant_ids: Sequence[str]) -> dict[str, list[str]]:
        """Returns the jobs that each of these devices accepted, sorted; devices without any are left out."""
        found = await self._world.store.read(lambda tx: tx.invitations.of_participants(participant_ids))
        jobs: dict[str, list[str]] = defaultdict(list)
        for invitation in sorted(found, key=lambda i: i.job_id):
            if invitation.state is InvitationState.ACCEPTED:
                jobs[invitation.participant_id].append(invitation.job_id)
        return jobs

    async def watch(self, job_id: str, interval: float) -> AsyncIterator[JobSight]:
        """Yields a job now and after each change, until it has ended.

        Changes closer than `interval` seconds are one; a job that takes long to show, or a reader that
        takes long to read, gets fewer.

        Raises:
            NotFound: JOB_NOT_FOUND: there is no such job, or it was deleted meanwhile.
            Unavailable: SHUTTING_DOWN.
        """
        with self._world.watching(job_id) as changed:
            while True:
                changed.clear()
                sight = await self._sight(job_id)
                ended = sight.record.state.ended  # a live job may end while this state is being told
                started = self._world.clock.monotonic()
                yield sight
                took = self._world.clock.monotonic() - started
                if ended:
                    return
                await self._first(changed.wait())
                await self._first(asyncio.sleep(min(max(interval, 10 * took), _LONGEST_PAUSE)))

    async def _first(self, waiting: Coroutine[object, object, object]) -> None:
        """Waits, but no longer than until the server stops."""
        stop = asyncio.create_task(self._stopping.wait())
        task = asyncio.create_task(waiting)
        try:
            await asyncio.wait([stop, task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            task.cancel()
        if self._stopping.is_set():
            raise Unavailable(
                Reason.SHUTTING_DOWN, "the coordinator stops; watch again in a moment", retry_after=1.0
            )
