"""Checks the form of a request's constraint; whether it can be kept to, constraints.py finds out."""

from neoflex.v1 import inference_pb2 as pb
from planner_svc.constraints import Constraint
from planner_svc.violations import Violations

MAX_CONSTRAINT_BYTES = 2**18
MAX_CHOICES = 1024


def parse_constraint(message: pb.GenerateRequest, bad: Violations) -> Constraint | None:
    """What its form alone tells; whether it can be kept to is found out later."""
    if not message.HasField("constraint"):
        return None
    constraint, kind = message.constraint, message.constraint.WhichOneof("kind")
    bad.require(
        kind is not None,
        "request.constraint",
        "exactly one of json_schema, json_object, regex, ebnf or choice is required",
    )
    bad.require(
        not message.stopping.ignore_eos,
        "request.stopping.ignore_eos",
        "must not be set with a constraint, whose end is an end token",
    )
    num_bytes = constraint.ByteSize()
    bad.require(
        num_bytes <= MAX_CONSTRAINT_BYTES,
        f"request.constraint.{kind}",
        f"must be at most {MAX_CONSTRAINT_BYTES} bytes, is {num_bytes}",
    )
    if kind == "json_object":
        bad.require(constraint.json_object, "request.constraint.json_object", "must be true, or absent")
        return Constraint(kind)
    if kind == "choice":
        texts = tuple(constraint.choice.texts)
        field = "request.constraint.choice.texts"
        bad.require(1 <= len(texts) <= MAX_CHOICES, field, f"must be of 1 to {MAX_CHOICES} texts, is of {len(texts)}")
        for index, text in enumerate(texts):
            bad.require(bool(text), f"{field}[{index}]", "must not be empty")
        return Constraint(kind, choices=texts)
    if kind is None:
        return None
    text = getattr(constraint, kind)
    bad.require(bool(text), f"request.constraint.{kind}", "must not be empty")
    return Constraint(kind, text)
