"""Which functions can have a lock, and the parameters of such a function."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django_singletask.locks.canonical import Unstable, canonical, same


def refuse_deferred(function: Any, what: str, *, awaits: bool = False) -> None:
    """Raise ``TypeError`` for a generator function, and for a coroutine function unless ``awaits``.

    The text of the error begins with ``what``.
    """
    for test, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if test(function) and not (awaits and test is inspect.iscoroutinefunction):
            raise TypeError(
                f"{what}: {function.__qualname__} is {kind}: its lock would be free before its "
                "body runs. Take a TaskLock inside the body of a plain function instead."
            )


class Parameters:
    """The parameters of a body, and the canonical forms of their defaults.

    Create this together with the task, because a body can change a default that is a list.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        self.names = [*signature.parameters]
        """The names of the arguments, without those in ``**kwargs``."""
        self._extra: str | None = None
        self._required: set[str] = set()
        self._defaults: dict[str, Any] = {}
        self._unstable: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self._extra = name
                self.names.remove(name)
            elif parameter.default is not parameter.empty:
                try:
                    self._defaults[name] = canonical(parameter.default)
                except Exception:  # such as a translation before Django is ready
                    self._unstable[name] = parameter.default
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self._required.add(name)

    @property
    def takes_any_name(self) -> bool:
        return self._extra is not None

    def bind(
        self,
        task: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        defaults: bool = False,
        required: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return the arguments of a call by name, including those of ``**kwargs``.

        ``defaults`` adds the arguments that were not passed. The arguments in ``required`` must be
        passed; None: all without a default. Raises ``TypeError``, with the task's name, if the
        arguments do not fit.
        """
        try:
            bind = self.signature.bind if required is None else self.signature.bind_partial
            bound = bind(*args, **kwargs)
            for name in self._required.intersection(required or ()) - bound.arguments.keys():
                raise TypeError(f"missing a required argument: {name!r}")
        except TypeError as error:
            raise TypeError(f"{task}: {error}") from None
        if defaults:
            bound.apply_defaults()
        arguments = bound.arguments
        if self._extra in arguments:
            for name, value in sorted(arguments.pop(self._extra).items()):
                # f(1, a=2) of def f(a, /, **kwargs) has two arguments called a: a and **a.
                twice = name in self.names or name.startswith("**")
                arguments[f"**{name}" if twice else name] = value
        return arguments

    def forms(self, task: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the canonical forms of the arguments that differ from their defaults.

        Raises ``TypeError`` for an argument without a stable form. A default without a stable form
        equals only itself.
        """
        forms = {}
        for name, value in arguments.items():
            if name in self._unstable and value is self._unstable[name]:
                continue
            try:
                form = canonical(value)
            except Unstable as error:
                raise TypeError(f"argument {name!r} of {task} {error}") from None
            if name not in self._defaults or not same(form, self._defaults[name]):
                forms[name] = form
        return forms


# For the arguments that a lock's name shows: any task's, without defaults.
AS_SHOWN = Parameters(inspect.signature(lambda **arguments: None))
