"""The command line of an engine, and what does not go together there. Importable without torch."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from engine.api.registration import read_labels
from engine.protocol.config import EngineConfig

__all__ = ["parse_cpus", "parse_flags"]


def parse_flags(argv: Sequence[str]) -> EngineConfig:
    """Parse a command line. Bad flags exit with status 2, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        usage="python -m engine [MODEL] [flags]",
        description="Run one engine. Engines that exchange KV need the same MICROSERVE_SECRET in "
        "their environment.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=EngineConfig.model,
        help="alias, folder, .gguf file or hub id (default: %(default)s)",
    )
    headings = dict.fromkeys(
        flag.metadata["group"] for flag in dataclasses.fields(EngineConfig) if flag.metadata
    )
    groups = {heading: parser.add_argument_group(heading) for heading in headings}
    hints = get_type_hints(EngineConfig)
    for flag in dataclasses.fields(EngineConfig):
        if flag.name == "model":
            continue
        kind = hints[flag.name]
        options: dict[str, Any] = {"type": kind}
        if choices := get_args(kind):
            options = {"choices": choices}
        if kind is bool:
            options = {"action": "store_true"}
        default = flag.default
        if flag.metadata.get("secret"):  # other users can read command lines
            default = os.environ.get(f"MICROSERVE_ENGINE_{flag.name.upper()}", default)
        shown = "" if flag.default in ("", False) else f" (default: {flag.default})"
        groups[flag.metadata["group"]].add_argument(
            "--" + flag.name.replace("_", "-"),
            default=default,
            help=(flag.metadata["help"] + shown).replace("%", "%%"),
            **options,
        )
    try:
        own, extra = _split(argv)
        config = EngineConfig(**vars(parser.parse_args(own)))
        if extra:
            given = shlex.join(extra)
            config = dataclasses.replace(config, vllm_args=f"{config.vllm_args} {given}".strip())
        parse_cpus(config.cpus)
        config.kv_port_range  # noqa: B018
    except ValueError as error:
        parser.error(str(error))
    for flag in dataclasses.fields(EngineConfig):
        if problem := _out_of_bounds(flag, getattr(config, flag.name)):
            parser.error(problem)
    if config.decode_slowdown and not config.decode_slowdown >= 1:
        parser.error("--decode-slowdown must be 0 or at least 1")
    if config.router and not config.advertise and config.host in ("", "::", "0.0.0.0"):  # noqa: S104
        parser.error(f"--router with --host {config.host!r} needs --advertise")
    if bool(config.tls_cert) != bool(config.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    if config.client_ca and not config.tls_cert:
        parser.error("--client-ca needs --tls-cert: callers show certificates over https only")
    try:
        read_labels(config.labels)
    except ValueError as error:
        parser.error(str(error))
    if config.vllm_args and config.backend != "vllm":
        parser.error("vLLM's flags need --backend vllm")
    if config.has_workers and (refused := _not_split(config)):
        parser.error(f"--tp, --pp and --device-pages: {refused}")
    if config.lend_share and config.has_workers:
        parser.error("--lend-share does not go with --tp, --pp and --device-pages yet")
    if refused := _no_debtor(config):
        parser.error(f"--borrow: {refused}")
    if config.device_pages == 1:
        parser.error("--device-pages must be at least 2: it has a half for each of two steps")
    if bool(config.disk_dir) != bool(config.disk_pages):
        parser.error("--disk-dir and --disk-pages go together")
    if config.disk_keep and not config.disk_pages:
        parser.error("--disk-keep needs --disk-pages")
    if len(config.engine_id) > 256 or not config.engine_id.isprintable():
        parser.error("--engine-id must have at most 256 printable characters")
    return config


def _not_split(config: EngineConfig) -> str:
    """Return why these settings do not go with several workers; empty if they do."""
    if config.backend == "vllm":
        return "give vLLM its own flags, behind --"
    if config.model == "mock":
        return "the model mock has no layers"
    if config.device != "cpu":
        return "workers compute on CPUs so far"
    return ""


def _no_debtor(config: EngineConfig) -> str:
    """Return why an engine with these settings cannot borrow; empty if it can, or need not."""
    if not config.borrow:
        return ""
    if config.backend == "vllm":
        return "vLLM's attention reaches its own blocks only"
    if config.has_workers:
        return "does not go with --tp, --pp and --device-pages yet"
    if config.model == "mock":
        return "the model mock has no attention"
    if config.dtype == "float16":
        return "queries are shipped in float32 and bfloat16 only"
    return ""


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments before a lone `--`, and those behind it."""
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _out_of_bounds(flag: dataclasses.Field[Any], value: Any) -> str:
    """Return what is wrong with the value of a flag that is a number; empty if nothing is."""
    least, most = flag.metadata.get("least"), flag.metadata.get("most")
    if least is None or most is None or least <= value <= most:
        return ""
    name = flag.name.replace("_", "-")
    return f"--{name} must be from {least:.12g} to {most:.12g}"


def parse_cpus(text: str) -> set[int]:
    """Parse `0,2-3` into {0, 2, 3}. Raises `ValueError`, also for unavailable cores."""
    cpus: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"--cpus {text}: expected cores as in 0,2-3")
        cpus |= set(range(int(first), int(last or first) + 1))
    if missing := cpus - os.sched_getaffinity(0):
        raise ValueError(f"--cpus {text}: core {min(missing)} is not available")
    return cpus
