"""The error table: each error becomes its status and is rebuilt from it, through a real server."""

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
import pytest
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError
from hypothesis import given as for_all
from hypothesis import strategies as st

from specdec import errors
from specdec.channel import open_channel
from specdec.errors import ERRORS, STATUS_DETAILS_KEY, SpecdecError, from_rpc_error, is_from_server
from specdec.serving.server import Server
from specdec.serving.settings import ServiceSettings, load
from specdec.serving.status import to_status
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc

EXAMPLES: list[SpecdecError] = [
    errors.InvalidArgumentError({"sampling.top_p": "is 7", "prompt": "is missing"}),
    errors.NotFoundError("no such session"),
    errors.AlreadyExistsError("used before"),
    errors.FencedError("taken over", epoch=7),
    errors.ModelMismatchError("tokenizers differ"),
    errors.ContextTooShortError("73 tokens"),
    errors.NonFiniteLogitsError("NaN"),
    errors.UnauthenticatedError("no token"),
    errors.PermissionDeniedError("not yours"),
    errors.OverloadedError("full", 2.5),
    errors.UnavailableError("loading é", 0.25),
    errors.DeadlineExceededError("too late", None),
    errors.DataLossError("rolled back"),
    errors.InternalError(),
]
# the error of each status without a specdec ErrorInfo
FOREIGN = {
    grpc.StatusCode.CANCELLED: errors.UnavailableError,
    grpc.StatusCode.UNKNOWN: errors.UnavailableError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgumentError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceededError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.ModelMismatchError,
    grpc.StatusCode.ABORTED: errors.FencedError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgumentError,
    grpc.StatusCode.UNIMPLEMENTED: errors.ModelMismatchError,
    grpc.StatusCode.INTERNAL: errors.UnavailableError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.DataLossError,
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
}


def name_of(value: object) -> str:
    return type(value).__name__


class Failing(generation_pb2_grpc.GenerationServiceServicer):
    """Every method raises `error`."""

    error: Exception = errors.InternalError()

    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:
        raise self.error

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        await context.write(pb.GenerateResponse(session_id="s"))
        raise self.error


Stub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"
Service = tuple[Failing, Stub, Server]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    failing = Failing()  # type: ignore[abstract]  # it lacks the methods that no test calls
    server = Server(load(ServiceSettings, "test", ["--port", "0"]), "specdec.v1.GenerationService")
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(failing, server.grpc)
    await server.listen()
    await server.set_ready(True)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield failing, generation_pb2_grpc.GenerationServiceStub(channel), server
    await server.grpc.stop(None)


async def unary_error(stub: Stub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(pb.GetModelRequest())
    return caught.value


async def stream_error(stub: Stub) -> grpc.aio.AioRpcError:
    call = stub.Generate(pb.GenerateRequest())
    first = await call.read()
    assert isinstance(first, pb.GenerateResponse)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """The google.rpc details by name."""
    found: dict[str, Any] = {}
    (data,) = [value for key, value in error.trailing_metadata() or () if key == STATUS_DETAILS_KEY]
    for packed in status_pb2.Status.FromString(data).details:
        message: Message = getattr(error_details_pb2, packed.TypeName().split(".")[-1])()
        assert packed.Unpack(message)
        found[type(message).__name__] = message
    return found


def test_every_error_is_in_the_table() -> None:
    assert [type(example) for example in EXAMPLES] == list(ERRORS)
    assert len({kind.reason for kind in ERRORS}) == len(ERRORS)
    assert all(kind.__name__.endswith("Error") for kind in ERRORS)


def test_every_foreign_code_is_in_the_table() -> None:
    assert set(FOREIGN) == set(grpc.StatusCode) - {grpc.StatusCode.OK}


def test_table_in_the_docstring_is_complete() -> None:
    text = errors.__doc__ or ""
    for kind in ERRORS:
        (row,) = [line for line in text.splitlines() if f"── {kind.__name__} " in line]
        assert kind.code.name in row
        assert kind.reason in row
        assert all(code.name in row for code in kind.foreign_codes)


def test_data_loss_reason_is_store_rolled_back() -> None:
    assert errors.DataLossError.reason == "STORE_ROLLED_BACK"


@pytest.mark.parametrize("given", EXAMPLES, ids=name_of)
async def test_error_arrives_as_raised(service: Service, given: SpecdecError) -> None:
    failing, stub, _ = service
    failing.error = given
    for caught in (await unary_error(stub), await stream_error(stub)):
        assert (caught.code(), caught.details()) == (given.code, given.message)
        assert is_from_server(caught)
        back = from_rpc_error(caught)
        assert (type(back), back.message, back.metadata) == (type(given), given.message, given.metadata)
        for field in ("violations", "retry_after_s"):
            assert getattr(back, field, None) == getattr(given, field, None)


@pytest.mark.parametrize("given", EXAMPLES, ids=name_of)
async def test_details_follow_google_rpc(service: Service, given: SpecdecError) -> None:
    failing, stub, _ = service
    failing.error = given
    details = details_of(await unary_error(stub))
    info = details.pop("ErrorInfo")
    assert (info.reason, info.domain, dict(info.metadata)) == (given.reason, "specdec", given.metadata)
    expected = {
        errors.InvalidArgumentError: ["BadRequest"],
        errors.OverloadedError: ["RetryInfo"],
        errors.UnavailableError: ["RetryInfo"],
    }
    assert list(details) == expected.get(type(given), [])


async def test_bad_request_names_each_field(service: Service) -> None:
    failing, stub, _ = service
    failing.error = EXAMPLES[0]
    bad = details_of(await unary_error(stub))["BadRequest"]
    assert {entry.field: entry.description for entry in bad.field_violations} == {
        "sampling.top_p": "is 7",
        "prompt": "is missing",
    }


async def test_retry_info_carries_the_pause(service: Service) -> None:
    failing, stub, _ = service
    failing.error = errors.OverloadedError("full", 2.5)
    retry = details_of(await unary_error(stub))["RetryInfo"]
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_internal_error_hides_its_cause(service: Service) -> None:
    failing, stub, _ = service
    failing.error = KeyError("what the user wrote")
    for caught in (await unary_error(stub), await stream_error(stub)):
        assert caught.code() is grpc.StatusCode.INTERNAL
        assert "what the user wrote" not in f"{caught.details()}{caught.trailing_metadata()}"
        assert type(from_rpc_error(caught)) is errors.InternalError


async def test_loading_server_is_unavailable(service: Service) -> None:
    _, stub, server = service
    await server.set_ready(False)
    back = from_rpc_error(await unary_error(stub))
    assert type(back) is errors.UnavailableError
    assert "loading" in back.message


def rpc_error(code: grpc.StatusCode, details: bytes | None = None, message: str | None = "said") -> AioRpcError:
    """A status as grpc.aio raises it, with these bytes as its google.rpc details."""
    trailers = () if details is None else ((STATUS_DETAILS_KEY, details),)
    return AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)


