"""Reload the weights of inference engines from a folder that a pull has made.

Each function returns a callback for :meth:`casnap.Store.follow`. The callback makes the calls that
the engine documents for a reload, with the folder of the version. If the engine does not confirm
the load, the callback raises an error, and ``follow`` calls it again. ``docs/compatibility.md``
says what was tried.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from inspect import iscoroutine, iscoroutinefunction
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPSHandler, Request, build_opener

from casnap.errors import PLACE_ERRORS, CasnapError, with_article
from casnap.extending import StagedPatches, Version, override

_log = logging.getLogger("casnap")
OnVersion = Callable[[Path, list[str]], None]
PauseMode = Literal["wait", "keep"]
"""What the engine does with running requests while it loads a version.

``wait``: running requests end first, so that each answer comes from one version; new requests wait.
``keep``: running requests pause, and go on with the new weights from the token where they were.
"""
_MOST_ANSWER = 1 << 20
# The seconds after which a host that sends no packet at all counts as gone.
_MOST_SILENCE = 120


def reload_sglang(
    url: str,
    *,
    abort_all_requests: bool = False,
    headers: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> OnVersion:
    """Return a callback that makes a server of SGLang load each version.

    It posts to ``/update_weights_from_disk``. The server flushes its cache of prefixes, and gets
    the name of the version as its ``weight_version``. The server must see the folder under
    the same path.

    Args:
        url: The URL of the server, such as ``http://localhost:30000``.
        abort_all_requests: Whether the server pauses and aborts running requests; new requests wait
            until it has loaded the folder. If False, the server waits for running requests to end.
        headers: Further headers, such as ``{"Authorization": "Bearer ..."}``.
        timeout: Seconds to wait for the answer, which comes after the longest running request. A
            folder that is changed in place must not change before the answer, so for such a folder
            the callback waits as long as the host of the server is alive.

    Raises:
        ValueError: The URL is no HTTP URL.
    """
    server = _Server(url, headers, timeout)

    def reload(folder: Path, changed: list[str]) -> None:
        path, in_time = "/update_weights_from_disk", _stays(folder)
        asked = {
            "model_path": str(folder),
            "flush_cache": True,
            "weight_version": Version.name_of(folder),
        }
        if not abort_all_requests:
            server.tell(path, asked, in_time=in_time)
            return
        # Do not use the server's own abort_all_requests: with it the server loads while requests
        # still end, and then keeps their prefixes.
        server.ask("/pause_generation", {"mode": "abort"})
        try:
            server.tell(path, asked, in_time=in_time)
        finally:
            server.ask("/continue_generation", {})

    return reload


def reload_vllm(llm: Any, *, patches: bool = False, timeout: float | None = None) -> OnVersion:
    """Return a callback that makes a ``vllm.LLM`` of this process load each version.

    It calls ``reload_weights`` on each worker with the folder as ``weights_path``, then drops the
    cached prefixes of the old weights. Let no request run meanwhile: vLLM loads layer by layer.

    If a folder cannot be loaded, vLLM has dropped the old weights already. So the callback loads
    the old folder again before it raises.

    Args:
        llm: The engine.
        patches: Whether the engine has the backend ``casnap`` for its weights
            (``weight_transfer_config={"backend": "casnap"}``). If its workers hold the version
            before, only changed elements are then written.
        timeout: Seconds to wait for the workers; None: as long as it takes. For a folder that is
            changed in place, the callback always waits.

    Raises:
        TypeError: ``llm`` is something else, such as an ``AsyncLLM``, a URL, or an actor of Ray.
    """
    _check_engine(llm, is_async=False)
    return _reload(_VllmHere(llm, timeout), patches=patches)


def reload_vllm_async(
    engine: Any,
    *,
    mode: PauseMode = "wait",
    patches: bool = False,
    loop: asyncio.AbstractEventLoop | None = None,
    timeout: float = 600.0,
) -> OnVersion:
    """Return a callback that makes a ``vllm.AsyncLLM`` of this process load each version.

    It pauses the engine, loads the folder, drops the cached prefixes of the old weights, tells the
    engine the name of the version, and resumes the engine. If a step fails, it loads the old
    weights again, as :func:`reload_vllm` does, and still resumes the engine.

    The callback blocks. So follow in another thread than the event loop's, for example by
    ``asyncio.to_thread``.

    Args:
        engine: The engine.
        mode: ``"wait"`` or ``"keep"``: see :data:`PauseMode`.
        patches: Whether the engine has the backend ``casnap`` for its weights
            (``weight_transfer_config={"backend": "casnap"}``). If its workers hold the version
            before, only changed elements are then written in the pause.
        loop: The event loop of the engine; by default the one that runs now.
        timeout: Seconds to wait for each step, except the load of a folder that is changed in
            place. With ``wait``, the pause takes as long as the longest request.

    Raises:
        TypeError: ``engine`` is something else, such as a ``vllm.LLM``; or no event loop runs.
        ValueError: There is no such mode.
    """
    _check_mode(mode)
    _check_engine(engine, is_async=True)
    loop = loop or _running_loop()
    if loop is None:
        raise TypeError(
            "no event loop runs here: call reload_vllm_async in a coroutine, or pass the loop of "
            "the engine as loop="
        )
    return _reload(_VllmAsync(engine, mode, loop, timeout), patches=patches)


def reload_vllm_server(
    url: str,
    *,
    mode: PauseMode = "wait",
    patches: bool = False,
    headers: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> OnVersion:
    """Return a callback that makes a server of vLLM load each version.

    It does by HTTP what :func:`reload_vllm_async` does. Start the server with
    ``VLLM_SERVER_DEV_MODE=1``: it has no such calls otherwise. Let nobody else reach these calls.
    The server must see the folder under the same path.

    Args:
        url: The URL of the server, such as ``http://localhost:8000``.
        mode: ``"wait"`` or ``"keep"``: see :data:`PauseMode`.
        patches: Whether the engine has the backend ``casnap`` for its weights
            (``weight_transfer_config={"backend": "casnap"}``). If its workers hold the version
            before, only changed elements are then written in the pause.
        headers: Further headers, such as ``{"Authorization": "Bearer ..."}``.
        timeout: Seconds to wait for each answer, except the answer to the load of a folder that is
            changed in place. With ``wait``, the pause takes as long as the longest request.

    Raises:
        ValueError: The URL is no HTTP URL, or there is no such mode.
    """
    _check_mode(mode)
    return _reload(_VllmServer(_Server(url, headers, timeout), mode), patches=patches)


def _stays(folder: Path) -> bool:
    """Whether the files of a folder never change, since no pull changes it in place.

    If they never change, a callback may stop waiting after a timeout, though the engine may still
    load the folder. Otherwise the callback has to wait until the engine has answered.
    """
    return not Version.is_in_place(folder)


class _Engine(ABC):
    """An engine of vLLM, with the steps of a reload."""

    @abstractmethod
    def pause(self) -> None:
        """Pause the engine so that no request runs, and drop the cached prefixes."""

    @abstractmethod
    def is_paused(self) -> bool:
        """Whether the engine is paused, by casnap or by others."""

    @abstractmethod
    def call(self, method: str, *, in_time: bool = True, **options: Any) -> None:
        """Call a method on all workers.

        Args:
            method: The method.
            in_time: Whether to stop waiting after the timeout. The workers then go on unobserved.
            options: The arguments of the method.
        """

    @abstractmethod
    def forget_prefixes(self) -> None:
        """Drop the cached prefixes of the old weights."""

    @abstractmethod
    def name_version(self, name: str) -> None:
        """Tell the engine the name of the version that it has loaded."""

    @abstractmethod
    def resume(self) -> None:
        """Resume the engine, so that requests run again."""

    @abstractmethod
    def started_with(self) -> str:
        """Return the folder from which the engine loaded its first weights."""

    @abstractmethod
    def version(self) -> str:
        """Return the name of a version that the engine has, as :meth:`name_version` sets it."""


class _Reload:
    """A callback that makes an engine load a version while no request runs."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self._loaded = ""
        self._may_resume = True

    def __call__(self, folder: Path, changed: list[str]) -> None:
        with self._paused():
            self._load(str(folder))
            try:
                self._engine.forget_prefixes()
            finally:
                # Named before the last steps, since the engine resumes even if one of them fails.
                # Its answers come from this version: the pause has dropped the prefixes, and no
                # request has run since.
                self._engine.name_version(Version.name_of(folder))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause the engine for a ``with`` block, then resume it.

        If the weights may be a mix of two versions, the engine stays paused.
        """
        try:
            self._engine.pause()
            yield
        except BaseException as e:
            if not self._may_resume:
                raise
            try:
                self._engine.resume()
            except CasnapError as again:
                raise CasnapError(f"{e}. Nor could the engine be resumed: {again}") from e
            raise
        self._engine.resume()

    def _load(self, folder: str) -> None:
        """Load a folder; if that fails, load the old folder again.

        A failed load has dropped the old weights already, so the next request would crash the
        engine.
        """
        before = self._before()
        try:
            self._have_loaded(folder)
        except _OtherEngineError:
            raise
        except BaseException as e:  # Ctrl-C too: otherwise the engine would stay paused
            try:
                self._have_loaded(before)
            except Exception as again:  # noqa: BLE001 - whatever vLLM raises, the error says it
                raise self._no_weights(
                    f"vLLM did not load {folder}: {e!r}. Nor did it load {before} again", again
                ) from e
            if not isinstance(e, Exception):
                raise
            # If the old path is a link, or a folder that is changed in place, it has this version
            # already. So the version is loaded after all.
            if os.path.realpath(before) != folder:
                raise CasnapError(f"vLLM did not load {folder}, and still has {before}: {e}") from e
        self._loaded = folder

    def _before(self) -> str:
        """Return the folder that the engine loaded last."""
        return self._loaded or self._engine.started_with()

    def _have_loaded(self, folder: str) -> None:
        self._engine.call("reload_weights", in_time=_stays(Path(folder)), weights_path=folder)

    def _no_weights(self, what: str, error: BaseException) -> CasnapError:
        return CasnapError(f"{what}, so it has no whole weights now; restart it: {error}")


class _PatchedReload(_Reload):
    """A callback that uses the backend ``casnap``: only changed elements are written."""

    def __init__(self, engine: _Engine) -> None:
        super().__init__(engine)
        self._staged: StagedPatches | None = None

    @override
    def __call__(self, folder: Path, changed: list[str]) -> None:
        if Version.is_in_place(folder):
            raise CasnapError(
                f"patches lead from the version before, and a pull in place has written over it in "
                f"{folder}: leave out patches=True here, or --inplace (in_place=) there"
            )
        if not self._loaded:
            # The first call: an earlier callback may have loaded the version that the engine names.
            named = folder.parent / self._engine.version()
            self._loaded = str(named) if Version.at(named) else ""
            # A paused engine must stay paused: an earlier callback may have left a mix in it.
            self._may_resume = not self._engine.is_paused()
        self._staged = self._stage(folder)
        try:
            self._prepare(str(folder))
            super().__call__(folder, changed)
        finally:
            if self._staged is not None:
                self._staged.remove()

    def _prepare(self, folder: str) -> None:
        """Make the workers compute what they have to write, while requests still run.

        Raises:
            CasnapError: The engine does not have the backend.
        """
        info = {"update": self._update_of(folder)}
        try:
            self._engine.call("init_weight_transfer_engine", init_info=info)
        except _OtherEngineError:
            raise
        except Exception as e:
            raise CasnapError(
                "vLLM does not take patches of casnap. Start it where casnap is installed, with "
                f'--weight-transfer-config \'{{"backend": "casnap"}}\': {e}'
            ) from e

    def _stage(self, folder: Path) -> StagedPatches | None:
        try:
            return StagedPatches.between(Path(self._before()), folder)
        except PLACE_ERRORS as e:
            _log.warning("vLLM loads %s whole, since no patches could be written: %s", folder, e)
            return None

    def _update_of(self, folder: str) -> dict[str, Any]:
        """Return the message that makes vLLM's workers load the weights in a folder.

        If patches to these weights are staged, it names them: the workers then write only what
        changed.
        """
        version, staged = Version.at(Path(folder)), self._staged
        asked: dict[str, Any] = {"folder": folder, "content": version.content if version else ""}
        if staged is not None and staged.content == asked["content"]:
            asked |= {"patches": str(staged.path), "digest": staged.digest, "base": staged.base}
            asked["whole"] = staged.whole
        return asked

    @override
    def _have_loaded(self, folder: str) -> None:
        asked = self._update_of(folder)
        self._engine.call("start_weight_update")
        # Until all workers have the version, the engine may hold a mix.
        self._may_resume = False
        try:
            self._engine.call("update_weights", update_info=asked)
        except BaseException:
            # Some workers may still be inside the update.
            with suppress(Exception):
                self._engine.call("finish_weight_update")
            raise
        self._engine.call("finish_weight_update")
        self._may_resume = True

    @override
    def _no_weights(self, what: str, error: BaseException) -> CasnapError:
        return CasnapError(
            f"{what}, so its workers may have weights of two versions now. It stays paused until "
            f"one can be loaded: {error}"
        )


def _reload(engine: _Engine, *, patches: bool) -> OnVersion:
    return _PatchedReload(engine) if patches else _Reload(engine)


class _VllmHere(_Engine):
    """A ``vllm.LLM``. Its own thread runs the callback, so no request runs at the same time."""

    def __init__(self, llm: Any, timeout: float | None) -> None:
        self._llm = llm
        self._timeout = timeout

    @override
    def pause(self) -> None:
        # A ``vllm.LLM`` has no pause; drop the prefixes, as vLLM does in a pause.
        self.forget_prefixes()

    @override
    def is_paused(self) -> bool:
        return False

    @override
    def call(self, method: str, *, in_time: bool = True, **options: Any) -> None:
        timeout = self._timeout if in_time else None
        _check_answer(self._llm.collective_rpc(method, timeout, kwargs=options))

    @override
    def forget_prefixes(self) -> None:
        self._llm.llm_engine.reset_encoder_cache()
        _check_forgotten(self._llm.reset_prefix_cache(reset_connector=True))

    @override
    def name_version(self, name: str) -> None:
        self._llm.update_weight_version(name)

    @override
    def resume(self) -> None:
        pass

    @override
    def started_with(self) -> str:
        return str(self._llm.model_config.model)

    @override
    def version(self) -> str:
        return str(self._llm.get_weight_version())


class _VllmAsync(_Engine):
    """A ``vllm.AsyncLLM``, whose calls are coroutines of its event loop."""

    def __init__(
        self, engine: Any, mode: PauseMode, loop: asyncio.AbstractEventLoop, timeout: float
    ) -> None:
        self._engine = engine
        self._mode = mode
        self._loop = loop
        self._timeout = timeout

    @override
    def pause(self) -> None:
        self._wait_for(self._engine.pause_generation, mode=self._mode)

    @override
    def is_paused(self) -> bool:
        return bool(self._wait_for(self._engine.is_paused))

    @override
    def call(self, method: str, *, in_time: bool = True, **options: Any) -> None:
        rpc = self._engine.collective_rpc
        _check_answer(self._wait_for(rpc, method, in_time=in_time, kwargs=options))

    @override
    def forget_prefixes(self) -> None:
        reset = self._engine.reset_prefix_cache
        _check_forgotten(self._wait_for(reset, reset_running_requests=True, reset_connector=True))

    @override
    def name_version(self, name: str) -> None:
        self._wait_for(self._engine.update_weight_version, name)

    @override
    def resume(self) -> None:
        self._wait_for(self._engine.resume_generation)

    @override
    def started_with(self) -> str:
        return str(self._engine.model_config.model)

    @override
    def version(self) -> str:
        return str(self._wait_for(self._engine.get_weight_version))

    def _wait_for(
        self,
        call: Callable[..., Awaitable[Any]],
        *args: Any,
        in_time: bool = True,
        **options: Any,
    ) -> Any:
        """Make a call of the engine in its event loop; wait for the result, and return it.

        Args:
            call: The call.
            args: Its arguments.
            in_time: Whether to stop waiting after the timeout.
            options: Its keyword arguments.

        Raises:
            CasnapError: The engine took too long, or its event loop has ended.
        """
        if _running_loop() is self._loop:
            raise CasnapError(
                "the callback would wait for the event loop that it is called in. Follow in "
                "another thread, for instance by asyncio.to_thread"
            )

        async def made() -> Any:
            return await call(*args, **options)

        coroutine = made()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError as e:
            coroutine.close()
            raise CasnapError(f"the event loop of vLLM has ended: {e}") from e
        try:
            return future.result(self._timeout if in_time else None)
        except concurrent.futures.TimeoutError:
            future.cancel()
            name = getattr(call, "__name__", call)
            raise CasnapError(f"vLLM took more than {self._timeout:g} s for {name}") from None


class _VllmServer(_Engine):
    """A server of vLLM."""

    def __init__(self, server: _Server, mode: PauseMode) -> None:
        self._server = server
        self._mode = mode

    @override
    def pause(self) -> None:
        try:
            self._server.ask(f"/pause?mode={self._mode}", {})
        except _NotFoundError as e:
            raise CasnapError(f"{e}. Start vLLM's server with VLLM_SERVER_DEV_MODE=1") from e

    @override
    def is_paused(self) -> bool:
        return self._asked("/is_paused").get("is_paused") is not False

    def _asked(self, path: str) -> dict[str, Any]:
        """Return the answer to a call that only a server in development mode has.

        Raises:
            CasnapError: The server does not have the call, or cannot be reached.
        """
        try:
            return self._server.ask(path)
        except _NotFoundError as e:
            raise CasnapError(f"{e}. Start vLLM's server with VLLM_SERVER_DEV_MODE=1") from e

    @override
    def call(self, method: str, *, in_time: bool = True, **options: Any) -> None:
        asked = {"method": method, "kwargs": options}
        self._server.ask("/collective_rpc", asked, in_time=in_time)

    @override
    def forget_prefixes(self) -> None:
        what = "reset_running_requests=true&reset_external=true"
        _check_forgotten(self._server.ask(f"/reset_prefix_cache?{what}", {}).get("success") is True)

    @override
    def name_version(self, name: str) -> None:
        self._server.ask("/update_weight_version", {"new_version": name})

    @override
    def resume(self) -> None:
        self._server.ask("/resume", {})

    @override
    def started_with(self) -> str:
        models = self._server.ask("/v1/models")
        return str(models["data"][0]["root"])

    @override
    def version(self) -> str:
        return str(self._server.ask("/weight_info")["weight_version"])


class _Watched(HTTPConnection):
    """A connection that breaks once the other host is gone, however long the server works."""

    @override
    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _MOST_SILENCE // 4),
            (socket.TCP_KEEPINTVL, _MOST_SILENCE // 4),
            (socket.TCP_USER_TIMEOUT, _MOST_SILENCE * 1000),
        ):
            self.sock.setsockopt(socket.IPPROTO_TCP, option, value)


class _WatchedSafely(HTTPSConnection, _Watched):
    """Like :class:`_Watched`, by HTTPS."""


class _ToHost(HTTPHandler):
    @override
    def http_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_Watched, req)


class _ToSafeHost(HTTPSHandler):
    @override
    def https_open(self, req: Request) -> HTTPResponse:
        return self.do_open(_WatchedSafely, req)


class _OtherEngineError(TypeError):
    """An object has the methods of a vLLM engine, but they return something else."""


class _NotFoundError(CasnapError):
    """The server does not know the call (404)."""


class _Server:
    """A server that answers with JSON objects.

    Args:
        url: Its URL.
        headers: Further headers.
        timeout: Seconds to wait for an answer.

    Raises:
        ValueError: The URL is no HTTP URL.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None, timeout: float) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"url is like http://localhost:30000; got {url!r:.200}")
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout = timeout

    def ask(
        self, path: str, asked: Mapping[str, Any] | None = None, *, in_time: bool = True
    ) -> dict[str, Any]:
        """Post an object, or get a path; return the answer.

        Args:
            path: The path of the call.
            asked: The object to post; None to get.
            in_time: Whether to stop waiting after the timeout; the server then goes on unobserved.
                If False, this waits until the host is gone.

        Raises:
            CasnapError: The server cannot be reached, or answers with another status than 200.
        """
        place = f"{self.url}{path}"
        content = None if asked is None else json.dumps(asked).encode()
        try:
            request, timeout = Request(place, content, self._headers), self._timeout
            opened = build_opener(_ToHost, _ToSafeHost).open
            with opened(request, timeout=timeout if in_time else None) as response:
                answer = response.read(_MOST_ANSWER)
        except HTTPError as e:
            text = e.read(_MOST_ANSWER).decode("utf-8", "replace")
            kind = _NotFoundError if e.code == 404 else CasnapError
            raise kind(f"{place} answers {e.code}: {text:.500}") from e
        except (OSError, HTTPException) as e:
            raise CasnapError(f"{place} cannot be reached: {e!r}") from e
        with suppress(ValueError):
            decoded = json.loads(answer)
            if isinstance(decoded, dict):
                return decoded
        text = answer.decode("utf-8", "replace")
        raise CasnapError(f"{place} does not answer with an object of JSON: {text:.500}")

    def tell(self, path: str, asked: Mapping[str, Any], *, in_time: bool = True) -> None:
        """Post an object to SGLang.

        Raises:
            CasnapError: As for :meth:`ask`; or the server does not report success.
        """
        answer = self.ask(path, asked, in_time=in_time)
        if answer.get("success") is not True:
            raise CasnapError(f"{self.url}{path} did not load {asked}: {answer}"[:1000])


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _check_mode(mode: object) -> None:
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is one of {', '.join(get_args(PauseMode))}; got {mode!r:.80}")


