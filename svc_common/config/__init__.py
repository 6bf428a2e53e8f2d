"""One TOML file, loaded once by each service's `__main__`; every constructor is handed its own part.

Sizes accept units ("256MiB"). Unknown keys and values out of range are refused, naming the key.
"""

from svc_common.config.gateway import GatewayConfig
from svc_common.config.loading import ConfigError, load, load_cpu_attn_from_argv, load_from_argv, parse
from svc_common.config.logs import LoggingConfig
from svc_common.config.model import KvConfig, ModelConfig
from svc_common.config.planner import MAX_TARGET_S, ClassConfig, Mode, PhasePolicy, PlannerConfig
from svc_common.config.root import Config
from svc_common.config.security import TlsConfig
from svc_common.config.types import MAX_PORT, Section, checked_address
from svc_common.config.workers import CpuAttnConfig, GpuConfig

__all__ = [
    "MAX_PORT",
    "MAX_TARGET_S",
    "ClassConfig",
    "Config",
    "ConfigError",
    "CpuAttnConfig",
    "GatewayConfig",
    "GpuConfig",
    "KvConfig",
    "LoggingConfig",
    "Mode",
    "ModelConfig",
    "PhasePolicy",
    "PlannerConfig",
    "Section",
    "TlsConfig",
    "checked_address",
    "load",
    "load_cpu_attn_from_argv",
    "load_from_argv",
    "parse",
]
