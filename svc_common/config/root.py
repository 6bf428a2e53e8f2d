"""The whole file, and what must agree between its sections."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from svc_common.config.gateway import GatewayConfig
from svc_common.config.logs import LoggingConfig
from svc_common.config.model import KvConfig, ModelConfig
from svc_common.config.planner import PlannerConfig
from svc_common.config.security import TlsConfig
from svc_common.config.telemetry import TelemetryConfig
from svc_common.config.types import Section
from svc_common.config.workers import CpuAttnConfig, GpuConfig


def _listed(value: object) -> object:
    """One table stands for a list of one."""
    return [value] if isinstance(value, dict) else value


class Config(Section):
    """The whole file."""

    model: ModelConfig = ModelConfig()
    kv: KvConfig = KvConfig()
    planner: PlannerConfig = PlannerConfig()
    gpu: GpuConfig = GpuConfig()
    cpu_attn: Annotated[tuple[CpuAttnConfig, ...], BeforeValidator(_listed), Field(min_length=1, max_length=16)] = (
        CpuAttnConfig(),
    )
    """One for each service; a single table is a list of one."""
    gateway: GatewayConfig | None = None
    telemetry: TelemetryConfig = TelemetryConfig()
    logging: LoggingConfig = LoggingConfig()
    tls: TlsConfig | None = None

    @property
    def gateway_drain_s(self) -> float:
        """A little longer than the planner's: the answers that it cuts off then end with an error that says so."""
        return self.planner.drain_s + 5.0

    @property
    def worker_drain_s(self) -> float:
        """So long gpu_svc and cpu_attn_svc wait, once told to stop, for the planner to let go of them."""
        return self.planner.drain_s + 2.0

    @property
    def stop_s(self) -> float:
        """So long any service may take to end after SIGTERM; then it hangs."""
        return self.planner.drain_s + 10.0

    @property
    def cpu_attn_services(self) -> tuple[CpuAttnConfig, ...]:
        """Those that are to run: none where the only pool has no bytes."""
        return tuple(service for service in self.cpu_attn if service.kv_bytes)

    def cpu_attn_key(self, index: int) -> str:
        """How messages name a service's table."""
        return "cpu_attn" if len(self.cpu_attn) == 1 else f"cpu_attn[{index}]"

    @model_validator(mode="after")
    def _has_services_apart(self) -> "Config":
        if len(self.cpu_attn) > 1:
            for index, service in enumerate(self.cpu_attn):
                if service.kv_bytes == 0:
                    raise ValueError(f"cpu_attn[{index}].kv_bytes is 0: of several services each needs a pool")
        listens = [service.listen if "listen" in service.model_fields_set else None for service in self.cpu_attn]
        check_apart(listens)
        return self

    @model_validator(mode="after")
    def _has_somewhere_to_keep_kv(self) -> "Config":
        has_pool = bool(self.cpu_attn_services)
        if self.gpu.kv_bytes == 0 and not has_pool:
            raise ValueError("gpu.kv_bytes and cpu_attn.kv_bytes are both 0: there is no place for KV")
        if self.planner.mode not in ("auto", "gpu_only") and not has_pool:
            raise ValueError(f'planner.mode "{self.planner.mode}" needs cpu_attn.kv_bytes greater than 0')
        if self.kv.host_dtype != "auto" and not has_pool:
            raise ValueError(f'kv.host_dtype "{self.kv.host_dtype}" needs cpu_attn.kv_bytes greater than 0')
        if self.cpu_attn[0].elastic and not has_pool:
            raise ValueError("cpu_attn.elastic needs cpu_attn.kv_bytes greater than 0")
        for key in ("prefill_policy", "decode_policy"):
            policy = getattr(self.planner, key)
            if policy in ("partition", "cpu_only") and not has_pool:
                raise ValueError(f'planner.{key} "{policy}" needs cpu_attn.kv_bytes greater than 0')
            if policy in ("partition", "cpu_only") and len(self.cpu_attn) > 1:
                raise ValueError(f'planner.{key} "{policy}" needs a single [cpu_attn], there are {len(self.cpu_attn)}')
            if policy in ("partition", "cpu_only") and self.planner.mode == "decoupled":
                raise ValueError(f'planner.{key} "{policy}" has no cohort: planner.mode must not be "decoupled"')
        if self.planner.mode == "gpu_only" and self.gpu.kv_bytes == 0:
            raise ValueError('planner.mode "gpu_only" needs gpu.kv_bytes greater than 0')
        return self

    @model_validator(mode="after")
    def _can_ask_for_client_certificates(self) -> "Config":
        doors = (("planner", self.planner), ("gateway", self.gateway))
        for key, door in doors:
            if door is None or not door.client_certificates:
                continue
            if self.tls is None or self.tls.ca is None:
                raise ValueError(f"{key}.client_certificates needs [tls] with a ca")
            if door.listen.startswith("unix:"):
                raise ValueError(f"{key}.client_certificates has no effect: {key}.listen is a Unix socket")
        return self

    @model_validator(mode="after")
    def _has_time_to_drain(self) -> "Config":
        if self.gateway and self.gateway.min_drain_s > self.gateway_drain_s:
            raise ValueError(
                f"gateway.min_drain_s must be at most {self.gateway_drain_s:g}, 5 s more than planner.drain_s, "
                f"is {self.gateway.min_drain_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _has_its_default_class(self) -> "Config":
        planner = self.planner
        if planner.default_class not in planner.classes:
            names = ", ".join(sorted(planner.classes))
            raise ValueError(f"planner.default_class must be one of {names}, is {planner.default_class!r}")
        return self


def check_apart(listens: Sequence[str | None]) -> None:
    """Raises ValueError where two services of attention listen at one address."""
    for index, listen in enumerate(listens):
        first = listens.index(listen)
        if listen is not None and first < index:
            raise ValueError(f"cpu_attn[{index}].listen is that of cpu_attn[{first}], {listen}: each needs its own")
