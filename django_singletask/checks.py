"""System checks of the cache, the settings and the options of each task.

None of them opens a connection.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import celery
from celery import current_app
from celery.app.annotations import resolve_all
from django.conf import settings
from django.core import checks
from django.core.cache.backends.db import DatabaseCache
from django.core.cache.backends.dummy import DummyCache
from django.core.cache.backends.filebased import FileBasedCache
from django.core.cache.backends.locmem import LocMemCache
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router

from django_singletask.conf import HISTORY_KEEPS, HISTORY_MODES, TASK_URL, conf
from django_singletask.hooks import HOOKS, TESTED, missing_hooks
from django_singletask.log import in_words
from django_singletask.models import TaskLockEvent
from django_singletask.stores import choose, find_store, load_store, open_cache
from django_singletask.stores.base import Store
from django_singletask.stores.locmem import LocMemStore
from django_singletask.task.base import SingletonTask, import_tasks, singleton_tasks
from django_singletask.task.options import SECONDS, LockOptions, unknown_options
from django_singletask.version import DOCS

Messages = list[checks.CheckMessage]

MAX_DAYS = 36_500

USE_ANOTHER = (
    "Set CACHES[{!r}]['BACKEND'] to Redis, memcached or Django's DatabaseCache on a supported "
    "database, or SINGLETASK_CACHE to such a cache, or add the cache's class to SINGLETASK_STORES."
)
"""The hint for a cache that cannot hold locks."""

REFUSED = {DummyCache: "E002", FileBasedCache: "E003", DatabaseCache: "E015", object: "E006"}
"""The ids of the messages about these caches, and about all others; an unfit client has E005."""

SQLITE_OPTIONS = {
    "'transaction_mode': 'IMMEDIATE'": "'transaction_mode': '(immediate|exclusive)'",
    "'timeout': 20": "'timeout':",
    "'init_command': 'PRAGMA journal_mode=WAL'": r"journal_mode\W*wal",
}
"""The options for several processes that write to an SQLite file, and the pattern of each."""
MANY_SLOTS = 200
"""The number of slots above which a conflict stops a Redis for about a millisecond or longer."""
OF_OPTION = {
    **dict.fromkeys((*SECONDS, "lock_slots"), "E008"),
    "lock_on": "E009",
    "lock_name": "E010",
}
"""The ids of the messages about single options; all other options get E012, and pairs E011."""
SWITCHES = (
    ("E014", "record_arguments", "False to hide arguments"),
    ("E019", "testing", "True in the settings of tests"),
)
"""The settings that are on or off: the id of the message, the name, and an example."""


def run() -> Messages:
    """Return the messages that matter when a worker starts."""
    return [*check_cache(), *check_settings(), *check_celery()]


def _message(number: str, text: str | Exception, hint: str, obj: str | None = None) -> Any:
    """Return an error for ``E…``, but a warning for ``W…`` and for the text of a ``Warning``."""
    message: Any = checks.Error
    if "W" in number or isinstance(text, Warning):
        message = checks.Warning
    hint = f"{hint} See {DOCS}/reference/checks.html#{number.lower()}"
    return message(f"{text}", hint=hint, obj=obj, id=f"django_singletask.{number}")


@checks.register("singletask")
def check_celery(**kwargs: Any) -> Messages:
    """Check the installed Celery and, if it has all that this package uses, the tasks."""
    found = []
    tested = ".".join(map(str, TESTED))
    for name in missing_hooks():
        package = name.partition(".")[0]
        version = sys.modules[package].__version__
        text = f"{package} {version} has no {name}, which django_singletask needs to {HOOKS[name]}."
        hint = (
            "Update django-singletask. If that does not help, report it, and install an older "
            f"{package}."
        )
        found.append(_message("E020", text, hint))
    if not found:
        found = check_tasks()
    if celery.VERSION[:2] > TESTED:
        text = f"Celery {celery.__version__} is newer than {tested}, the newest that is tested."
        hint = (
            "Update django-singletask, or kill a worker's process that holds a lock, see whether "
            "the lock is freed, and silence this check, or install a tested Celery: "
            f"pip install 'celery=={tested}.*'."
        )
        found.append(_message("W010", text, hint))
    return found


@checks.register(checks.Tags.caches)
def check_cache(**kwargs: Any) -> Messages:
    """Check that ``SINGLETASK_CACHE`` can hold locks."""
    alias = conf.cache
    aliases = [*settings.CACHES]
    if alias not in aliases:  # a list, since the alias may be unhashable
        text = f"SINGLETASK_CACHE = {alias!r} is not in CACHES."
        hint = f"Add CACHES[{alias!r}], or set SINGLETASK_CACHE to one of {aliases}."
        return [_message("E001", text, hint)]
    cache = open_cache(alias)
    try:
        path, reason = choose(cache)
        for own in conf.stores.values():
            store = load_store(own)
            if own == path:
                _try_to_open(store, cache)
    except ImproperlyConfigured as error:
        return [_message("E018", error, "Correct SINGLETASK_STORES, or remove it.")]
    if path == f"{LocMemStore.__module__}.LocMemStore":
        return [_in_memory()]
    if reason:
        return [_refused(cache, reason)]
    if isinstance(cache, DatabaseCache):
        return _in_table(cache)
    return []


def _in_memory() -> Any:
    """Return the message about locks in the memory of a process."""
    text = (
        f"SINGLETASK_CACHE = {conf.cache!r} is in the memory of a process: other processes do not "
        "see its locks."
    )
    if current_app.conf.task_always_eager or conf.testing:
        return _message("W001", text, "Use it for tests in one process, never for workers.")
    hint = USE_ANOTHER + " In the settings of tests, set SINGLETASK_TESTING = True."
    return _message("E004", text, hint.format(conf.cache))


def _refused(cache: Any, reason: str) -> Any:
    """Return the message about a cache that cannot hold locks for this reason."""
    number = next(number for kind, number in REFUSED.items() if isinstance(cache, kind))
    hint = USE_ANOTHER.format(conf.cache)
    if hasattr(cache, "_client_cls"):
        number = "E005"
        hint = (
            f"In CACHES[{conf.cache!r}], remove OPTIONS['CLIENT_CLASS'] (or '{{' from its keys), "
            "or set SINGLETASK_CACHE to another cache."
        )
    return _message(number, f"SINGLETASK_CACHE = {conf.cache!r}: {reason}.", hint)


def _in_table(cache: DatabaseCache) -> Messages:
    """Check that the table of the locks is used for nothing else, and can be locked."""
    found = _shared(
        "W005",
        "cache.clear() and the culling of a full cache delete locks.",
        "Add a CACHES entry with a separate table as its LOCATION, run 'manage.py "
        "createcachetable', and set SINGLETASK_CACHE to that entry.",
    )
    database = router.db_for_write(cache.cache_model_class)
    if database == "default" and connections[database].vendor == "sqlite":
        text = (
            f"SINGLETASK_CACHE = {conf.cache!r} keeps the locks in DATABASES['default'], an SQLite "
            "file: no lock can be acquired while a transaction is open there. Without a "
            "transaction_mode, transactions also fail with 'database is locked' when several "
            "processes write."
        )
        hint = (
            "Add another SQLite file to DATABASES, and a router that sends the cache table "
            "to it. Set the OPTIONS of both to {'transaction_mode': 'IMMEDIATE', 'timeout': 20, "
            "'init_command': 'PRAGMA journal_mode=WAL'}. Then run "
            "'manage.py createcachetable --database <its alias>'."
        )
        found.append(_message("W006", text, hint))
    return found


def _try_to_open(store: type[Store], cache: Any) -> None:
    """Raise ``ImproperlyConfigured`` if a store that the user named is of no use for a cache."""
    try:
        store(cache, conf.cache)
    except Exception as error:  # a store finds out that it does not fit by errors of any kind
        what = f"{store.__qualname__} does not fit {type(cache).__qualname__}"
        raise ImproperlyConfigured(f"SINGLETASK_STORES: {what}: {in_words(error)}.") from error
    finally:
        cache.close()  # diskcache, for example, opens files before it is used


@checks.register("singletask")
def check_history(**kwargs: Any) -> Messages:
    """Check that those who write to the history's SQLite file wait for each other."""
    alias = router.db_for_write(TaskLockEvent)
    database: Any = connections[alias]
    if conf.history == "off" or database.vendor != "sqlite" or conf.testing:
        return []
    options = str(database.settings_dict["OPTIONS"]).lower()
    missing = [text for text, sign in SQLITE_OPTIONS.items() if not re.search(sign, options)]
    if not missing or database.is_in_memory_db():
        return []
    text = (
        f"The history is written to DATABASES[{alias!r}], an SQLite file, without "
        f"{', '.join(missing)}: while another process writes, transactions in it fail with "
        "'database is locked', also those of the project."
    )
    hint = f"Add these to DATABASES[{alias!r}]['OPTIONS'], or use another database."
    return [_message("W008", text, hint)]


