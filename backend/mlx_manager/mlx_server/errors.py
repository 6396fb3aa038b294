"""All errors of the server, as one tree of classes. Each class has its HTTP status and code.

    MLXManagerError                   500 internal_error
    ├── InvalidRequest                400 invalid_request
    │   ├── InvalidParameter          400 invalid_parameter        of a wrong type, missing, at odds
    │   │   └── OutOfRange            422 invalid_parameter        beyond what its field allows
    │   ├── UnsupportedParameter      400 unsupported_parameter    known, and not honoured (yet)
    │   ├── ContextLengthExceeded     400 context_length_exceeded
    │   ├── WrongModelKind            400 wrong_model_kind         chat with an embedding model
    │   ├── RequestTooLarge           413 request_too_large
    │   │   └── HeadersTooLarge       431 headers_too_large
    │   ├── RequestNotReceived        408 request_not_received     the client stopped sending it
    │   └── ModelInUse                409 model_in_use             it can't be unloaded now
    ├── AuthenticationFailed          401 invalid_api_key
    │   └── WrongAdminToken           401 invalid_admin_token
    ├── PermissionDenied              403 permission_denied        known, and not allowed that
    ├── ModelNotFound                 404 model_not_found
    ├── InvalidSettings               422 invalid_settings         a file of the owner's
    ├── ResponseNotFound              404 response_not_found
    ├── ItemNotFound                  404 item_not_found           of a response that was kept
    ├── RequestNotFound               404 request_not_found        it has ended, or never was
    ├── RequestCancelled              403 request_cancelled        by the server's owner
    ├── ModelLoadFailed               400 model_load_failed        broken files, say
    │   ├── DownloadFailed            503 download_failed          the hub can't be reached, say
    │   ├── ModelLoadStalled          504 model_load_stalled       it got no further for too long
    │   ├── ModelDown                 503 model_down               its process failed too often
    │   ├── ModelNotSupported         400 model_not_supported      no such architecture
    │   ├── ModelGated                403 model_gated
    │   ├── ModelTooLarge             507 model_too_large          does not fit this machine
    │   └── DiskFull                  507 disk_full                no room for the download
    ├── Overloaded                    429 overloaded               the queue is full
    │   ├── RateLimited               429 rate_limit_exceeded      the key's, a minute
    │   └── OutOfMemory               503 out_of_memory            no room now; try again later
    ├── StorageFailed                 507 storage_failed           the disk is full, say
    ├── ServerNotReady                503 server_not_ready         starting, draining, unhealthy
    │   └── RemoteUnavailable         503 remote_unavailable       no other machine answers
    ├── RequestTimedOut               504 timeout
    └── GenerationFailed              500 generation_failed        the step failed; rows were lost
        ├── WorkerFailed              500 worker_failed            the model's process has ended
        └── RemoteFailed              502 remote_failed            another machine broke off, say

`OutOfRange` is 400 outside `/v1/chat/completions` and `/v1/completions`, or if the owner sets so.
`api/errors.py` turns the errors into the body that the caller's protocol expects.
"""

from __future__ import annotations

from typing import ClassVar

LONGEST_MESSAGE = 4000
"""Most characters of a message: a caller may have sent megabytes as a name."""
LONGEST_PARAM = 256