def _check_engine(engine: Any, *, is_async: bool) -> None:
    """Check that an object has the calls of an engine, of the right kind: plain or async.

    Raises:
        TypeError: A call is missing, or of another kind.
    """
    calls = [getattr(engine, name, None) for name in ("collective_rpc", "reset_prefix_cache")]
    kind = type(engine).__name__
    if isinstance(engine, str):
        raise TypeError("for a server there is reload_vllm_server(url)")
    # Methods of Ray's actors have `remote`, and return references.
    if any(hasattr(call, "remote") for call in calls):
        raise TypeError(
            f"{kind} is the handle of an engine in another process, whose calls return before they "
            "are done. Make the callback, and follow, in that process; or run a server"
        )
    if not all(callable(call) for call in calls):
        raise TypeError(f"an engine of vLLM has collective_rpc and reset_prefix_cache; got {kind}")
    if iscoroutinefunction(calls[0]) is not is_async:
        other = "reload_vllm_async(engine)" if not is_async else "reload_vllm(llm)"
        raise TypeError(f"for {kind} there is {other}")


def _check_answer(answer: object) -> None:
    """Check that the answer of ``collective_rpc`` is a list, with an answer of each worker.

    Raises:
        _OtherEngineError: It is something else.
    """
    if isinstance(answer, list):
        return
    if iscoroutine(answer):
        answer.close()
    raise _OtherEngineError(
        "collective_rpc of vLLM returns a list, with the answer of each worker. It has returned "
        f"{with_article(type(answer).__name__)}, so perhaps nothing was loaded. An engine "
        "whose calls must be awaited needs reload_vllm_async"
    )


def _check_forgotten(answer: object) -> None:
    if answer is False:
        raise CasnapError(
            "vLLM has kept its cache of prefixes, since requests run; it is reset when the "
            "callback is called again"
        )