@pytest.mark.parametrize(("code", "kind"), FOREIGN.items(), ids=str)
def test_status_without_details_is_mapped_by_code(code: grpc.StatusCode, kind: type[SpecdecError]) -> None:
    """A proxy, or grpc itself, sends no details."""
    error = rpc_error(code)
    back = from_rpc_error(error)
    assert type(back) is kind
    assert back.message == "said"
    assert getattr(back, "retry_after_s", None) is None
    assert getattr(back, "violations", {}) == {}
    assert not is_from_server(error)


def test_status_without_text_shows_its_code() -> None:
    assert from_rpc_error(rpc_error(grpc.StatusCode.NOT_FOUND, message=None)).message == "NOT_FOUND"


def test_error_info_of_other_domains_is_ignored() -> None:
    info = error_details_pb2.ErrorInfo(reason="SESSION_FENCED", domain="googleapis.com")
    error = rpc_error(grpc.StatusCode.UNAVAILABLE, packed(info))
    assert type(from_rpc_error(error)) is errors.UnavailableError
    assert not is_from_server(error)


def test_unknown_reason_is_mapped_by_code() -> None:
    """A newer server may have errors that this client does not know."""
    info = error_details_pb2.ErrorInfo(reason="TENANT_SUSPENDED", domain="specdec")
    assert type(from_rpc_error(rpc_error(grpc.StatusCode.PERMISSION_DENIED, packed(info)))) is (
        errors.PermissionDeniedError
    )


def packed(*messages: Message) -> bytes:
    status = status_pb2.Status()
    for message in messages:
        status.details.add().Pack(message)
    return bytes(status.SerializeToString())


@for_all(st.binary(max_size=60))
def test_undecodable_details_are_ignored(data: bytes) -> None:
    back = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, data))
    assert isinstance(back, SpecdecError)


def test_undecodable_detail_inside_a_status_is_ignored() -> None:
    status = status_pb2.Status(code=14)
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
    error = rpc_error(grpc.StatusCode.UNAVAILABLE, status.SerializeToString())
    assert type(from_rpc_error(error)) is errors.UnavailableError


@pytest.mark.parametrize(("seconds", "retry_after_s"), [(-5, 0.0), (2**62, 2.0**62), (3, 3.0)])
def test_any_retry_delay_is_read(seconds: int, retry_after_s: float) -> None:
    retry = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds))
    back = from_rpc_error(rpc_error(grpc.StatusCode.UNAVAILABLE, packed(retry)))
    assert isinstance(back, errors.UnavailableError)
    assert back.retry_after_s == retry_after_s


def test_status_repeats_its_code_in_details() -> None:
    status = to_status(errors.NotFoundError("gone"))
    assert status.trailing_metadata
    ((_, data),) = status.trailing_metadata
    assert isinstance(data, bytes)
    inside = status_pb2.Status.FromString(data)
    assert (status.code, inside.code, inside.message) == (grpc.StatusCode.NOT_FOUND, 5, "gone")


def test_long_texts_in_a_status_are_cut() -> None:
    """Metadata of more than 8 KiB would replace the status."""
    name = "x" * 100_000
    status = to_status(errors.InvalidArgumentError({"open.drafter": f"is {name}"}))
    assert len(status.details) == 1024
    assert sum(len(value) for _, value in status.trailing_metadata) < 2000
