"""The blocking client over a real channel: what goes out, what comes back, how it fails, how it ends."""

import socket
import threading
from typing import Any

import pytest
from support.inference import InferenceServer

from neoflex import (
    Client,
    Completion,
    DeadlineExceededError,
    Delta,
    FieldViolation,
    Finish,
    FinishReason,
    InvalidArgumentError,
    Message,
    NeoflexError,
    ResourceExhaustedError,
    UnavailableError,
    Usage,
)
from neoflex.generation import PositionLogprobs, TokenLogprob
from neoflex.types import ClassLoad, Counters, HostPool, Load, ModelInfo, ServiceClass
from neoflex.v1 import inference_pb2 as pb

LOGPROBS = PositionLogprobs(TokenLogprob(7, -1.5), (TokenLogprob(9, -0.25),))
USAGE = Usage(prompt_tokens=5, completion_tokens=3, time_to_first_token_s=0.25, duration_s=1.25, recomputations=1)
FINISH = Finish(FinishReason.STOP, "END")


@pytest.fixture
def client(server: InferenceServer) -> Client:
    return Client(server.address)


def test_a_whole_answer(client: Client) -> None:
    answer = client.generate("hello", request_id="me", max_tokens=3, logprobs=1)
    assert answer == Completion("me", "a b c", (7, 8, 9), (LOGPROBS,), FINISH, USAGE)
    assert answer.usage.time_per_output_token_s == 0.5


def test_every_option_reaches_the_server(client: Client, server: InferenceServer) -> None:
    client.generate(
        messages=[Message("system", "s"), {"role": "user", "content": "u"}],
        request_id="me",
        max_tokens=3,
        temperature=0,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        seed=2**63,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100, 8: 0.5},
        json_schema={"type": "object"},
        stop="END",
        stop_token_ids=[1, 2],
        ignore_eos=True,
        time_limit_s=1.5,
        logprobs=0,
        prompt_logprobs=3,
        service_class="chat",
        ttft_s=0.5,
        tpot_s=0.025,
    )
    expected = pb.GenerateRequest(
        request_id="me",
        chat=pb.Chat(messages=[pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u")]),
        sampling=pb.SamplingOptions(
            temperature=0,
            top_k=4,
            top_p=0.5,
            min_p=0.25,
            seed=2**63,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.25,
            logit_bias={7: -100, 8: 0.5},
        ),
        stopping=pb.StoppingOptions(max_tokens=3, stop=["END"], stop_token_ids=[1, 2], ignore_eos=True),
        output=pb.OutputOptions(logprobs=0, prompt_logprobs=3),
        constraint=pb.Constraint(json_schema='{"type": "object"}'),
        service_class="chat",
    )
    expected.targets.ttft.FromMilliseconds(500)
    expected.targets.tpot.FromMilliseconds(25)
    expected.stopping.time_limit.FromMilliseconds(1500)
    assert server.servicer.last_request == expected


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"json_schema": '{"type":"null"}'}, pb.Constraint(json_schema='{"type":"null"}')),
        ({"json_object": True}, pb.Constraint(json_object=True)),
        ({"regex": "a+"}, pb.Constraint(regex="a+")),
        ({"ebnf": "root ::= [a]"}, pb.Constraint(ebnf="root ::= [a]")),
        ({"choice": ["a", "b"]}, pb.Constraint(choice=pb.Choice(texts=["a", "b"]))),
        ({"choice": []}, pb.Constraint(choice=pb.Choice())),
    ],
)
def test_every_kind_of_constraint(
    option: dict[str, Any], expected: pb.Constraint, client: Client, server: InferenceServer
) -> None:
    client.generate("hello", **option)
    assert server.servicer.last_request is not None
    assert server.servicer.last_request.constraint == expected


def test_what_no_request_can_carry_is_refused_at_once(client: Client) -> None:
    with pytest.raises(ValueError, match="at most one of: json_schema, regex"):
        client.generate("hello", regex="a", json_schema={})
    with pytest.raises(ValueError, match="logit_bias"):
        client.generate("hello", logit_bias={2**40: 1.0})


def test_log_probabilities_of_a_prompt(client: Client) -> None:
    answer = client.generate("hello", prompt_logprobs=1)
    assert answer.prompt_logprobs == (LOGPROBS, LOGPROBS)
    first, second = client.stream("hello", prompt_logprobs=1)
    assert (first.prompt_logprobs, second.prompt_logprobs) == ((LOGPROBS, LOGPROBS), ())


