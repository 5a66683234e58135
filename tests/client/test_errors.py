"""The one table: each error to its status and back, through a real server."""

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from specdec import errors
from specdec.channel import open_channel
from specdec.errors import ERRORS, SpecdecError, from_rpc_error
from specdec.serving.server import Server
from specdec.serving.settings import ServiceSettings
from specdec.serving.status import to_status
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc

CODES = {
    errors.InvalidArgumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFoundError: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExistsError: grpc.StatusCode.ALREADY_EXISTS,
    errors.FencedError: grpc.StatusCode.ABORTED,
    errors.ModelMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NonFiniteLogitsError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.DataLossError: grpc.StatusCode.DATA_LOSS,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}
EXAMPLES: dict[type[SpecdecError], SpecdecError] = {
    errors.InvalidArgumentError: errors.InvalidArgumentError({"sampling.top_p": "is 7", "prompt": "is missing"}),
    errors.NotFoundError: errors.NotFoundError("no such session"),
    errors.AlreadyExistsError: errors.AlreadyExistsError("used before"),
    errors.FencedError: errors.FencedError("taken over", epoch=7),
    errors.ModelMismatchError: errors.ModelMismatchError("tokenizers differ"),
    errors.NonFiniteLogitsError: errors.NonFiniteLogitsError("NaN"),
    errors.OverloadedError: errors.OverloadedError("full", 2.5),
    errors.UnavailableError: errors.UnavailableError("loading é", 0.25),
    errors.DataLossError: errors.DataLossError("went back"),
    errors.InternalError: errors.InternalError(),
}


class Failing(generation_pb2_grpc.GenerationServiceServicer):
    """Every method fails as the test says."""

    error: Exception = errors.InternalError()

    async def GetModel(self, request: pb.GetModelRequest, context: object) -> pb.GetModelResponse:
        raise self.error

    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:  # type: ignore[override]
        await context.write(pb.GenerateResponse(session_id="s"))
        raise self.error


Service = tuple[Failing, generation_pb2_grpc.GenerationServiceStub, Server]


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    failing = Failing()
    server = Server(ServiceSettings(port=0), "specdec.v1.GenerationService")
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(failing, server.grpc)
    await server.listen()
    await server.set_ready(True)
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield failing, generation_pb2_grpc.GenerationServiceStub(channel), server
    await server.grpc.stop(None)


async def unary_error(stub: generation_pb2_grpc.GenerationServiceStub) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(pb.GetModelRequest())
    return caught.value


async def stream_error(stub: generation_pb2_grpc.GenerationServiceStub) -> grpc.aio.AioRpcError:
    call = stub.Generate(pb.GenerateRequest())
    assert (await call.read()).session_id == "s"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Message]:
    """The google.rpc details by name."""
    found: dict[str, Message] = {}
    (data,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    for packed in status_pb2.Status.FromString(data).details:
        message: Message = getattr(error_details_pb2, packed.TypeName().split(".")[-1])()
        assert packed.Unpack(message)
        found[type(message).__name__] = message
    return found


def test_the_table_is_whole() -> None:
    assert set(ERRORS) == set(CODES) == set(EXAMPLES)
    assert len({kind.reason for kind in ERRORS}) == len(ERRORS)
    assert {kind: kind.code for kind in ERRORS} == CODES


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
async def test_each_error_comes_back_as_it_was_raised(service: Service, kind: type[SpecdecError]) -> None:
    failing, stub, _ = service
    failing.error = given = EXAMPLES[kind]
    for caught in (await unary_error(stub), await stream_error(stub)):
        assert (caught.code(), caught.details()) == (CODES[kind], given.message)
        back = from_rpc_error(caught)
        assert (type(back), back.message, back.metadata) == (kind, given.message, given.metadata)
        for field in ("violations", "retry_after_s"):
            assert getattr(back, field, None) == getattr(given, field, None)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
async def test_the_details_are_google_s(service: Service, kind: type[SpecdecError]) -> None:
    failing, stub, _ = service
    failing.error = given = EXAMPLES[kind]
    details = details_of(await unary_error(stub))
    info = details.pop("ErrorInfo")
    assert (info.reason, info.domain, dict(info.metadata)) == (kind.reason, "specdec", given.metadata)  # type: ignore[attr-defined]
    expected = {
        errors.InvalidArgumentError: ["BadRequest"],
        errors.OverloadedError: ["RetryInfo"],
        errors.UnavailableError: ["RetryInfo"],
    }
    assert list(details) == expected.get(kind, [])


async def test_bad_requests_name_each_field(service: Service) -> None:
    failing, stub, _ = service
    failing.error = EXAMPLES[errors.InvalidArgumentError]
    bad = details_of(await unary_error(stub))["BadRequest"]
    assert {entry.field: entry.description for entry in bad.field_violations} == {  # type: ignore[attr-defined]
        "sampling.top_p": "is 7",
        "prompt": "is missing",
    }


async def test_retries_say_when(service: Service) -> None:
    failing, stub, _ = service
    failing.error = EXAMPLES[errors.OverloadedError]
    retry = details_of(await unary_error(stub))["RetryInfo"]
    assert retry.retry_delay.ToMilliseconds() == 2500  # type: ignore[attr-defined]


async def test_a_bug_of_ours_leaks_nothing(service: Service) -> None:
    failing, stub, _ = service
    failing.error = KeyError("what the user wrote")
    for caught in (await unary_error(stub), await stream_error(stub)):
        assert caught.code() is grpc.StatusCode.INTERNAL
        assert "what the user wrote" not in f"{caught.details()}{caught.trailing_metadata()}"
        assert type(from_rpc_error(caught)) is errors.InternalError


async def test_before_it_is_ready_a_server_is_unavailable(service: Service) -> None:
    _, stub, server = service
    await server.set_ready(False)
    back = from_rpc_error(await unary_error(stub))
    assert (type(back), "loading" in back.message) == (errors.UnavailableError, True)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.UnavailableError),
        (grpc.StatusCode.CANCELLED, errors.UnavailableError),
        (grpc.StatusCode.UNKNOWN, errors.UnavailableError),
        (grpc.StatusCode.UNAVAILABLE, errors.UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.OverloadedError),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.ModelMismatchError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InternalError),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidArgumentError),
    ],
)
def test_what_others_raise_becomes_the_kind_of_its_code(code: grpc.StatusCode, kind: type[SpecdecError]) -> None:
    """A proxy, or grpc itself, sends no details."""
    back = from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "said"))
    assert type(back) is kind
    assert "said" in back.message or kind is errors.InternalError


def test_a_status_has_the_code_in_its_details_too() -> None:
    status = to_status(errors.NotFoundError("gone"))
    ((_, data),) = status.trailing_metadata
    inside = status_pb2.Status.FromString(data)
    assert (status.code, inside.code, inside.message) == (grpc.StatusCode.NOT_FOUND, 5, "gone")
