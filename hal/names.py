"""AttentionBackend: backends' names as constants, for code that would rather write FA than "fa"."""

from __future__ import annotations

from collections.abc import Iterator

from . import detect, plugins
from .backend import NAMED
from .errors import did_you_mean


class _View(type):
    def __getattr__(cls, name: str) -> AttentionBackend:
        if name.startswith("_") or name != name.upper():
            raise AttributeError(name)
        known = {*NAMED, *plugins.catalog(detect.ignored()).backends}
        if name.lower() not in known:
            raise AttributeError(f"no attention backend has the name {name!r}{did_you_mean(name.lower(), known)}")
        return AttentionBackend(name.lower())

    def __getitem__(cls, name: str) -> AttentionBackend:
        try:
            found: AttentionBackend = getattr(cls, name)
        except AttributeError as e:
            raise KeyError(str(e)) from None
        return found

    def __iter__(cls) -> Iterator[AttentionBackend]:
        """Those that are installed."""
        return map(AttentionBackend, plugins.catalog(detect.ignored()).backends)

    def __len__(cls) -> int:
        return len(plugins.catalog(detect.ignored()).backends)

    def __dir__(cls) -> list[str]:
        return sorted(n.upper() for n in {*NAMED, *plugins.catalog(detect.ignored()).backends})


class AttentionBackend(str, metaclass=_View):
    """A backend's name, which is a plain text: ``AttentionBackend.FA == "fa"``.

    ``AttentionBackend("fa3")`` is FA, as every alias is its backend.  Iterating gives what is installed, a vendor's own
    too; a name of a backend that is not installed is a name all the same, and using it is a PolicyError.
    """

    __slots__ = ()

    def __new__(cls, name: str) -> AttentionBackend:
        plain = name.strip().lower().replace("-", "_")
        catalog = plugins.catalog(detect.ignored())
        return super().__new__(cls, plain if plain in NAMED else catalog.backend_name(name))

    @property
    def name(self) -> str:
        return self.upper()

    @property
    def value(self) -> str:
        return str(self)

    @property
    def installed(self) -> bool:
        return str(self) in plugins.catalog(detect.ignored()).backends

    def __repr__(self) -> str:
        return f"<AttentionBackend.{self.name}: {str(self)!r}>"

    def __str__(self) -> str:
        return str.__str__(self)
