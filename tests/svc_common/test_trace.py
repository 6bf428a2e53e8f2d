import pytest

from neoflex.v1 import executor_pb2 as pb
from svc_common.plan import Mode
from svc_common.trace import IterationTrace, TracedSubBatch, TraceEvent, TraceEvents, TraceKind
from svc_common.trace_wire import trace_from_message, trace_to_message

GPU = TraceEvents((3, 7), (0, 1), (1, 0), (0, 2**40), (2**40, 5))
TRACE = IterationTrace(
    9,
    8,
    Mode.ASYMMETRIC,
    2**60,
    2**41,
    (TracedSubBatch(0, 7, 2, 1, 33),),
    GPU,
    (TraceEvents((12,), (2,), (1,), (6,), (4,)), TraceEvents((12,), (2,), (1,), (7,), (5,), pool=2)),
)


def test_kinds_are_those_of_the_proto() -> None:
    names = {value.name: value.number for value in pb.TraceKind.DESCRIPTOR.values if value.number}
    assert names == {f"TRACE_KIND_{kind.name}": int(kind) for kind in TraceKind}


def test_a_trace_keeps_its_values_on_the_wire() -> None:
    message = pb.IterationTrace.FromString(trace_to_message(TRACE).SerializeToString())
    assert trace_from_message(message) == TRACE


def test_a_trace_without_a_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode 0 is none"):
        trace_from_message(pb.IterationTrace())


def test_events_are_on_the_common_clock() -> None:
    assert list(TRACE.events(TRACE.gpu)) == [
        TraceEvent(TraceKind.PRE_ATTENTION, 0, 1, 2**60, 2**60 + 2**40),
        TraceEvent(TraceKind.WAIT, 1, 0, 2**60 + 2**40, 2**60 + 2**40 + 5),
    ]
    assert [event.duration_ns for event in TRACE.events(*TRACE.cpu)] == [4, 5]
    assert TRACE.end_ns == 2**60 + 2**41


@pytest.mark.parametrize(
    "columns", [((3,), (0, 1), (0,), (0,), (0,)), ((77,), (0,), (0,), (0,), (0,)), ((0,), (0,), (0,), (0,), (0,))]
)
def test_columns_that_make_no_events_are_refused(columns: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"zip|TraceKind"):
        list(TRACE.events(TraceEvents(*columns)))


def test_waiting_for_the_other_process_is_a_bubble() -> None:
    assert {kind for kind in TraceKind if kind.is_bubble} == {
        TraceKind.WAIT,
        TraceKind.REPORT,
        TraceKind.CPU_WAIT,
        TraceKind.WEIGHT_WAIT,
    }
