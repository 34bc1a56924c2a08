"""What is wrong with a file's settings together, or with what they name: files, a strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click

from engine.protocol import BadRequest, MicroserveError
from router.admission import parse_keys
from router.base import NotFound, server_context
from router.cli.config.effective import Effective, EffectivePool, Entry
from router.cli.config.problems import Invalid, Problem, nearest
from router.cli.options import split_flags
from router.cli.preflight import Mistake, check_folder, check_store, check_strategy
from router.engines import parse_engines
from router.rollout import Catalog

__all__ = ["check"]

MOST_ENGINES = 1024


def check(config: Effective) -> None:
    """Raise `Invalid` with all problems of values that come from the file.

    Mistakes in flags are found where `up` uses them.
    """
    if config.file is None:
        return
    problems = [
        *_model(config), *_files(config), *_tls(config), *_store(config), *_strategy(config),
        *_shape(config), *_vllm(config),
    ]  # fmt: skip
    if problems:
        raise Invalid(problems)


def _problem(config: Effective, entry: Entry, message: str, remedy: str) -> Iterator[Problem]:
    """Yield the problem if the value is the file's."""
    if config.file is not None and entry.in_file is not None:
        yield config.file.problem(entry.in_file.path, message, remedy)


def _model(config: Effective) -> Iterator[Problem]:
    model = config.top["model"]
    if not model.value:
        yield from _problem(config, model, "is empty", "name an alias, a folder or a hub id")
    elif model.value.startswith("/") and not Path(model.value).exists():
        remedy = "paths are relative to the file; ids of a hub have no ./ before them"
        yield from _problem(config, model, f"there is no {model.value}", remedy)


def _files(config: Effective) -> Iterator[Problem]:
    """Look at the files that are read, and at the folders of those that are written."""
    readers: tuple[tuple[Entry, Callable[[str], object]], ...] = (
        (config.keys["api_key_file"], parse_keys),
        (config.router["engines_file"], parse_engines),
        (config.router["engine_ca"], str),
        (config.router["engine_cert"], str),
        (config.router["engine_cert_key"], str),
    )
    for entry, parse in readers:
        if not entry.value:
            continue
        try:
            parse(Path(entry.value).read_text())
        except OSError as error:
            what = f"{entry.value}: {error.strerror}"
            remedy = "create it; paths are relative to this file"
            yield from _problem(config, entry, what, remedy)
        except UnicodeDecodeError:
            yield from _problem(config, entry, f"{entry.value}: is not UTF-8", "save it as UTF-8")
        except BadRequest as error:
            yield from _problem(config, entry, f"{entry.value}: {error.message}", "correct it")
    for entry in (config.router["audit_log"], config.top["state_file"]):
        try:
            check_folder("", Path(entry.value) if entry.value else None)
        except Mistake as error:
            remedy = "name a folder that exists; paths are relative to this file"
            yield from _problem(config, entry, error.message.strip(), remedy)


def _tls(config: Effective) -> Iterator[Problem]:
    cert, key = config.router["tls_cert"], config.router["tls_key"]
    if bool(cert.value) != bool(key.value):
        there, other = (cert, "tls_key") if cert.value else (key, "tls_cert")
        yield from _problem(config, there, f"needs {other}", f"set router.{other} too")
        return
    try:
        server_context(cert.value, key.value)
    except MicroserveError as error:
        what = error.message.removeprefix("--").replace(", --", ", ")
        remedy = "name a certificate chain and its key as PEM files, relative to this file"
        yield from _problem(config, cert if cert.in_file else key, what, remedy)


def _store(config: Effective) -> Iterator[Problem]:
    store, file = config.keys["store"], config.router["store_password_file"]
    try:
        check_store(store.value, file.value)
    except Mistake as error:
        what, of_file = error.message, error.message.startswith("--store-password-file")
        what = what.removeprefix("--store-password-file ").removeprefix("--store: ")
        remedy = "paths are relative to this file" if of_file else "redis://HOST:PORT/DB#NAME"
        yield from _problem(config, file if of_file else store, what, remedy)


def _strategy(config: Effective) -> Iterator[Problem]:
    strategy, params = config.router["strategy"], config.params
    if strategy.value.endswith(".py"):
        if strategy.in_file is None:
            return
        if not Path(strategy.value).is_file():
            what, remedy = f"there is no {strategy.value}", "paths are relative to the file"
            yield from _problem(config, strategy, what, remedy)
            return
        try:  # user code runs in a process of its own
            check_strategy(strategy.value, {name: one.value for name, one in params.items()})
        except Mistake as error:
            remedy = "microserve strategy check FILE.py shows more"
            yield from _problem(config, strategy, error.message, remedy)
        return
    catalog = Catalog()
    try:
        found = catalog.find(strategy.value)
    except NotFound:
        known = [one["name"] for one in catalog.describe()]
        what = f"there is no strategy {strategy.value!r}"
        yield from _problem(config, strategy, what, nearest(strategy.value, known))
        return
    known = list(found.describe()["params"])
    for name, one in params.items():
        if name not in known:
            remedy = nearest(name, known) if known else "drop it"
            what = f"{strategy.value} has no such parameter"
            yield from _problem(config, one, what, remedy)
            continue
        try:
            found.bind({name: one.value})
        except BadRequest as error:
            what = error.message.partition(": ")[2] or error.message
            remedy = f"microserve strategy show {strategy.value} tells its type and bounds"
            yield from _problem(config, one, what, remedy)


def _shape(config: Effective) -> Iterator[Problem]:
    top = config.top
    if not config.pools:
        what, remedy = "does not go with prefill and decode", "use either, or [[pool]]"
        yield from _problem(config, top["engines"], what, remedy)
    for role in ("prefill", "decode"):
        entry = top[f"{role}_flags"]
        if entry.value and not any(pool.role == role for pool in config.pools):
            what, remedy = f"there are no engines that {role}", f"set {role} = 1, or use [[pool]]"
            yield from _problem(config, entry, what, remedy)
        try:
            split_flags("", entry.value)
        except click.UsageError as error:
            yield from _problem(config, entry, error.message.strip(), "quote as in a shell")
    total = sum(pool.count for pool in config.pools)
    if total > MOST_ENGINES and config.file is not None and config.file.pools:
        path = config.file.pools[-1].path
        remedy = f"one machine runs {MOST_ENGINES} at most"
        yield config.file.problem((*path, "count"), f"{total} engines in all pools", remedy)


def _vllm(config: Effective) -> Iterator[Problem]:
    for pool in config.pools:
        yield from _vllm_of(config, pool)


def _vllm_of(config: Effective, pool: EffectivePool) -> Iterator[Problem]:
    if pool.engine["backend"].value == "vllm":
        return
    for name in ("vllm_args", "vllm_flags"):
        if pool.engine[name].value:
            what, remedy = "needs backend vllm", 'set backend = "vllm" in the same table'
            yield from _problem(config, pool.engine[name], what, remedy)
