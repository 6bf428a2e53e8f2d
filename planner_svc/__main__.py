"""`python -m planner_svc --config FILE`: reads the model's description, listens, and serves until told to stop."""

import asyncio
import logging
from importlib import metadata
from pathlib import Path

from planner_svc.requests import Limits
from planner_svc.server import SERVICE, PlannerServer
from planner_svc.servicer import ServedModel
from svc_common import config as configuration
from svc_common.config import Config, ConfigError
from svc_common.grpc_server import ListenError, StopSignal
from svc_common.logs import configure_logging, refuse_start
from svc_common.model.chat_template import ChatTemplateError
from svc_common.model.no_tokenizer import NO_TOKENIZER, NoTokenizer, has_tokenizer
from svc_common.model.read_spec import read_spec
from svc_common.model.shapes import find_model
from svc_common.model.spec import ModelSpec, UnsupportedModelError
from svc_common.model.store import ModelFiles, ModelNotFoundError
from svc_common.model.tokenizer import Tokenizer, load_tokenizer
from svc_common.telemetry.telemetry import Telemetry

_TEXT_BYTES_PER_TOKEN_BYTE = 4
"""Normalisation may shorten a text before it is cut into tokens, but not by more."""

logger = logging.getLogger(SERVICE)


def describe(config: Config, files: ModelFiles, spec: ModelSpec) -> ServedModel:
    """The model as it is served. Raises ConfigError and UnsupportedModelError."""
    max_sequence_tokens = config.planner.max_sequence_tokens or spec.context_tokens
    if max_sequence_tokens > spec.context_tokens:
        raise ConfigError(
            f"planner.max_sequence_tokens must be at most {spec.context_tokens}, the model's context, "
            f"is {max_sequence_tokens}"
        )
    has_text = has_tokenizer(files) or not files.is_dummy
    tokenizer = load_tokenizer(files) if has_text else NoTokenizer()
    if config.model.chat_template is not None:
        if not has_text:
            raise ConfigError(f"model.chat_template: {NO_TOKENIZER} that could use it")
        tokenizer = _with_template(tokenizer, config.model.chat_template)
    longest = max(1, tokenizer.longest_token_bytes)
    return ServedModel(
        name=config.model.name or files.name,
        spec=spec,
        tokenizer=tokenizer,
        limits=Limits(
            vocab_size=spec.vocab_size,
            max_sequence_tokens=max_sequence_tokens,
            max_text_bytes=_TEXT_BYTES_PER_TOKEN_BYTE * longest * max_sequence_tokens,
            shares_prefixes=config.kv.prefix_cache,
            has_text=has_text,
        ),
        eos_token_ids=tuple(sorted({*spec.eos_token_ids, *tokenizer.eos_token_ids})),
        block_tokens=config.kv.block_tokens,
        version=_version(),
    )


def _with_template(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """Raises ConfigError."""
    try:
        return tokenizer.with_chat_template(path.read_text())
    except (OSError, UnicodeDecodeError, ChatTemplateError) as error:
        raise ConfigError(f"model.chat_template: {path}: {getattr(error, 'strerror', None) or error}") from error


def _version() -> str:
    """Of the installed package."""
    try:
        return metadata.version("neoflex")
    except metadata.PackageNotFoundError:
        return "uninstalled"


async def serve(config: Config, model: ServedModel, telemetry: Telemetry) -> None:
    """Until SIGTERM or SIGINT, and then until the requests in hand have ended."""
    stop = StopSignal()
    server = PlannerServer(config, model, telemetry)
    await server.start()
    logger.info("listening on %s, model %s, mode %s", server.address, model.name, config.planner.mode)
    await stop.wait()
    drain_s = config.planner.drain_s
    logger.info("draining: %d requests in hand, %g s for them", server.num_requests, drain_s)
    await server.stop(drain_s)
    logger.info("stopped")


def main() -> None:
    config = configuration.load_from_argv(SERVICE)
    configure_logging(SERVICE, config.logging)
    try:
        files = find_model(config.model.source, config.model.load_format)
        model = describe(config, files, read_spec(files))
        telemetry = Telemetry(SERVICE, config.telemetry)
        try:
            asyncio.run(serve(config, model, telemetry))
        finally:
            telemetry.close()
    except ListenError as error:
        refuse_start(SERVICE, f"planner.listen: {error}")
    except (ConfigError, ModelNotFoundError, UnsupportedModelError) as error:
        refuse_start(SERVICE, str(error))


if __name__ == "__main__":
    main()