def _shared(number: str, loss: str, hint: str, *excluded: type) -> Messages:
    """Return a warning if other code uses the place of the locks as a cache.

    Another check reports the caches of the classes in ``excluded``.
    """
    alias = conf.cache
    store = find_store(alias)
    if store is None or isinstance(store.cache, excluded):
        return []
    users = []
    for other in settings.CACHES:
        if other == alias:
            continue
        other_store = find_store(other)
        if other_store is not None and other_store.places & store.places:
            users.append(f"CACHES[{other!r}]")
    if not users:
        if alias != "default":
            return []
        users = ["other code"]
    who = " and ".join(users)
    text = f"The locks in CACHES[{alias!r}] are on {store.place}, also used by {who}: {loss}"
    return [_message(number, text, hint)]


@checks.register("singletask")
def check_settings(**kwargs: Any) -> Messages:
    """Check the other ``SINGLETASK_…`` settings."""
    found = []
    try:
        _ = conf.lock_timeout
    except (TypeError, ValueError) as error:
        hint = "Set SINGLETASK_LOCK_TIMEOUT to seconds, such as 60, or remove it."
        found.append(_message("E007", error, hint))
    days = conf.history_days
    if type(days) not in (int, float) or not 0 < days <= MAX_DAYS:
        rule = f"a number of days above 0 and up to {MAX_DAYS}"
        found.append(_wrong("E016", "history_days", rule, "days, such as 30"))
    if conf.history not in HISTORY_MODES:
        found.append(_wrong("E013", "history", f"one of {HISTORY_MODES}", "'background'"))
    if conf.history_keeps not in HISTORY_KEEPS:
        found.append(_wrong("E021", "history_keeps", f"one of {HISTORY_KEEPS}", "'trouble'"))
    for number, name, example in SWITCHES:
        if not isinstance(getattr(conf, name), bool):
            found.append(_wrong(number, name, "True or False", example))
    url = conf.task_url
    if url and not (isinstance(url, str) and TASK_URL.fullmatch(url)):
        rule = "an http or https address whose only field is {task_id}"
        example = "'https://flower.example/task/{task_id}'"
        found.append(_wrong("E017", "task_url", rule, example))
    return found


