"""What waits for a reader is merged; ends come after all that was generated."""

import asyncio

import pytest
from opentelemetry.trace import NoOpTracer
from support.planner_rig import TOKENIZER

from planner_svc.generation import Delta, EndReason, Finished, Generation, GenerationRequest, Position
from planner_svc.request_span import RequestSpan, face_of
from planner_svc.scheduler import DEFAULT_CLASS, History, Targets
from svc_common.errors import ServiceError, unavailable
from svc_common.plan import PromptLogprobs, Sampling, TokenLogprobs

A, B, C = (TOKENIZER.encode(letter)[0] for letter in "abc")


def generation(stops: tuple[str, ...] = (), targets: Targets | None = None) -> Generation:
    request = GenerationRequest(
        request_id="x",
        prompt=(1, 2, 3),
        sampling=Sampling(),
        max_tokens=10,
        stops=stops,
        end_token_ids=frozenset({C}),
        time_limit_s=None,
        arrival_ns=1000,
        service_class=DEFAULT_CLASS,
        targets=targets,
        cache_salt=None,
        span=RequestSpan(NoOpTracer(), face_of("tiny", "127.0.0.1:1"), "chat", (), 1000),
    )
    return Generation(request, 7, TOKENIZER)


async def test_what_a_slow_reader_missed_comes_in_one_delta() -> None:
    answer = generation()
    deltas = answer.deltas()
    answer.push(A, None, False, 1100)
    assert await anext(deltas) == Delta("a", (A,), ())
    logprobs = TokenLogprobs(-1.0, ((A, -1.0),))
    answer.push(B, logprobs, False, 1200)
    answer.push(A, logprobs, False, 1300)
    answer.push(C, logprobs, True, 1400)
    answer.finish(EndReason.END_TOKEN, C, History(num_recomputations=2, num_cached_tokens=2), 1500)
    positions = tuple(Position(token, logprobs) for token in (B, A, C))
    assert await anext(deltas) == Delta("ba", (B, A, C), positions)
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)
    assert answer.finished == Finished(
        reason=EndReason.END_TOKEN,
        matched=C,
        prompt_tokens=3,
        completion_tokens=4,
        time_to_first_token_ns=100,
        duration_ns=500,
        recomputations=2,
        cached_tokens=2,
        ttft_met=None,
        tpot_met=None,
    )


async def test_the_prompt_s_positions_come_once_and_with_the_first_token() -> None:
    """Whatever chunks of it come again after a recomputation."""
    answer = generation()
    deltas = answer.deltas()
    answer.push_prompt(PromptLogprobs(1, (-1.0,), (7,), (-0.5,)))
    answer.push_prompt(PromptLogprobs(1, (-1.5, -2.0), (8, 9), (-0.25, -0.75)))
    answer.push_prompt(PromptLogprobs(2, (-3.0,), (9,), (-0.125,)))
    answer.push(A, None, False, 1100)
    first = await anext(deltas)
    assert first.prompt_positions == (
        Position(2, TokenLogprobs(-1.0, ((7, -0.5),))),
        Position(3, TokenLogprobs(-2.0, ((9, -0.75),))),
    )
    answer.push(B, None, False, 1200)
    assert (await anext(deltas)).prompt_positions == ()


async def test_positions_of_a_prompt_without_an_answer_stay_unsaid() -> None:
    answer = generation()
    answer.push_prompt(PromptLogprobs(1, (-1.0,), (), ()))
    answer.finish(EndReason.ABORT, None, History(), 1500)
    assert await answer.whole() == Delta("", (), ())


async def test_a_reader_that_waits_is_woken() -> None:
    answer = generation()
    reader = asyncio.create_task(anext(answer.deltas()))
    await asyncio.sleep(0)
    assert not reader.done()
    answer.push(A, None, False, 1100)
    assert (await reader).token_ids == (A,)


async def test_tokens_whose_text_is_held_are_reported_and_the_text_follows() -> None:
    answer = generation(stops=("abb",))
    deltas = answer.deltas()
    assert answer.push(A, None, False, 1100) is None
    assert await anext(deltas) == Delta("", (A,), ())
    answer.finish(EndReason.TIME_LIMIT, None, History(), 1200)
    assert await anext(deltas) == Delta("a", (), ())
    assert answer.finished.completion_tokens == 1


async def test_a_failure_comes_after_what_was_generated() -> None:
    answer = generation()
    answer.push(A, None, False, 1100)
    answer.fail(unavailable("GONE", "gone"))
    deltas = answer.deltas()
    assert (await anext(deltas)).text == "a"
    with pytest.raises(ServiceError, match="gone"):
        await anext(deltas)
    with pytest.raises(ServiceError, match="gone"):
        await answer.whole()


async def test_an_end_without_tokens() -> None:
    answer = generation()
    answer.finish(EndReason.ABORT, None, History(), 1500)
    assert await answer.whole() == Delta("", (), ())
    assert (answer.finished.time_to_first_token_ns, answer.finished.duration_ns) == (0, 500)


@pytest.mark.parametrize(
    ("token_times_ns", "expected"),
    [
        ([2000], True),
        ([2001], False),
        ([2000, 2500, 3000], True),
        ([2000, 2100, 3001], False),  # 500.5 ns from token to token
        ([1500, 2400, 2500], True),  # on average
    ],
)
async def test_whether_targets_were_met(token_times_ns: list[int], expected: bool) -> None:
    answer = generation(targets=Targets(ttft_s=1000e-9, tpot_s=500e-9))
    for time_ns in token_times_ns:
        answer.push(A, None, False, time_ns)
    answer.finish(EndReason.LENGTH, None, History(), 9000)
    assert answer.finished.targets_met is expected


@pytest.mark.parametrize(("end_ns", "expected"), [(2000, None), (2001, False)])
async def test_an_end_before_the_first_token_was_due_is_neither_in_time_nor_late(
    end_ns: int, expected: bool | None
) -> None:
    answer = generation(targets=Targets(ttft_s=1000e-9, tpot_s=500e-9))
    answer.finish(EndReason.ABORT, None, History(), end_ns)
    assert answer.finished.targets_met is expected
