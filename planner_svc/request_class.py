"""A request's service class, and the targets that hold for it: its own, completed by those of its class."""

from neoflex.v1 import inference_pb2 as pb
from planner_svc.classes import ServiceClasses
from planner_svc.durations import seconds_of
from planner_svc.scheduler import ServiceClass, Targets
from planner_svc.violations import Violations
from svc_common.config import MAX_TARGET_S


def parse_class(
    message: pb.GenerateRequest, classes: ServiceClasses, bad: Violations
) -> tuple[ServiceClass, Targets | None]:
    """What is wrong goes into `bad`; what is returned then is sound, and to be used no further."""
    name = message.service_class
    service_class = classes.by_name.get(name) if name else classes.default
    bad.require(service_class is not None, "request.service_class", f"must be one of {classes.names}, is {name!r}")
    service_class = service_class or classes.default
    own = {}
    for field in ("ttft", "tpot"):
        if message.targets.HasField(field):
            own[field] = seconds = seconds_of(getattr(message.targets, field))
            path = f"request.targets.{field}"
            bad.require(0 < seconds <= MAX_TARGET_S, path, f"must be in (0, {MAX_TARGET_S:g}] s, is {seconds:g} s")
    return service_class, _complete(own, service_class, bad)


def _complete(own: dict[str, float], service_class: ServiceClass, bad: Violations) -> Targets | None:
    """`own`: seconds by the name of the target."""
    if not own:
        return service_class.targets
    of_class = service_class.targets
    if of_class is not None:
        return Targets(own.get("ttft", of_class.ttft_s), own.get("tpot", of_class.tpot_s))
    for missing in {"ttft", "tpot"} - own.keys():
        text = f"is required beside the other target: class {service_class.name!r} has none to take it from"
        bad.require(False, f"request.targets.{missing}", text)
        return None
    return Targets(own["ttft"], own["tpot"])
