"""The service classes of one server, as the configuration has them and as the scheduler takes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner_svc.scheduler import ServiceClass, Targets
from svc_common.config import ClassConfig, PlannerConfig


@dataclass(frozen=True, slots=True)
class ServiceClasses:
    """Looked up by name."""

    by_name: Mapping[str, ServiceClass]
    default: ServiceClass

    @property
    def names(self) -> str:
        """For people."""
        return ", ".join(sorted(self.by_name))


def service_classes(config: PlannerConfig) -> ServiceClasses:
    """`config` is checked."""
    by_name = {name: _service_class(name, item) for name, item in config.classes.items()}
    return ServiceClasses(MappingProxyType(by_name), by_name[config.default_class])


def _service_class(name: str, config: ClassConfig) -> ServiceClass:
    targets = None
    if config.ttft_s is not None and config.tpot_s is not None:
        targets = Targets(config.ttft_s, config.tpot_s)
    return ServiceClass(name, targets, config.priority, config.share, config.on_overload == "refuse")
