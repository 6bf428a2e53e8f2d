"""Which layer comes into which buffer, and when: copies here wait until the test lets them go."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest

from gpu_svc.weight_stream import WeightStream


class Copies:
    """Plays the link."""

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []
        self.contents: dict[int, int] = {}  # layer by buffer
        self._changed = threading.Condition()
        self._allowed = 0
        self.fails_at = -1

    def copy(self, layer: int, buffer: int) -> int:
        with self._changed:
            self.begun.append((layer, buffer))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > 0, 20)
            self._allowed -= 1
        if layer == self.fails_at:
            raise OSError("the file is gone")
        self.contents[buffer] = layer
        return 100 + layer

    def allow(self, num: int) -> None:
        with self._changed:
            self._allowed += num
            self._changed.notify_all()

    def until_begun(self, *layers: int) -> None:
        """All so far, in order."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= len(layers), 20)
            assert [layer for layer, _ in self.begun] == list(layers)


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def stream(copies: Copies) -> Iterator[WeightStream]:
    made = WeightStream(2, copies.copy)
    yield made
    copies.allow(1000)
    made.close()


def use(stream: WeightStream, copies: Copies, layer: int) -> None:
    buffer = stream.acquire(layer)
    assert copies.contents[buffer] == layer
    stream.release(layer)


def test_the_next_layer_comes_while_one_is_in_use(stream: WeightStream, copies: Copies) -> None:
    stream.begin(range(4))
    copies.allow(1)
    buffer = stream.acquire(0)
    copies.until_begun(0, 1)  # While 0 is in use; 2 has no buffer yet.
    copies.allow(1)
    assert stream.acquire(1) != buffer
    copies.until_begun(0, 1)
    stream.release(0)
    copies.until_begun(0, 1, 2)
    assert copies.begun[2] == (2, buffer)
    stream.release(1)
    copies.allow(2)
    use(stream, copies, 2)
    use(stream, copies, 3)
    assert stream.wait_ns > 0


def test_a_buffer_waits_for_all_who_use_it(stream: WeightStream, copies: Copies) -> None:
    """Two sub-batches, the second a layer ahead: pre 1 [0], pre 0 [0], post 1 [0], pre 1 [1], post 0 [0]."""
    copies.allow(100)
    stream.begin(range(3))
    stream.acquire(0)
    stream.acquire(0)
    stream.release(0)
    stream.acquire(1)
    copies.until_begun(0, 1)
    stream.release(0)
    copies.until_begun(0, 1, 2)


def test_the_first_layers_of_the_next_iteration_come_after_the_last(stream: WeightStream, copies: Copies) -> None:
    copies.allow(100)
    for number in range(1, 4):
        stream.begin(range(4))
        for layer in range(4):
            use(stream, copies, layer)
        copies.until_begun(*(0, 1, 2, 3) * number, 0, 1)


def test_of_three_layers_the_middle_one_stays(stream: WeightStream, copies: Copies) -> None:
    """It is among the first two and among the last two."""
    copies.allow(100)
    for number in range(1, 4):
        stream.begin(range(3))
        for layer in range(3):
            use(stream, copies, layer)
        copies.until_begun(0, 1, 2, *(0, 2) * (number - 1), 0)


def test_layers_that_stay_come_once(stream: WeightStream, copies: Copies) -> None:
    copies.allow(100)
    for _ in range(50):
        stream.begin(range(2))
        use(stream, copies, 0)
        use(stream, copies, 1)
    copies.until_begun(0, 1)
    assert stream.num_bytes == 100 + 101


def test_a_cohort_keeps_its_layer_while_a_batch_goes_by(stream: WeightStream, copies: Copies) -> None:
    """The batch needs the cohort's layer, too, which comes once for both."""
    copies.allow(100)
    stream.begin([1, 0, 1, 2, 3])
    kept = stream.acquire(1)
    use(stream, copies, 0)
    assert stream.acquire(1) == kept
    stream.release(1)
    stream.release(1)
    use(stream, copies, 2)
    use(stream, copies, 3)
    assert [layer for layer, _ in copies.begun][:4] == [1, 0, 2, 3]


def test_another_order_than_the_one_that_was_said(stream: WeightStream, copies: Copies) -> None:
    copies.allow(100)
    stream.begin(range(6))
    for layer in (5, 2, 2, 4, 0):
        use(stream, copies, layer)
    stream.acquire(3)
    stream.acquire(1)
    with pytest.raises(RuntimeError, match="layer 4 is needed while 2 others are in use"):
        stream.acquire(4)
    stream.begin(range(6))  # After a failed iteration nothing is in use.
    for layer in range(6):
        use(stream, copies, layer)


def test_a_copy_that_fails_fails_who_waits_for_it(stream: WeightStream, copies: Copies) -> None:
    copies.allow(100)
    copies.fails_at = 2
    stream.begin(range(4))
    use(stream, copies, 0)
    use(stream, copies, 1)
    for _ in range(2):
        with pytest.raises(OSError, match="the file is gone"):
            stream.acquire(2)


def test_copies_are_noted_in_order(stream: WeightStream, copies: Copies) -> None:
    copies.allow(3)
    stream.begin(range(3))
    for layer in range(3):
        use(stream, copies, layer)
    noted = list(stream.copied)
    assert [one.layer for one in noted] == [0, 1, 2]
    assert all(one.start_ns <= one.end_ns for one in noted)
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(noted))


def test_a_layer_may_be_used_while_it_is_on_its_way() -> None:
    """A device keeps the order by itself; what is noted of a copy is when it was there."""
    here = threading.Event()

    def arrived(buffer: int) -> int:
        assert here.wait(20)
        return 1000

    stream = WeightStream(2, lambda layer, buffer: 7, arrived)
    stream.begin([3, 4])
    assert stream.acquire(3) == 0
    assert stream.num_bytes == 7
    assert not stream.copied
    here.set()
    assert stream.acquire(4) == 1
    stream.close()
    assert [(one.layer, one.end_ns - one.start_ns) for one in stream.copied] == [(3, 1000), (4, 1000)]
