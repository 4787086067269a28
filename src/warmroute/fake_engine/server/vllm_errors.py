"""Error responses with the texts of vLLM 0.32."""

from __future__ import annotations

import msgspec


class ApiError(Exception):
    """A request whose response is an error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> bytes:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "BadRequestError", message, param)


def bad_body(detail: str) -> ApiError:
    """vLLM's error for an invalid body. Plain FastAPI would return 422."""
    return ApiError(400, "Bad Request", detail)


def unknown_model(model: str) -> ApiError:
    return ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")


def unknown_response(response_id: str) -> ApiError:
    return ApiError(404, "invalid_request_error", f"Response with id '{response_id}' not found.", "response_id")


def too_long(limit: int, prompt_tokens: int, output_tokens: int) -> ApiError:
    total = prompt_tokens + output_tokens
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested {output_tokens} output tokens "
        f"and your prompt contains {prompt_tokens} input tokens, for a total of {total} tokens. Please reduce the "
        f"length of the input prompt or the number of requested output tokens. "
        f"(parameter=input_tokens, value={prompt_tokens})",
        "input_tokens",
    )


def internal_error() -> ApiError:
    """vLLM's error for a KV cache that it could not load."""
    return ApiError(500, "InternalServerError", "Internal server error")


def engine_failed() -> ApiError:
    return ApiError(
        500, "InternalServerError", "EngineCore encountered an issue. See stack trace (above) for the root cause."
    )


def overloaded() -> ApiError:
    return ApiError(503, "ServiceUnavailableError", "The engine is overloaded; try again later.")
