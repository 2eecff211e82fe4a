"""Where torch makes and iterates loaders, once it has been imported: three methods that every loader goes through.

    DataLoader.__init__           which line made it
    DataLoader.__iter__           its batches come from an AutoLoader, or carry their history
    _BaseDataLoaderIter.__init__  iterators that are made around it (fastai, StatefulDataLoader), seen from outside

Nothing heavy is imported here: a script may set what torch reads when it is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune_loader.scripts.plan import Plan
from autotune_loader.values.lines import Line, users_line

if TYPE_CHECKING:
    from autotune_loader.scripts.session import Session

active: list[Hook] = []
"""The hook that is installed in this process, if any."""
TORCH_MODULE = "torch.utils.data.dataloader"


class Hook:
    """Finds the loaders of this process, until it is removed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._lines: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        self._replaced: list[tuple[type, str, Any]] = []
        self._session: Session | None = None
        self._finder = _WhenImported(TORCH_MODULE, self._patch)
        self._is_in = self._is_told = False
        os.register_at_fork(after_in_child=self._forget)

    @property
    def session(self) -> Session:
        """The loaders of this process, from the first one on; from then on they are told of when it ends."""
        if self._session is None:
            from multiprocessing.util import Finalize

            from autotune_loader.scripts.session import Session

            self._session = Session(self.plan, self._lines)
            # multiprocessing's processes run this, unlike what atexit knows, and others do once their children have ended.
            Finalize(None, self.tell, exitpriority=-1000)
        return self._session

    @property
    def has_batches(self) -> bool:
        """Whether a loader gave any."""
        return self._session is not None and any(site.tally.batches for site in self._session.sites)

    def tell(self, *more: str) -> None:
        """Report, once, what was seen, and `more` sentences; ranks other than 0 are silent."""
        if self._is_told or not self.has_batches:
            return
        self._is_told = True
        from autotune_loader.scripts.telling import tell

        if self.session.rank == 0:
            tell(self.session, more)

    def install(self) -> None:
        """Find loaders from now on."""
        self._is_in = True
        active.append(self)
        if (module := sys.modules.get(TORCH_MODULE)) is not None:
            self._patch(module)
        else:
            sys.meta_path.insert(0, self._finder)

    def remove(self) -> None:
        """Leave torch as it was; what runs already goes on."""
        self._is_in = False
        active.remove(self)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for kind, name, original in self._replaced:
            setattr(kind, name, original)
        self._replaced.clear()

    def _forget(self) -> None:
        """A forked process has loaders of its own."""
        self._session, self._is_told = None, False

    def _patch(self, module: ModuleType) -> None:
        made, iterated = module.DataLoader.__init__, module.DataLoader.__iter__
        begun = module._BaseDataLoaderIter.__init__

        @functools.wraps(made)
        def note_line(loader: Any, *args: Any, **arguments: Any) -> None:
            made(loader, *args, **arguments)
            line = users_line(sys._getframe(1))
            if line is not None:
                self._lines[loader] = line

        @functools.wraps(iterated)
        def iterate(loader: Any) -> Any:
            return self.session.iterate(loader, iterated) if self._is_in else iterated(loader)

        @functools.wraps(begun)
        def begin(iterator: Any, loader: Any, *args: Any, **arguments: Any) -> None:
            begun(iterator, loader, *args, **arguments)
            if self._is_in:
                self.session.watch_from_outside(iterator, loader)

        self._replace(module.DataLoader, "__init__", note_line)
        self._replace(module.DataLoader, "__iter__", iterate)
        self._replace(module._BaseDataLoaderIter, "__init__", begin)

    def _replace(self, kind: type, name: str, replacement: Callable[..., Any]) -> None:
        self._replaced.append((kind, name, getattr(kind, name)))
        setattr(kind, name, replacement)


class _WhenImported(MetaPathFinder):
    """Calls `then` with a module as soon as it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - Python's signature
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