def test_what_is_not_given_is_absent_on_the_wire(client: Client, server: InferenceServer) -> None:
    client.generate(token_ids=[1, 2])
    request = server.servicer.last_request
    assert request is not None
    assert list(request.token_ids.ids) == [1, 2]
    assert len(request.request_id) == 32
    assert not any(request.sampling.HasField(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed"))
    assert not request.stopping.HasField("max_tokens")
    assert not request.stopping.HasField("time_limit")
    assert not request.output.HasField("logprobs")
    assert request.service_class == ""
    assert not request.HasField("targets")
    client.generate("hello", tpot_s=1)
    assert server.servicer.last_request is not None
    assert not server.servicer.last_request.targets.HasField("ttft")


def test_an_empty_list_of_tokens_is_still_a_prompt(client: Client, server: InferenceServer) -> None:
    client.generate(token_ids=[])
    assert server.servicer.last_request is not None
    assert server.servicer.last_request.WhichOneof("prompt") == "token_ids"


def test_exactly_one_prompt(client: Client) -> None:
    for bad in ({}, {"token_ids": [1], "messages": [Message("user", "u")]}):
        with pytest.raises(ValueError, match="exactly one of: a prompt text, token_ids, messages"):
            client.generate(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exactly one"):
        client.tokenize()


def test_a_number_that_fits_no_field_is_named(client: Client) -> None:
    with pytest.raises(ValueError, match="seed: Value out of range: -1"):
        client.generate("hello", seed=-1)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e30, 10**400, "1"])
def test_what_is_no_duration_is_named(client: Client, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^ttft_s: .{1,40} is no duration$"):
        client.generate("hello", ttft_s=seconds)
    with pytest.raises(ValueError, match=r"^time_limit_s: .{1,40} is no duration$"):
        client.generate("hello", time_limit_s=seconds)


def test_an_answer_says_whether_it_was_in_time(client: Client) -> None:
    assert client.generate("hello").usage.targets_met is None
    assert client.generate("hello", ttft_s=1, tpot_s=1).usage.targets_met is True
    stream = client.stream("hello", ttft_s=0.5, tpot_s=1)
    assert len(list(stream)) == 2
    assert stream.usage is not None
    assert stream.usage.targets_met is False


def test_a_misspelt_option_is_named(client: Client) -> None:
    options = {"max_token": 3, "temprature": 0, "top_k": 1}
    for call in (client.generate, client.stream):
        with pytest.raises(TypeError, match=r"^unknown option: max_token, temprature; there are: .*ttft_s$"):
            call("hello", **options)  # type: ignore[arg-type]


def test_a_prompt_that_is_no_text_is_refused_by_the_option_it_belongs_to(client: Client) -> None:
    for call in (client.generate, client.stream):
        with pytest.raises(TypeError, match=r"^the prompt must be a str, is a list; token ids go into token_ids=$"):
            call([1, 2, 3])  # type: ignore[arg-type]


def test_a_stream(client: Client) -> None:
    with client.stream("hello", request_id="me", logprobs=1) as stream:
        assert (stream.request_id, stream.prompt_tokens, stream.finish, stream.usage) == ("me", None, None, None)
        assert list(stream) == [Delta("a ", (7,), (LOGPROBS,)), Delta("b c", (8, 9))]
        assert (stream.prompt_tokens, stream.finish, stream.usage) == (5, FINISH, USAGE)
        assert list(stream) == []


def test_closing_a_stream_ends_the_request(client: Client, server: InferenceServer) -> None:
    server.servicer.stream_cancelled.clear()
    with client.stream("never") as stream:
        assert next(stream) == Delta("a ", (7,))
    assert server.servicer.stream_cancelled.wait(10)
    assert list(stream) == []
    assert stream.finish is None


def test_closing_from_another_thread_ends_the_iteration(client: Client) -> None:
    stream = client.stream("never")
    next(stream)
    threading.Timer(0.05, stream.close).start()
    assert list(stream) == []


def test_a_malformed_request_names_the_field(client: Client) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        client.generate("malformed")
    error = caught.value
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "BAD_FIELD")
    assert error.violations == (FieldViolation("request.sampling.top_p", "must be in (0, 1], is 3"),)
    assert str(error) == "INVALID_ARGUMENT BAD_FIELD: request.sampling.top_p: must be in (0, 1], is 3"


def test_overload_says_when_to_try_again(server: InferenceServer) -> None:
    with Client(server.address, max_retries=0) as client, pytest.raises(ResourceExhaustedError) as caught:
        list(client.stream("too many"))
    assert (caught.value.reason, caught.value.retry_after_s) == ("QUEUE_FULL", 1.5)
    assert str(caught.value) == "RESOURCE_EXHAUSTED QUEUE_FULL: the queue is full (try again in 1.5 s)"


def test_a_refused_call_comes_back_when_the_server_says(client: Client, server: InferenceServer) -> None:
    server.servicer.num_refused = 0
    assert client.generate("busy twice").text == "a b c"
    assert server.servicer.num_refused == 2
    server.servicer.num_refused = 0
    assert "".join(delta.text for delta in client.stream("busy twice")) == "a b c"
    assert server.servicer.num_refused == 2


def test_there_are_no_more_retries_than_allowed(server: InferenceServer) -> None:
    server.servicer.num_refused = 0
    with Client(server.address, max_retries=1) as client, pytest.raises(UnavailableError):
        client.generate("busy twice")
    server.servicer.num_refused = 0
    with Client(server.address, max_retries=1) as client, pytest.raises(UnavailableError):
        list(client.stream("busy twice"))
    assert server.servicer.num_refused == 2


def test_no_retry_beyond_the_deadline(client: Client) -> None:
    """The refusal says more than a timeout would."""
    with pytest.raises(ResourceExhaustedError):
        client.generate("too many", timeout=1.0)


def test_a_stream_lost_midway_keeps_what_came(client: Client) -> None:
    stream = client.stream("lost midway")
    assert next(stream).text == "a "
    with pytest.raises(UnavailableError) as caught:
        next(stream)
    assert caught.value.reason == "CPU_ATTENTION_LOST"
    assert list(stream) == []


def test_a_stream_without_an_end_is_an_error(client: Client) -> None:
    with pytest.raises(NeoflexError, match=r"DATA_LOSS: .* before the answer was complete"):
        list(client.stream("cut short"))


def test_a_timeout(client: Client) -> None:
    words = f"^DEADLINE_EXCEEDED: no complete answer from {client.address} within 0.05 s$"
    with pytest.raises(DeadlineExceededError, match=words):
        client.generate("never", timeout=0.05)
    with pytest.raises(DeadlineExceededError, match=words):
        list(client.stream("never", timeout=0.05))


def test_nobody_there() -> None:
    with Client("unix:/nonexistent/socket") as client:
        assert not client.is_ready()
        with pytest.raises(UnavailableError, match="no answer from unix:/nonexistent/socket"):
            client.model_info()
        with pytest.raises(DeadlineExceededError, match=r"unix:/nonexistent/socket was not ready within 0\.2 s"):
            client.wait_until_ready(0.2)


def test_a_port_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with Client(address) as client, pytest.raises(UnavailableError) as caught:
        client.model_info()
    assert str(caught.value) == f"UNAVAILABLE: nobody listens at {address}; start a server with: neoflex up"


def test_waiting_until_ready(client: Client, server: InferenceServer) -> None:
    client.wait_until_ready(5)
    server.set_ready(False)
    try:
        assert not client.is_ready()
    finally:
        server.set_ready(True)
    assert client.is_ready()


def test_the_small_calls(client: Client) -> None:
    assert client.abort("a", "unknown", "b") == ("a", "b")
    assert client.tokenize("hi") == (104, 105)
    assert client.tokenize(messages=[Message("u", "hi")]) == tuple(map(ord, "<u>hi"))
    assert client.detokenize([104, 105]) == "hi"
    assert client.model_info() == ModelInfo("tiny", "llama", 100, 2048, (2, 3), 135_000_000, "fp32", "fp16", "int8")
    classes = ClassLoad("chat", 0, 2), ClassLoad("default", 1, 0)
    assert client.load() == Load(1, 2, 1024, 3, 64, 5, 128, classes, (5, 0))
    info = client.server_info()
    assert (info.version, info.uptime_s, info.block_bytes, info.host_blocks) == ("0.1.0", 12.5, 2**20, 128)
    assert info.host_block_bytes == 2**19
    assert info.host_pools == (HostPool(128, 2, 1, 4, ""), HostPool(0, 0, 0, 0, "nothing answers at unix:/x"))
    assert (info.counters.gpu_only_iterations, info.counters.cpu_attended_tokens) == (40, 1234)
    assert info.service_classes == (
        ServiceClass("chat", False, 0.5, 0.05, 5, 2.5, True, 40, 3, 1200),
        ServiceClass("default", True, None, None, 0, 1.0, False, 0, 0, 0),
    )


def test_counters_between_two_looks() -> None:
    names = Counters.__dataclass_fields__
    later = Counters(**dict.fromkeys(names, 5))
    assert later.since(Counters(**dict.fromkeys(names, 3))) == Counters(**dict.fromkeys(names, 2))