def _wrong(number: str, name: str, rule: str, example: str) -> Any:
    """Return the message about a setting: what it must be, and what it could be."""
    setting = f"SINGLETASK_{name.upper()}"
    text = f"{setting} must be {rule}, not {getattr(conf, name)!r}."
    return _message(number, text, f"Set {setting} to {example}, or remove it.")


def check_tasks() -> Messages:
    """Check the lock options of every registered :class:`SingletonTask`."""
    import_tasks()
    tasks = list(singleton_tasks().values())
    return [message for task in tasks for message in _of_task(task)] + _of_late_tasks(tasks)


def _of_task(task: SingletonTask) -> Messages:
    """Return the messages about the options of a task; valid options may get warnings."""
    found = [_of_problem(task, *problem) for problem in LockOptions.problems_of(task)]
    if not found:
        found = _of_slots(task) + _of_lease(task)
    return found + _of_annotations(task)


def _of_problem(task: SingletonTask, names: tuple[str, ...], error: Exception) -> Any:
    """Return the message about one option, or about a pair of them: the second is to be changed."""
    first = names[0]
    last = names[-1]
    step = "Change"
    if getattr(task, last) is None:
        step = "Set"
    if first == last:
        number = OF_OPTION.get(first, "E012")
        hint = f"{step} {last}, or remove it."
    else:
        number = "E011"
        hint = f"{step} {last}, or remove {first}."
    return _message(number, error, hint, task.name)