class MLXManagerError(Exception):
    """Root of the tree. param: the request's field at fault. retry_after: in seconds."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        if len(message) > LONGEST_MESSAGE:
            message = f"{message[:LONGEST_MESSAGE]}..."
        super().__init__(message)
        self.message = message
        self.param = None if param is None else param[:LONGEST_PARAM]
        self.retry_after = retry_after


class InvalidRequest(MLXManagerError):
    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class InvalidParameter(InvalidRequest):
    code = "invalid_parameter"


class OutOfRange(InvalidParameter):
    """A number, a length or a count beyond what its field allows."""

    status = 422


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """A prompt that is too long for the model.

    tokens: number in the prompt. context: the most that the model takes. None: not counted.
    """

    code = "context_length_exceeded"
    tokens: int | None = None
    context: int | None = None

    @classmethod
    def counted(
        cls,
        tokens: int,
        context: int,
        *,
        read: int | None = None,
        of: str = "your messages",
        advice: str = "Please reduce the length of the messages.",
        param: str | None = None,
    ) -> ContextLengthExceeded:
        """Return the error in OpenAI's words, which agents and proxies recognise.

        `protocols.messages` words it as Anthropic does.

        read: the number of tokens that were counted, if `tokens` is an estimate from these. of: a
        name for the content of the prompt.
        """
        estimated = "" if read is None else f" (An estimate: more than {read} were counted.)"
        error = cls(
            f"This model's maximum context length is {context} tokens. However, {of} resulted in "
            f"{tokens} tokens. {advice}{estimated}",
            param=param,
        )
        error.tokens, error.context = tokens, context
        return error


class WrongModelKind(InvalidRequest):
    code = "wrong_model_kind"


class RequestTooLarge(InvalidRequest):
    status = 413
    code = "request_too_large"


class HeadersTooLarge(RequestTooLarge):
    status = 431
    code = "headers_too_large"


class RequestNotReceived(InvalidRequest):
    status = 408
    code = "request_not_received"


class ModelInUse(InvalidRequest):
    status = 409
    code = "model_in_use"


class AuthenticationFailed(MLXManagerError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class WrongAdminToken(AuthenticationFailed):
    code = "invalid_admin_token"


class PermissionDenied(MLXManagerError):
    status = 403
    code = "permission_denied"
    type = "permission_error"


class ModelNotFound(MLXManagerError):
    status = 404
    code = "model_not_found"
    type = "invalid_request_error"


class InvalidSettings(MLXManagerError):
    status = 422
    code = "invalid_settings"
    type = "invalid_request_error"


class ResponseNotFound(MLXManagerError):
    status = 404
    code = "response_not_found"
    type = "invalid_request_error"


class ItemNotFound(MLXManagerError):
    status = 404
    code = "item_not_found"
    type = "invalid_request_error"


class RequestNotFound(MLXManagerError):
    status = 404
    code = "request_not_found"
    type = "invalid_request_error"


class RequestCancelled(MLXManagerError):
    """The owner's cancelling of a request. Clients do not retry after its status."""

    status = 403
    code = "request_cancelled"
    type = "permission_error"


class ModelLoadFailed(MLXManagerError):
    """A lasting failure: another request fails, too, until the owner has fixed the model."""

    status = 400
    code = "model_load_failed"
    type = "invalid_request_error"


class DownloadFailed(ModelLoadFailed):
    status = 503
    code = "download_failed"
    type = "server_error"


class ModelLoadStalled(ModelLoadFailed):
    status = 504
    code = "model_load_stalled"
    type = "timeout_error"


class ModelDown(ModelLoadFailed):
    """The process of a model has failed too often to be started again."""

    status = 503
    code = "model_down"


class ModelNotSupported(ModelLoadFailed):
    status = 400
    code = "model_not_supported"


class ModelGated(ModelLoadFailed):
    status = 403
    code = "model_gated"
    type = "permission_error"


class ModelTooLarge(ModelLoadFailed):
    status = 507
    code = "model_too_large"
    type = "server_error"


class DiskFull(ModelLoadFailed):
    status = 507
    code = "disk_full"
    type = "server_error"


class Overloaded(MLXManagerError):
    status = 429
    code = "overloaded"
    type = "rate_limit_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"


class OutOfMemory(Overloaded):
    status = 503
    code = "out_of_memory"
    type = "server_error"


class StorageFailed(MLXManagerError):
    status = 507
    code = "storage_failed"


class ServerNotReady(MLXManagerError):
    status = 503
    code = "server_not_ready"

    def __init__(self, message: str, *, param: str | None = None, retry_after: int = 1) -> None:
        super().__init__(message, param=param, retry_after=retry_after)


class RemoteUnavailable(ServerNotReady):
    """No server of a model on other machines answers."""

    code = "remote_unavailable"


class RequestTimedOut(MLXManagerError):
    status = 504
    code = "timeout"
    type = "timeout_error"


class GenerationFailed(MLXManagerError):
    code = "generation_failed"


class WorkerFailed(GenerationFailed):
    """The process of a model has ended, or can't be started."""

    code = "worker_failed"


class RemoteFailed(GenerationFailed):
    """A failure of a server on another machine: it broke off, or can't be asked as it is set up."""

    status = 502
    code = "remote_failed"
