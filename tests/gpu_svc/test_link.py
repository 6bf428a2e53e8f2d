"""The emulated link, on a clock that only sleeping and copying move."""

from collections.abc import Callable

import pytest

from gpu_svc.link import Lane, Link

MIB = 2**20


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.sleeps.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("gpu_svc.link.time", made)
    return made


def taking(clock: Clock, seconds: float, pieces: list[slice]) -> Callable[[slice], None]:
    def copy(piece: slice) -> None:
        pieces.append(piece)
        clock.now_s += seconds

    return copy


def test_bytes_take_as_long_as_the_bandwidth_says(clock: Clock) -> None:
    """5 MiB at 10 MiB/s in pieces of 2 MiB, whose copies take a part of that."""
    pieces: list[slice] = []
    Lane(10 * MIB).carry(5 * MIB, taking(clock, 0.05, pieces))
    assert pieces == [slice(0, 2 * MIB), slice(2 * MIB, 4 * MIB), slice(4 * MIB, 5 * MIB)]
    assert clock.now_s == pytest.approx(100.5)
    assert clock.sleeps == pytest.approx([0.15, 0.15, 0.05])


def test_what_one_piece_overslept_the_next_makes_up_for(clock: Clock) -> None:
    Lane(10 * MIB).carry(4 * MIB, lambda piece: setattr(clock, "now_s", 100.3 if piece.start == 0 else clock.now_s))
    assert clock.now_s == pytest.approx(100.4)


def test_copies_slower_than_the_link_are_not_slowed_further(clock: Clock) -> None:
    Lane(10 * MIB).carry(4 * MIB, taking(clock, 1.0, []))
    assert clock.sleeps == []


def test_an_idle_link_saves_nothing_up(clock: Clock) -> None:
    lane = Lane(10 * MIB)
    lane.carry(2 * MIB, taking(clock, 0.0, []))
    clock.now_s += 50
    lane.carry(2 * MIB, taking(clock, 0.0, []))
    assert clock.now_s == pytest.approx(100.2 + 50 + 0.2)


def test_transfers_share_a_direction_but_not_the_link(clock: Clock) -> None:
    """What another thread has begun comes first."""
    link = Link(10 * MIB)
    link.to_device.pace(10 * MIB, clock.now_s, lambda: setattr(clock, "sleep", lambda _: None))
    del clock.sleep
    assert clock.now_s == 100.0  # Its thread still sleeps.
    link.to_host.pace(MIB, clock.now_s, lambda: None)
    assert clock.now_s == pytest.approx(100.1)
    link.to_device.pace(MIB, clock.now_s, lambda: None)
    assert clock.now_s == pytest.approx(101.1)


def test_without_a_bandwidth_nothing_sleeps(clock: Clock) -> None:
    pieces: list[slice] = []
    Link().to_device.carry(3 * MIB, taking(clock, 0.0, pieces))
    assert sum(piece.stop - piece.start for piece in pieces) == 3 * MIB
    assert clock.sleeps == []
