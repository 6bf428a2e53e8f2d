"""Service classes of a simulated server: from a server's configuration, or the one class of a machine's targets."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from planner_svc.classes import ServiceClasses, service_classes
from planner_svc.scheduler import DEFAULT_CLASS, ServiceClass, Targets
from svc_common.config import ConfigError, load
from svc_common.workloads import InputError
from svc_common.workloads.workload import Arrival


def read_classes(path: Path) -> ServiceClasses:
    """[planner.classes] and planner.default_class of a server's configuration. Raises InputError."""
    try:
        found = service_classes(load(path).planner)
    except ConfigError as error:
        raise InputError(f"--classes: {error}") from error
    return replace(found, by_name=dict(found.by_name))  # Goes to other processes, which a proxy can't.


def one_class(targets: Targets | None) -> ServiceClasses:
    """Everybody is served alike."""
    only = replace(DEFAULT_CLASS, targets=targets)
    return ServiceClasses({only.name: only}, only)


def without_targets(classes: ServiceClasses) -> ServiceClasses:
    """The same where nobody asks for a time, and so nobody is refused for one."""
    by_name = {name: replace(item, targets=None, refuses_late=False) for name, item in classes.by_name.items()}
    return ServiceClasses(by_name, by_name[classes.default.name])


def class_of(arrival: Arrival, classes: ServiceClasses) -> ServiceClass:
    """The default one where the request names none. The name is known."""
    return classes.by_name[arrival.class_name] if arrival.class_name else classes.default


def check_names(arrivals: Iterable[Arrival], classes: ServiceClasses) -> None:
    """Raises InputError for a request of a class that there is not."""
    unknown = {item.class_name for item in arrivals if item.class_name} - classes.by_name.keys()
    if unknown:
        raise InputError(
            f"--workload: class {min(unknown)!r} is not configured; there are {classes.names}, see --classes"
        )