def _of_annotations(task: SingletonTask) -> Messages:
    """Return warnings about names in Celery's ``task_annotations`` that are no options."""
    # Celery has set these names on the task's own class, which so has all of them. Only the class
    # below it, its first base, shows which names are options.
    base = type(task).__mro__[1]
    found = []
    for annotation in resolve_all(task.app.annotations, task):
        for name, hint in unknown_options(annotation, base):
            text = f"Celery's task_annotations set {name!r} of {task.name}, which is no option."
            found.append(_message("W009", text, f"Correct the name: {hint}", task.name))
    return found


def _of_slots(task: SingletonTask) -> Messages:
    """Return a warning if each conflict of a task reads very many slots."""
    if task.lock_slots <= MANY_SLOTS:
        return []
    text = f"lock_slots={task.lock_slots} of {task.name}: each conflict reads all of them."
    hint = f"Use at most {MANY_SLOTS}, or divide the work among several locks."
    return [_message("W007", text, hint, task.name)]


def _of_lease(task: SingletonTask) -> Messages:
    """Return a warning if a lease that is not renewed can end before a run has to."""
    limit = _time_limit(task)
    lease = task.lock_timeout
    if not lease or task.lock_renew or limit <= lease:
        return []
    text = (
        f"lock_timeout={lease!r} of {task.name} is shorter than its time limit of "
        f"{limit} s, and lock_renew=False: the lock can expire while the task runs."
    )
    hint = f"Set lock_timeout above {limit}, lower the time limit, or remove lock_renew=False."
    return [_message("W003", text, hint, task.name)]


def _time_limit(task: SingletonTask) -> float:
    """Return the longest time in seconds that Celery lets a run take; 0 without a limit."""
    longest = 0.0
    for name in ("time_limit", "soft_time_limit"):
        limit = getattr(task, name)
        if not limit:
            limit = getattr(task.app.conf, f"task_{name}")
        if limit:
            longest = max(longest, limit)
    return longest


def _of_late_tasks(tasks: list[SingletonTask]) -> Messages:
    """Return warnings about tasks whose runs are lost with a process, although they ack late."""
    late = [task for task in tasks if task.acks_late and not task.reject_on_worker_lost]
    if late and current_app.conf.task_acks_late:
        # A setting for all tasks is reported once, not for each task.
        return [_of_acks_late("task_acks_late", "task_reject_on_worker_lost")]
    option = "reject_on_worker_lost"
    return [_of_acks_late(f"{task.name} has acks_late", option, task.name) for task in late]


def _of_acks_late(what: str, option: str, task: str | None = None) -> Any:
    """Return the warning that ``what`` acknowledges late, but without this option."""
    loss = "when a process is killed, Celery acknowledges its message and the run is lost."
    hint = f"Set {option}=True as well, if runs may be repeated."
    return _message("W004", f"{what} without {option}: {loss}", hint, task)


@checks.register(checks.Tags.caches, deploy=True)
def check_deployment(**kwargs: Any) -> Messages:
    """Check what matters on a production server (``check --deploy``)."""
    return _shared(
        "W002",
        "its clear() and its evictions delete locks.",
        "Give the locks a CACHES entry with a dedicated Redis database, memcached server or "
        "DatabaseCache table, and set SINGLETASK_CACHE to its alias.",
        DatabaseCache,
        LocMemCache,
    )
