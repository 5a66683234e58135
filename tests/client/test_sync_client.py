"""The synchronous client: the same calls, driven from threads without an event loop."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import Parameter, signature
from typing import Any

import pytest

import specdec
from specdec import AsyncClient, AsyncStream, Client, SessionStatus, Stream
from specdec.channel import open_channel
from specdec.v1 import generation_pb2 as pb
from tests.support.scripted import SESSION, TEXT, WHOLE, Send, Service, digest_at, sends, served


class Running:
    """A scripted service on its own thread, because these tests have no event loop."""

    def __init__(self) -> None:
        self.service = Service()
        self.port = 0
        self.cancelled = threading.Event()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> "Running":
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def endless(self, request: Any, send: Send, context: Any) -> None:
        """Send the first chunk and then nothing; record that the call was cancelled."""
        context.add_done_callback(lambda _: self.cancelled.set())
        await send(**WHOLE[0])
        await asyncio.Event().wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with served(self.service) as port:
            self.port = port
            self._ready.set()
            await self._stop.wait()


@pytest.fixture
def running() -> Iterator[Running]:
    with Running() as running:
        yield running


def test_text_arrives_in_chunks(running: Running) -> None:
    running.service.handlers = [sends(*WHOLE)]
    with Client(running.address) as client, client.generate("x", temperature=0.5) as stream:
        assert stream.session_id is None
        assert "".join(chunk.text for chunk in stream) == TEXT
        assert stream.session_id == SESSION
        assert stream.result().text == TEXT
    assert running.service.requests[0].sampling.temperature == 0.5


def test_broken_stream_resumes(running: Running) -> None:
    running.service.handlers = [sends(WHOLE[0]), sends(*WHOLE[1:])]
    with Client(running.address) as client:
        assert client.complete("x").text == TEXT
    assert running.service.requests[1].offset == 2


def test_works_without_context_manager(running: Running) -> None:
    running.service.handlers = [sends(*WHOLE), sends(*WHOLE)]
    client = Client(running.address)
    assert client.chat([("user", "hi")]).text == TEXT
    assert client.stream_chat([("user", "hi")]).result().text == TEXT
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        client.complete("x")


def test_other_calls_are_forwarded(running: Running) -> None:
    async def models(request: Any, send: Send, context: Any) -> None:
        await send(pb.GetModelResponse(context_length=5))

    async def session(request: Any, send: Send, context: Any) -> None:
        await send(pb.GetSessionResponse(status=pb.SESSION_STATUS_ACTIVE, text="t"))

    async def cancelled(request: Any, send: Send, context: Any) -> None:
        await send(pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED))

    running.service.handlers = [models, session, cancelled, sends(*WHOLE[1:])]
    with Client(running.address) as client:
        client.connect()
        assert client.get_model().context_length == 5
        assert client.get_session(SESSION).text == "t"
        assert client.cancel(SESSION) is SessionStatus.CANCELLED
        assert client.resume(SESSION, offset=2, digest=digest_at(2)).result().text == " a time there was."


def leave_by_closing(client: Client) -> None:
    with client.generate("x") as stream:
        next(stream)


def leave_by_error(client: Client) -> None:
    with suppress(KeyError), client.generate("x") as stream:
        next(stream)
        raise KeyError


def leave_by_garbage_collection(client: Client) -> None:
    for _ in client.generate("x"):
        break
    gc.collect()


@pytest.mark.parametrize("leave", [leave_by_closing, leave_by_error, leave_by_garbage_collection])
def test_leaving_the_stream_cancels_the_call(running: Running, leave: Callable[[Client], None]) -> None:
    running.service.handlers = [running.endless]
    with Client(running.address) as client:
        leave(client)
        running.cancelled.wait()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt: a process that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_cancels_the_call(running: Running) -> None:
    running.service.handlers = [running.endless]
    main = threading.main_thread().ident
    assert main
    with Client(running.address) as client:
        stream = client.generate("x")
        next(stream)
        threading.Timer(1.0, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        running.cancelled.wait()


def test_another_thread_can_close_the_stream(running: Running) -> None:
    running.service.handlers = [running.endless]
    with Client(running.address) as client:
        stream = client.generate("x")
        next(stream)
        threading.Timer(0.1, stream.close).start()
        assert list(stream) == []
        running.cancelled.wait()


def test_closing_ends_a_running_call(running: Running) -> None:
    running.service.handlers = [running.endless]
    client = Client(running.address)
    stream = client.generate("x")
    next(stream)
    threading.Timer(0.1, client.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_closing_ends_a_call_between_attempts(running: Running) -> None:
    running.service.handlers = [sends(then=specdec.UnavailableError("later", retry_after_s=3600))]
    client = Client(running.address, timeout_s=7200)
    threading.Timer(0.3, client.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        client.complete("x")


def test_stream_keeps_its_client_alive(running: Running) -> None:
    running.service.handlers = [sends(*WHOLE)]
    assert Client(running.address).generate("x").result().text == TEXT


def test_threads_share_a_client(running: Running) -> None:
    running.service.handlers = [sends(*WHOLE) for _ in range(8)]
    texts: list[str] = []
    with Client(running.address) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.complete("x").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [TEXT] * 8


def test_no_thread_outlives_its_client() -> None:
    before = set(threading.enumerate())  # of other tests, which may end meanwhile
    client = Client()
    assert len(set(threading.enumerate()) - before) == 1
    del client
    gc.collect()
    while set(threading.enumerate()) - before:
        time.sleep(0.001)


def test_wrong_arguments_raise_at_the_call() -> None:
    with Client("127.0.0.1:1") as client:
        with pytest.raises(specdec.InvalidArgumentError, match="top_p"):
            client.generate("x", top_p=7)
        with pytest.raises(specdec.InvalidArgumentError, match="prompt_token_ids is empty"):
            client.generate(prompt_token_ids=[])


@pytest.mark.parametrize(("synchronous", "asynchronous"), [(Client, AsyncClient), (Stream, AsyncStream)])
def test_both_clients_have_the_same_methods(synchronous: type, asynchronous: type) -> None:
    assert public(synchronous) == public(asynchronous)


def public(kind: type) -> dict[str, list[Parameter]]:
    methods = {name: getattr(kind, name) for name in dir(kind) if not name.startswith("_")}
    return {
        name: list(signature(method).parameters.values()) if callable(method) else []
        for name, method in methods.items()
    }


def test_both_constructors_take_the_same_arguments() -> None:
    assert list(signature(Client).parameters) == list(signature(AsyncClient).parameters)


def test_channel_opens_on_the_client_thread(running: Running) -> None:
    running.service.handlers = [sends(*WHOLE)]
    with Client("nowhere:1", channel=lambda: open_channel(running.address)) as client:
        assert client.complete("x").text == TEXT
