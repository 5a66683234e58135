"""Settings of the coordinator."""

from typing import ClassVar

from pydantic import Field

from specdec.channel import MAX_REQUEST_BYTES
from specdec.serving.settings import ServiceSettings
from specdec.types import MAX_DRAFT_TOKENS


class CoordinatorSettings(ServiceSettings):
    """The coordinator: `python -m coordinator`."""

    max_request_bytes: ClassVar[int] = MAX_REQUEST_BYTES

    target: str = Field("127.0.0.1:50053", description="address of the target workers, host:port or dns:///host:port")
    draft: str | None = Field("127.0.0.1:50052", description="address of the draft workers; empty: plain decoding")
    tokenizer: str = Field(..., description="hub id or folder of the target model; only its tokenizer is read")
    store: str = Field("embedded", description="embedded, or redis://, rediss:// or unix:// for sessions in Redis")
    session_ttl_s: float = Field(3600.0, ge=1, description="seconds that a session is kept after its last commit")
    max_sessions: int = Field(
        1024, ge=1, description="maximum number of sessions generated at once; more: RESOURCE_EXHAUSTED"
    )
    max_new_tokens: int = Field(
        4096, ge=1, description="maximum number of tokens a request may generate; also the default"
    )
    max_draft_tokens: int = Field(
        MAX_DRAFT_TOKENS, ge=0, le=MAX_DRAFT_TOKENS, description="maximum draft tokens a round, automatic or asked for"
    )
    draft_timeout_s: float = Field(2.0, gt=0, description="a draft worker that takes longer is done without")
    score_timeout_s: float = Field(60.0, gt=0, description="a target worker that takes longer is tried again")
    target_patience_s: float = Field(30.0, ge=0, description="seconds a session waits for a target worker to be back")


SETTINGS = CoordinatorSettings
