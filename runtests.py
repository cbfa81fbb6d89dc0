"""Run the tests against private servers of Redis, Valkey, Memcached, PostgreSQL, MariaDB, RabbitMQ.

    python runtests.py [--all | --rest] [--install-services] [pytest's own options]
    python runtests.py [--install-services] FILE ... [pytest's own options]

Without files, the tests run in parts at the same time, each with its own servers: a selection that
shows each promise once. A summary of all parts ends with a line that counts what passed, failed and
was skipped. With files, these run whole, in this process.

The tests of what is not installed are left out, and the end says which and why. In CI (with the
variable CI) nothing may be left out.

--all               Run all tests. The mark "only_all" says which are not in the selection, and why.
--rest              Run only those that are not in the selection.
--install-services  On Debian and Ubuntu: first install what is missing, with apt the servers, then
                    with pip pylibmc and mysqlclient, which need headers. For all tests also
                    RabbitMQ, Chromium and Prometheus. apt does not start the servers as services.
tests/browser --pictures
                    Make the pictures of the docs again.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests import parts, servers

POLICY = Path("/usr/sbin/policy-rc.d")
# Modules of the extra "test". Without them many tests would fail, and not say what to install.
MODULES = ["pytest", "pytest_django", "pytest_randomly", "hypothesis"]
MODULES += ["django_redis", "django_valkey", "psycopg", "pydantic", "pymemcache", "redis"]

ROOT = Path(__file__).resolve().parent


def main(arguments: list[str]) -> int:
    if {"-h", "--help"}.intersection(arguments):
        print(__doc__)
        return 0
    own_options = {"--install-services", "--all", "--rest"}.intersection(arguments)
    arguments = [argument for argument in arguments if argument not in own_options]
    names_files = any(is_file(argument) for argument in arguments)
    selected = "--all" not in own_options and "--rest" not in own_options and not names_files
    if "--run=default" in arguments:
        selected = True
    missing = servers.missing(everything=not selected)
    if "--install-services" in own_options and missing and shutil.which("apt-get"):
        install(missing)
        missing = servers.missing(everything=not selected)
    if missing and "CI" in os.environ:
        print("In CI no test may be left out, but not everything is installed.", explain(missing))
        return 1
    # Look for the modules without importing them: pytest must be the first to import its plugins.
    if absent := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        print(f'Not installed: {", ".join(absent)}. They come with pip install -e ".[test]"')
        return 1
    os.chdir(ROOT)
    # Treat SIGTERM as Ctrl-C: pytest then ends, stops the servers and removes their files. A
    # SystemExit would only fail the test that is running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell lets what it starts in the background ignore Ctrl-C; tests of interrupts need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A terminal that is closed sends this; nohup lets it be ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    if names_files:
        import pytest

        with environment() as variables:
            os.environ.update(variables)
            return int(pytest.main(arguments))
    which = "default"
    if "--all" in own_options:
        which = "all"
    elif "--rest" in own_options:
        which = "rest"
    notice = ""
    if missing:
        notice = f"These are not installed, so their tests were left out:{explain(missing)}"
    return parts.run(which, arguments, notice)


def is_file(argument: str) -> bool:
    """Say whether an argument names tests: a file or a folder, or a test in a file."""
    path = ROOT / argument.partition("::")[0]
    # Path.exists() would raise an error for an expression that is too long for a name.
    return os.path.exists(path) and path.resolve().is_relative_to(ROOT / "tests")


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Run the servers, and yield the variables in which tests/settings.py finds their addresses."""
    started = time.monotonic()
    redis = servers.Redis()
    # This replica is never promoted: tests of a failover start servers of their own.
    replica = servers.Redis(replica_of=redis, replica_priority=0)
    sentinel = servers.Redis(sentinel_for=redis)
    valkey, memcached = servers.Valkey(), servers.Memcached()
    postgres, mariadb = servers.PostgreSQL(), servers.MariaDB()
    everything = [redis, replica, sentinel, valkey, memcached, postgres, mariadb]
    installed = [server for server in everything if servers.find(server.program)]
    with tempfile.TemporaryDirectory(prefix="singletask-") as folder, servers.running(installed):
        seconds = time.monotonic() - started
        names = ", ".join(dict.fromkeys(type(server).__name__ for server in installed))
        print(f"{names or 'No servers'} started in {seconds:.1f} s.", flush=True)
        yield {
            "SINGLETASK_TEST_FOLDER": folder,
            "SINGLETASK_TEST_ABSENT": ",".join(need.name for need in servers.missing()),
            "SINGLETASK_TEST_REDIS_URL": redis.url,
            "SINGLETASK_TEST_REDIS_REPLICA_URL": replica.url,
            "SINGLETASK_TEST_SENTINEL": f"127.0.0.1:{sentinel.port}/{sentinel.service}",
            "SINGLETASK_TEST_VALKEY_URL": valkey.url,
            "SINGLETASK_TEST_MEMCACHED": memcached.address,
            "SINGLETASK_TEST_POSTGRES": postgres.url,
            "SINGLETASK_TEST_MARIADB": mariadb.url,
        }


def explain(missing: list[servers.Need]) -> str:
    lines = [f"{need.name}. {need.how}" for need in missing]
    lines += ["On Debian and Ubuntu this installs all: python runtests.py --install-services"]
    return "\n" + "\n".join(lines)


def install(missing: list[servers.Need]) -> None:
    print("Installing " + ", ".join(need.name for need in missing) + " …", flush=True)
    packages = {package for need in missing for package in need.apt.split()}
    modules = [need.name for need in missing if need.module]
    if modules and not Path(sysconfig.get_path("include"), "Python.h").exists():
        packages.add("python{}.{}-dev".format(*sys.version_info))
    if packages := {package for package in packages if not has_package(package)}:
        with no_services_started():
            with tempfile.NamedTemporaryFile("w", suffix=".list") as source:
                source.write(sources())
                source.flush()
                apt = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
                apt += ["-o", f"Dir::Etc::SourceList={source.name}"]
                apt += ["-o", "DPkg::Lock::Timeout=300"]  # another run may be installing
                command = [*apt, "install", "--no-install-recommends", "-y", *sorted(packages)]
                done = root(*command)
                if done.returncode:
                    # The lists of packages are absent or old. Fetching them takes long, so only
                    # now.
                    root(*apt, "update")
                    done = root(*command)
            if done.returncode:
                print(done.stdout)
    if modules:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", *modules]
        subprocess.run(pip, check=False)
        importlib.invalidate_caches()


def sources() -> str:
    """Return the list of the system, and for these commands alone where Debian 12 has Valkey."""
    lists = ""
    with suppress(OSError):
        lists = Path("/etc/apt/sources.list").read_text()
    with suppress(OSError):
        if platform.freedesktop_os_release().get("VERSION_CODENAME") == "bookworm":
            lists += "\ndeb http://deb.debian.org/debian bookworm-backports main\n"
    return lists


def has_package(package: str) -> bool:
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True).stdout == "installed"


def root(*command: str) -> subprocess.CompletedProcess[str]:
    sudo = ["sudo"] if os.geteuid() and shutil.which("sudo") else []
    return subprocess.run(
        [*sudo, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@contextmanager
def no_services_started() -> Iterator[None]:
    """Keep apt from starting what it installs: Debian asks this script, and 101 forbids."""
    if POLICY.exists():
        yield
        return
    with tempfile.NamedTemporaryFile("w") as script:
        script.write("#!/bin/sh\nexit 101\n")
        script.flush()
        root("install", "-m", "755", script.name, str(POLICY))
    try:
        yield
    finally:
        root("rm", "-f", str(POLICY))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
