"""Find and open the store that a URL names. Each kind is imported only where it is used."""

from __future__ import annotations

from pathlib import Path

from keepstep_lighthouse.store.contract import Store, StoreError


def checked_store(url: str) -> str:
    """Return ``url`` if it names a known kind of store; else raise ``StoreError`` with the valid forms."""
    scheme, separator, rest = url.partition("://")
    if separator and {"memory": not rest, "sqlite": bool(rest.strip("/")), "etcd": True}.get(scheme, False):
        return url
    raise StoreError(f"store {url!r}: expected memory://, sqlite:///path/to/file or etcd://host:port/prefix")


def store_at(url: str) -> Store:
    """Return the store at ``url``, not open yet. An etcd store connects with its first call.

    Args:
        url: ``memory://``; ``sqlite://`` and a path (``sqlite:///var/lib/keepstep/lighthouse.db``); or
            ``etcd://host:port[,host:port]/prefix`` (``etcd_address.EtcdAddress``).

    Raises:
        StoreError: the URL is invalid.
    """
    # Each store is loaded only where it is used: a mesh without etcd needs no etcd client.
    scheme, _, rest = checked_store(url).partition("://")
    if scheme == "memory":
        from keepstep_lighthouse.store.memory_store import MemoryStore  # noqa: PLC0415

        return MemoryStore()
    if scheme == "sqlite":
        from keepstep_lighthouse.store.sqlite_store import SqliteStore  # noqa: PLC0415

        return SqliteStore(Path(rest))
    from keepstep_lighthouse.store.etcd_address import EtcdAddress  # noqa: PLC0415
    from keepstep_lighthouse.store.etcd_store import EtcdStore  # noqa: PLC0415

    return EtcdStore(EtcdAddress.parse(url))


async def open_store(url: str) -> Store:
    """Return the store at ``url``, open. Raise ``StoreError`` if the URL is invalid, or the store cannot be used."""
    store = store_at(url)
    await store.open()
    return store
