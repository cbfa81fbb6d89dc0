"""Run the tests against private Redis, Memcached, PostgreSQL and MariaDB servers.

    python runtests.py [--install-services] [--quick] [pytest's own arguments]

Without arguments the tests with Celery workers, which mostly wait, run beside the others, each part
with its own servers.

--install-services  on Debian and Ubuntu: first install, with apt, the servers and the browser that
                    are missing and then pylibmc and mysqlclient, which need headers. The system's
                    own services are not started.
--quick             only the tests that need no Celery worker, no browser and no minute of races.
tests/browser --pictures
                    make the pictures of the docs anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import servers

POLICY = Path("/usr/sbin/policy-rc.d")
# Of the extra "test": what the settings name, and what pytest would not miss by itself.
MODULES = ["pytest", "pytest_django", "pytest_randomly", "hypothesis"]
MODULES += ["django_redis", "psycopg", "pydantic", "pymemcache", "redis", "selenium"]


def main(arguments: list[str]) -> int:
    own = {"--install-services", "--quick"}.intersection(arguments)
    arguments = [argument for argument in arguments if argument not in own]
    whole = not arguments and "--quick" not in own
    if "--quick" in own:
        arguments = ["-m", "not worker and not browser and not race", *arguments]
    browser = "--quick" not in own
    missing = servers.missing(browser=browser)
    if "--install-services" in own and missing and shutil.which("apt-get"):
        install(missing)
    if missing := servers.missing(browser=browser):
        print(explain(missing))
        return 1
    # Looked for, not imported: pytest itself must be the first to import its plugins.
    if absent := [name for name in MODULES if importlib.util.find_spec(name) is None]:
        print(f'Not installed: {", ".join(absent)}. They come with pip install -e ".[test]"')
        return 1
    if whole:
        return side_by_side()
    import pytest

    os.chdir(Path(__file__).parent)
    # SIGTERM as Ctrl-C: pytest ends, servers are stopped and their files removed. A SystemExit
    # would only fail the test that is running.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with environment() as variables:
        os.environ.update(variables)
        return int(pytest.main(arguments))


def side_by_side() -> int:
    """Run both parts at the same time, and show them one after the other."""
    command = [sys.executable, str(Path(__file__).resolve())]
    with tempfile.TemporaryFile() as output:
        others = subprocess.Popen(
            [*command, "-m", "not worker"], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = subprocess.run([*command, "-m", "worker"]).returncode
            code = others.wait() or code
        finally:
            # Ctrl-C has reached it too; SIGTERM has not.
            others.terminate()
            others.wait()
        output.seek(0)
        print(output.read().decode(errors="replace"))
    return code


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Run the servers and yield the variables from which tests/settings.py knows them."""
    started = time.monotonic()
    redis = servers.Redis()
    # A replica that is never promoted: tests of a failover use servers of their own.
    replica = servers.Redis(replica_of=redis, replica_priority=0)
    sentinel = servers.Redis(sentinel_for=redis)
    memcached, postgres, mariadb = servers.Memcached(), servers.PostgreSQL(), servers.MariaDB()
    everything = [redis, replica, sentinel, memcached, postgres, mariadb]
    with tempfile.TemporaryDirectory(prefix="singletask-") as folder, servers.running(everything):
        seconds = time.monotonic() - started
        print(f"Redis, Memcached, PostgreSQL and MariaDB started in {seconds:.1f} s.", flush=True)
        yield {
            "SINGLETASK_TEST_FOLDER": folder,
            "SINGLETASK_TEST_REDIS_URL": redis.url,
            "SINGLETASK_TEST_REDIS_REPLICA_URL": replica.url,
            "SINGLETASK_TEST_SENTINEL": f"127.0.0.1:{sentinel.port}/{sentinel.service}",
            "SINGLETASK_TEST_MEMCACHED": memcached.address,
            "SINGLETASK_TEST_POSTGRES": postgres.url,
            "SINGLETASK_TEST_MARIADB": mariadb.url,
        }


def explain(missing: list[servers.Need]) -> str:
    lines = ["The tests need what is not installed here:", ""]
    for need in missing:
        pip = f" && pip install {need.name}" if need.module else ""
        lines.append(f"{need.name}")
        lines.append(f"    Debian, Ubuntu:  apt install {need.apt}{pip}")
        lines.append(f"    macOS:           brew install {need.brew}{pip}")
    lines += ["", "On Debian and Ubuntu this does it: python runtests.py --install-services"]
    return "\n".join(lines)


def install(missing: list[servers.Need]) -> None:
    print("Installing " + ", ".join(need.name for need in missing) + " …", flush=True)
    packages = {package for need in missing for package in need.apt.split()}
    modules = [need.name for need in missing if need.module]
    if modules and not Path(sysconfig.get_path("include"), "Python.h").exists():
        packages.add("python{}.{}-dev".format(*sys.version_info))
    if packages := {package for package in packages if not has_package(package)}:
        with no_services_started():
            command = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
            command += ["install", "--no-install-recommends", "-y", *sorted(packages)]
            done = root(*command)
            if done.returncode:
                # The lists of packages are absent or old. To fetch them takes long: not before.
                root("apt-get", "-qq", "update")
                done = root(*command)
            if done.returncode:
                print(done.stdout)
    if modules:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", *modules]
        subprocess.run(pip, check=False)
        importlib.invalidate_caches()


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
    """Keep apt from starting what it installs: Debian asks this file, 101 is its no."""
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
