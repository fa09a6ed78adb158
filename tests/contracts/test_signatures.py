"""The recorded signatures against the real packages: imported where they are installed, else read from their archives.

Run by ``tox -e contracts``.  A package that cannot be had is skipped, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hal.testing import fakes

pytestmark = pytest.mark.slow
RECORDS = sorted(p.stem for p in fakes.SIGNATURES.glob("*.json"))
LARGE = {"sgl-kernel", "sglang-kernel"}  # hundreds of megabytes each: with HAL_CONTRACTS_LARGE=1


def of_source(text: str, symbol: str) -> list[tuple[str, str, str | None]] | None:
    """(name, kind, default) of a function in a module's text; nothing is imported."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == symbol:
            a = node.args
            assert not (a.vararg or a.kwarg), f"{symbol} takes arbitrary arguments"
            plain = [*a.posonlyargs, *a.args]
            defaults = [None] * (len(plain) - len(a.defaults)) + [ast.unparse(d) for d in a.defaults]
            only = [(p.arg, "keyword_only", d and ast.unparse(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults)]
            return [(p.arg, "positional_or_keyword", d) for p, d in zip(plain, defaults)] + only
    return None


def of_signature(signature: inspect.Signature) -> list[tuple[str, str, str | None]]:
    empty = inspect.Parameter.empty
    return [
        (p.name, p.kind.name.lower(), None if p.default is empty else repr(p.default))
        for p in signature.parameters.values()
    ]


def evaluated(parameters):
    """Defaults compared as values: 0.0 is 0.0 however it is written."""
    return [(n, k, None if d is None else ("=", ast.literal_eval(d))) for n, k, d in parameters]


@pytest.fixture(scope="session")
def archives(tmp_path_factory):
    """(package, version) -> its archive, downloaded once, without dependencies."""
    have: dict[tuple[str, str], Path] = {}

    def archive(package: str, version: str) -> Path:
        if (package, version) in have:
            return have[package, version]
        if package in LARGE and not os.environ.get("HAL_CONTRACTS_LARGE"):
            pytest.skip(f"{package} is large; set HAL_CONTRACTS_LARGE=1 to download it")
        folder = tmp_path_factory.mktemp(package)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"{package}=={version}"],
            env={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["pip said nothing"]
            pytest.skip(f"{package} {version} cannot be downloaded: {said[-1]}")
        (have[package, version],) = folder.iterdir()
        return have[package, version]

    return archive


def read(archive: Path, path: str) -> str:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as z:
            return z.read(path).decode()
    with tarfile.open(archive) as t:
        member = next(m for m in t if m.name.partition("/")[2] == path)
        file = t.extractfile(member)
        assert file is not None
        return file.read().decode()


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_is_the_package(name, archives):
    r = fakes.record(name)
    published = re.fullmatch(r"PyPI (\S+) (\S+) (.+)", r.source)
    if not published:
        pytest.skip(f"not on a package index: {r.source}")
    package, version, paths = published[1], published[2], published[3].split()
    assert version == r.version
    archive = archives(package, version)
    texts = [read(archive, path) for path in paths]
    for symbol, signature in r.symbols.items():
        (found,) = [f for f in (of_source(t, symbol) for t in texts) if f is not None]
        assert evaluated(found) == evaluated(of_signature(signature)), symbol


@pytest.mark.parametrize("name", RECORDS)
def test_the_record_is_what_is_installed(name):
    """The version that is installed here, whether recorded or not, takes the keywords that the recorded one takes."""
    r = fakes.record(name)
    try:
        importlib.metadata.version(r.distribution)
        module = importlib.import_module(r.module)
    except Exception as e:
        pytest.skip(f"{r.module} is not usable here: {type(e).__name__}: {e}".splitlines()[0])
    if importlib.metadata.version(r.distribution) != r.version:
        pytest.skip(
            f"{r.distribution} {importlib.metadata.version(r.distribution)} is installed, {r.version} is recorded"
        )
    for symbol, signature in r.symbols.items():
        found = inspect.signature(getattr(module, symbol))
        assert evaluated(of_signature(found)) == evaluated(of_signature(signature)), symbol
