"""Sequences after losses of the executor: who is tried alone, who ends, and that all others get their tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planning import Loop, expected_tokens, make_capacity

from planner_svc.scheduler import MAX_LOSSES, MAX_LOSSES_IN_A_ROW, Verdict
from svc_common.plan import IterationPlan


def lose(loop: Loop, is_certain: bool = True) -> dict[int, Verdict]:
    """The executor dies with all plans in flight; who is to end, ends, and another executor takes over."""
    running = frozenset().union(*(plan.sequence_ids for plan in loop.unapplied))
    verdicts = dict(loop.scheduler.lose(running, is_certain))
    for sequence_id in verdicts:
        loop.cancel(sequence_id)
    loop.reset()
    return verdicts


def begin(loop: Loop, num_sequences: int = 3) -> list[int]:
    """All of them computed, and a plan with all of them in flight."""
    ids = [loop.add(6, 30) for _ in range(num_sequences)]
    while not all(loop.streams.values()):
        loop.step()
    plan = loop.plan()
    assert plan is not None
    assert plan.sequence_ids == set(ids)
    return ids


def test_after_one_loss_all_run_together_again() -> None:
    loop = Loop(make_capacity(40, 0))
    ids = begin(loop)
    assert lose(loop) == {}
    assert loop.step().sequence_ids == set(ids)
    loop.run_until_idle()


def test_after_two_without_a_token_in_between_they_are_tried_one_by_one() -> None:
    loop = Loop(make_capacity(40, 0))
    first, second, third = begin(loop)
    late = loop.add(6, 30)
    for _ in range(2):
        assert lose(loop) == {}
        loop.plan()
    # Only the first runs until it has its token, though there is room and a budget for all.
    assert loop.unapplied[-1].sequence_ids == {first}
    later = loop.add(6, 30)
    assert loop.scheduler.num_waiting == 4
    loop.apply()
    assert loop.step().sequence_ids == {second}
    assert loop.step().sequence_ids == {third}
    assert loop.step().sequence_ids == {first, second, third, late, later}
    loop.run_until_idle()


def test_the_culprit_ends_at_the_third_and_a_token_starts_the_count_anew() -> None:
    loop = Loop(make_capacity(40, 0))
    first, second, third = begin(loop)
    assert lose(loop) == {}
    loop.step()  # A token for each.
    loop.plan()
    assert lose(loop) == {}
    loop.plan()
    assert lose(loop) == {}
    loop.plan()
    loop.apply()  # The first passes.
    loop.plan()
    assert lose(loop) == {second: Verdict.BREAKS_EXECUTOR}
    assert loop.step().sequence_ids == {third}
    loop.run_until_idle()
    assert set(loop.finishes) == {first, third}


def test_where_something_else_is_in_doubt_nobody_is_the_culprit() -> None:
    loop = Loop(make_capacity(40, 0))
    first, *_ = begin(loop)
    for number in range(1, MAX_LOSSES):
        assert lose(loop, is_certain=False) == {}, number
        loop.plan()
    assert lose(loop, is_certain=False) == {first: Verdict.LOST_TOO_OFTEN}
    loop.run_until_idle()


@pytest.mark.parametrize("how", ["cancelled", "finished"])
def test_the_next_is_tried_when_one_on_trial_ends(how: str) -> None:
    loop = Loop(make_capacity(40, 0))
    first = loop.add(6, 2 if how == "finished" else 30)
    second = loop.add(6, 30)
    loop.step()
    loop.plan()
    for _ in range(2):
        assert lose(loop) == {}
        loop.plan()
    if how == "cancelled":
        loop.unapplied.clear()
        loop.cancel(first)
        assert lose(loop) == {}
    else:
        loop.apply()
        assert first in loop.finishes
    assert second in loop.step().sequence_ids
    loop.run_until_idle()


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=7),
    capacity=st.builds(make_capacity, st.sampled_from([8, 12, 40]), st.sampled_from([0, 8, 24])),
    policy=st.sampled_from(["auto", "asymmetric", "gpu_only", "decoupled"]),
    data=st.data(),
)
def test_whichever_sequence_is_deadly_it_alone_ends(lengths, capacity, policy, data) -> None:
    """The executor dies of each plan that would compute a certain token of one of them, or two of them."""
    loop = Loop(capacity, policy)
    ids = [loop.add(*length) for length in lengths]
    culprits = data.draw(st.sets(st.sampled_from(ids), min_size=1, max_size=2))
    deadly_at = {key: data.draw(st.integers(0, loop.requests[key].max_new_tokens - 1)) for key in culprits}

    def kills(plan: IterationPlan) -> bool:
        return any(key in plan.sequence_ids and len(loop.streams[key]) >= at for key, at in deadly_at.items())

    requests, streams, ended = dict(loop.requests), loop.streams, {}
    for _ in range(10_000):
        while loop.scheduler.has_work() and loop.plan():
            pass
        if not loop.unapplied:
            break
        if kills(loop.unapplied[0]):
            ended |= lose(loop)
            for key in ended:
                deadly_at.pop(key, None)
        else:
            loop.apply()
    assert ended == dict.fromkeys(culprits, Verdict.BREAKS_EXECUTOR)
    assert loop.scheduler.num_waiting == loop.scheduler.num_running == 0
    for key in set(ids) - culprits:
        request = requests[key]
        assert streams[key] == expected_tokens(request.prompt, request.max_new_tokens, request.end_token_ids)
    assert loop.executor.epoch <= 1 + MAX_LOSSES_IN_A_ROW * len(culprits)
