"""The polling helper itself."""

import pytest

from support.eventually import eventually


async def test_returns_the_first_truthy_result() -> None:
    """It keeps asking until the answer is truthy, and hands that answer back."""
    answers = iter([0, "", "found"])

    assert await eventually(lambda: next(answers)) == "found"


async def test_an_assertion_is_not_yet_and_the_last_one_is_told() -> None:
    """A condition written as assertions is retried, and its last failure explains the time-out."""

    async def never() -> bool:
        raise AssertionError("still three rounds to go")

    with pytest.raises(AssertionError, match="the job ends .*still three rounds to go"):
        await eventually(never, timeout=0.05, message="the job ends")


async def test_other_errors_pass_at_once() -> None:
    """A bug in the condition isn't waited for."""

    def broken() -> bool:
        raise LookupError("no such job")

    with pytest.raises(LookupError, match="no such job"):
        await eventually(broken, timeout=60)
