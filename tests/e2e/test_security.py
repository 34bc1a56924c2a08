"""Attacks by peers and strangers: no module runs received data, memory is the user's own, and an
address of another cluster is refused."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_faults import Alone, Lease, Memory, engines, kind_of, prompt_of
from engine_process import ROOT

REACHED_BY_SOCKETS = ("engine", "kvcache", "router")
# Modules that run their input; most of multiprocessing pickles, or leaves names in /dev/shm.
FORBIDDEN_MODULES = {
    "pickle", "_pickle", "pickletools", "cloudpickle", "dill", "joblib", "marshal", "shelve", "dbm",
    "code", "codeop", "runpy", "imp",
    "multiprocessing.connection", "multiprocessing.managers", "multiprocessing.shared_memory",
    "multiprocessing.reduction", "xmlrpc",
}  # fmt: skip
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}  # the builtins
# Methods of any object that run or unpickle, with the keyword that makes them harmless.
FORBIDDEN_METHODS: dict[str, tuple[str, object] | None] = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "yaml.load": None,
    "yaml.load_all": None,
    "yaml.unsafe_load": None,
    "yaml.full_load": None,
    "*.exec_module": None,
    "*.load_module": None,
    "*.source_to_code": None,
    "os.system": None,
    "os.popen": None,
}
# A strategy's own source, which the user names on the command line or may upload: off unless
# --allow-upload, and behind the admin key.
INTENDED = {
    ("router/rollout/catalog.py", "*.exec_module"),
    ("router/rollout/catalog.py", "*.source_to_code"),
    # `strategy check` runs the project's own programs by name, and reads their output as bytes from
    # its own pipe.
    ("router/conformance/forkserver.py", "runpy"),
    ("router/conformance/forkserver.py", "multiprocessing.connection"),
    ("router/conformance/forkserver.py", "multiprocessing.connection.Connection"),
}


def forbidden(source: str) -> Iterator[str]:
    """Yield the imports and calls of a module that are forbidden in code that serves sockets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        yield from (name for name in names if _within(name, FORBIDDEN_MODULES))
        if isinstance(node, ast.Call):
            yield from _forbidden_call(node)


def _within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _name_of(function: ast.expr) -> str:
    """Return the source of what is called; that before the dots only if it is a name."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        return f"{_name_of(function.value)}.{function.attr}"
    return "…"


def _forbidden_call(call: ast.Call) -> Iterator[str]:
    function = _name_of(call.func)
    if function in FORBIDDEN_CALLS or function.removeprefix("builtins.") in FORBIDDEN_CALLS:
        yield function
    for name in (function, f"*.{function.rpartition('.')[2]}"):
        if name in FORBIDDEN_METHODS:
            harmless = FORBIDDEN_METHODS[name]
            given = {
                word.arg: word.value.value
                for word in call.keywords
                if isinstance(word.value, ast.Constant)
            }
            if harmless is None or given.get(harmless[0], not harmless[1]) is not harmless[1]:
                yield name
    if any(word.arg == "shell" for word in call.keywords):
        yield "shell"
    if any(
        word.arg in {"allow_pickle", "trust_remote_code"}
        and not (isinstance(word.value, ast.Constant) and word.value.value is False)
        for word in call.keywords
    ):
        yield "allow_pickle"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "def f():\n    from marshal import loads",
        "from multiprocessing import connection",
        "import multiprocessing.managers",
        "eval(text)",
        "builtins.exec(text)",
        "torch.load(file)",
        "torch.load(file, weights_only=False)",
        "torch.load(file, weights_only=given)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "np.load(file, allow_pickle=True)",
        "loader.exec_module(module)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_forbidden_code_is_found(source: str) -> None:
    assert list(forbidden(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "re.compile(text)",
        "torch.load(file, weights_only=True)",
        "np.load(file, allow_pickle=False)",
        "json.loads(text)",
        "yaml.safe_load(text)",
        "import multiprocessing",
    ],
)
def test_harmless_code_is_not_reported(source: str) -> None:
    assert not list(forbidden(source))


def test_no_module_runs_what_a_socket_receives() -> None:
    files = [path for package in REACHED_BY_SOCKETS for path in (ROOT / package).rglob("*.py")]
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in forbidden(path.read_text())
    }
    assert len(files) > 50
    assert found == INTENDED  # an exception that is no longer needed fails too


def test_memory_that_peers_map_is_the_users_own_and_in_no_file_system(alone: Alone) -> None:
    engine = alone.engine
    lease = Lease(engine, "memory", prompt_of("memory", 32), 16)
    lease.release()
    kind, pid, fd = lease.address.endpoint.split(":")
    assert (kind, int(pid)) == ("shm", engine.pid)
    region = Path(f"/proc/{pid}/fd/{fd}")
    status = region.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.getuid()
    assert status.st_nlink == 0
    assert str(region.readlink()).startswith("/memfd:")
    # No shared mapping has a name that others could open.
    shared = [
        line.split(maxsplit=5)[5]
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if line.split()[1] == "rw-s"
    ]
    assert any(name.startswith("/memfd:microserve") for name in shared)
    assert all(name.startswith(("/memfd:", "anon_inode:")) for name in shared), shared


@pytest.mark.slow
def test_an_address_of_another_cluster_is_refused_before_a_byte_is_written() -> None:
    prompt = prompt_of("security", 100)
    with engines(2) as (sender, receiver), engines(1, secret="another") as (stranger,):
        memory = Memory(receiver)
        memory.fill()
        lease = Lease(receiver, "security", prompt, 99, lease_ms=20_000)
        sent = lease.send(stranger)
        assert (sent.status_code, kind_of(sent)) == (401, "bad_address")
        for changed in (lease.kv_addr[:-1] + "A", "A" + lease.kv_addr[1:], "", "x" * 200, "é"):
            if changed != lease.kv_addr:
                lease.kv_addr, right = changed, lease.kv_addr
                assert kind_of(lease.send(sender)) == "bad_address"
                lease.kv_addr = right
        assert memory.written() == set()
        assert not memory.claimed(lease)
        assert memory.landed(lease) == 0
        # A cluster member's address is accepted, so only the cluster differed.
        assert kind_of(lease.send(sender)) == "ok"
        assert memory.written() == set(lease.pages)
