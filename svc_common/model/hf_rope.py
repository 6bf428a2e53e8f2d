"""Rotary embedding as Hugging Face's config.json describes it."""

from collections.abc import Mapping
from typing import Any, Literal, cast

from svc_common.model.rope_scaling import longrope_attention_factor, yarn_attention_factor
from svc_common.model.spec import RopeSpec, UnsupportedModelError

_SCALINGS = ("linear", "llama3", "yarn", "dynamic")
_LONGROPE_NAMES = ("longrope", "su")  # "su" is its first name.


def rope_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Older files keep `rope_theta` and `rope_scaling`, newer ones both in `rope_parameters`."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def read_rope(
    config: Mapping[str, Any], head_dim: int, values: Mapping[str, Any] | None = None, theta: float | None = None
) -> RopeSpec:
    """Of `values`, or what config.json has for all layers; `theta` where neither names one."""
    values = rope_values(config) if values is None else values
    if "full_attention" in values:
        raise UnsupportedModelError("rotary embeddings by kind of layer are not supported in this architecture")
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(values.get("rope_theta") or theta or config.get("rope_theta") or 10_000.0)
    fraction = float(values.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * fraction)
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    if kind in _LONGROPE_NAMES:
        return _longrope(config, values, theta, rotary_dim)
    if kind not in _SCALINGS:
        raise UnsupportedModelError(f"rope scaling {kind} is not supported")
    factor = float(values["factor"])
    if kind == "yarn" and not values.get("truncate", True):
        raise UnsupportedModelError("rope scaling yarn without truncation is not supported")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling=cast("Literal['linear', 'llama3', 'yarn', 'dynamic']", kind),
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_context_tokens=_original_tokens(config, values),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(values, factor) if kind == "yarn" else 1.0,
    )


def _original_tokens(config: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    return int(
        values.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or config["max_position_embeddings"]
    )


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])
    if values.get("mscale") and values.get("mscale_all_dim"):
        weights = float(values["mscale"]), float(values["mscale_all_dim"])
        return yarn_attention_factor(factor, weights[0]) / yarn_attention_factor(factor, weights[1])
    return yarn_attention_factor(factor)


def _longrope(config: Mapping[str, Any], values: Mapping[str, Any], theta: float, rotary_dim: int) -> RopeSpec:
    """Its short divisors: the long ones are for contexts beyond the original one, see hf_config."""
    original_tokens = _original_tokens(config, values)
    factor = float(values.get("factor") or config["max_position_embeddings"] / original_tokens)
    divisors = tuple(map(float, values["short_factor"]))
    if len(divisors) != rotary_dim // 2:
        raise UnsupportedModelError(f"short_factor has {len(divisors)} numbers, {rotary_dim // 2} are needed")
    given = values.get("attention_factor")
    return RopeSpec(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling="longrope",
        factor=factor,
        original_context_tokens=original_tokens,
        attention_factor=longrope_attention_factor(factor, original_tokens) if given is None else float(given),
        divisors=divisors,
    )
